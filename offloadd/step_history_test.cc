#include "offloadd/step_history.h"

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

// What a job has done whose every step takes a second, half of it a stall, and reads a thousand
// bytes.
WorkDone After(uint64_t steps) {
  WorkDone work;
  work.now_seconds = 100 + static_cast<double>(steps);
  work.sums.phase_nanoseconds[0] = steps * 1'000'000'000;
  work.sums.stall_nanoseconds[0][1] = steps * 500'000'000;
  work.bytes_read = 7 + steps * 1000;
  work.commits = 1 + steps / 2;
  return work;
}

StepHistory Made(uint64_t steps) {
  StepHistory history;
  history.Begin(After(0));
  for (uint64_t step = 1; step <= steps; ++step) {
    history.Call(After(step));
    history.Add(step, 1e9 + static_cast<double>(step), /*resident_bytes=*/step);
  }
  return history;
}

TEST(StepHistoryTest, ARecordHasWhatWasDoneSinceTheStepBefore) {
  const StepHistory history = Made(3);
  ASSERT_EQ(history.records().size(), 3u);
  const StepRecord& last = history.records().back();
  EXPECT_EQ(last.first_step, 3u);
  EXPECT_EQ(last.step_count(), 1u);
  EXPECT_DOUBLE_EQ(last.seconds, 1);
  EXPECT_EQ(last.sums.phase_nanoseconds[0], 1'000'000'000u);
  EXPECT_EQ(last.sums.StallNanoseconds(), 500'000'000u);
  EXPECT_EQ(last.bytes_read, 1000u);
  EXPECT_EQ(last.commits, 0u);
  EXPECT_EQ(history.records()[1].commits, 1u);
  EXPECT_EQ(last.resident_bytes, 3u);
  EXPECT_DOUBLE_EQ(last.end_unix_seconds, 1e9 + 3);
}

TEST(StepHistoryTest, AnyNumberOfStepsFitsWithoutGapsAndTheLastOnesAreSingle) {
  constexpr uint64_t kSteps = 100'000;
  const StepHistory history = Made(kSteps);
  EXPECT_LE(history.records().size(), StepHistory::kRecordsMax);
  uint64_t next = 1, bytes = 0;
  double seconds = 0;
  for (const StepRecord& record : history.records()) {
    EXPECT_EQ(record.first_step, next);
    EXPECT_DOUBLE_EQ(record.seconds, static_cast<double>(record.step_count()));
    EXPECT_EQ(record.bytes_read, record.step_count() * 1000);
    next = record.last_step + 1;
    bytes += record.bytes_read;
    seconds += record.seconds;
  }
  EXPECT_EQ(next, kSteps + 1);
  EXPECT_EQ(bytes, kSteps * 1000);
  EXPECT_DOUBLE_EQ(seconds, kSteps);
  const auto& records = history.records();
  for (size_t i = records.size() - StepHistory::kSingleRecords; i < records.size(); ++i)
    EXPECT_EQ(records[i].step_count(), 1u);
}

TEST(StepHistoryTest, DurationsAreCountedUpToEachBound) {
  const StepHistory history = Made(5);
  EXPECT_EQ(history.durations().count, 5u);
  EXPECT_DOUBLE_EQ(history.durations().sum_seconds, 5);
  for (size_t i = 0; i < StepHistory::kDurationBounds.size(); ++i)
    EXPECT_EQ(history.durations().counts[i], StepHistory::kDurationBounds[i] < 1 ? 0u : 5u);
}

TEST(StepHistoryTest, AClockOrACounterThatGoesBackMakesARecordOfNothing) {
  StepHistory history;
  history.Begin(After(10));
  history.Call(After(3));
  history.Add(1, 1e9, 0);
  EXPECT_EQ(history.records().front().seconds, 0);
  EXPECT_EQ(history.records().front().bytes_read, 0u);
  EXPECT_EQ(history.records().front().sums, proto::StepSums());
}

}  // namespace
}  // namespace offload::daemon

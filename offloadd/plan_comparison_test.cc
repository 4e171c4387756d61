#include "offloadd/plan_comparison.h"

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

StepRecord Record(uint64_t step) {
  StepRecord record;
  record.first_step = record.last_step = step;
  record.seconds = 2;
  record.bytes_read = 100 + step;
  record.bytes_written = 10;
  record.commits = step % 4 == 0 ? 1 : 0;
  record.sums.phase_nanoseconds[0] = 1'500'000'000;
  record.sums.stall_nanoseconds[0][1] = 500'000'000;
  return record;
}

TEST(PlanComparisonTest, CountsStepsAfterTheOneThatWasUnderWay) {
  PlanComparison comparison;
  for (uint64_t step = 7; step <= 11; ++step) comparison.Add(Record(step));
  EXPECT_EQ(comparison.steps().first_step, 8u);
  EXPECT_EQ(comparison.steps().step_count, 4u);
  EXPECT_EQ(comparison.steps().checkpoints, 1u);
  EXPECT_EQ(comparison.steps().bytes_read, 108u + 109 + 110 + 111);
  EXPECT_EQ(comparison.steps().bytes_written, 40u);
  EXPECT_DOUBLE_EQ(comparison.steps().seconds, 8);
  EXPECT_DOUBLE_EQ(comparison.steps().compute_seconds, 4);
}

TEST(PlanComparisonTest, AnotherPlanBeginsAnew) {
  PlanComparison comparison;
  for (uint64_t step = 1; step <= 5; ++step) comparison.Add(Record(step));
  comparison.Begin();
  EXPECT_EQ(comparison.steps().step_count, 0u);
  for (uint64_t step = 6; step <= 8; ++step) comparison.Add(Record(step));
  EXPECT_EQ(comparison.steps().first_step, 7u);
  EXPECT_EQ(comparison.steps().step_count, 2u);
}

// Of threads that wait at once each counts: then nothing is left.
TEST(PlanComparisonTest, MoreWaitedThanThereWasIsNoComputing) {
  PlanComparison comparison;
  comparison.Add(Record(1));
  StepRecord record = Record(2);
  record.sums.stall_nanoseconds[1][0] = 5'000'000'000;
  comparison.Add(record);
  EXPECT_DOUBLE_EQ(comparison.steps().compute_seconds, 0);
}

}  // namespace
}  // namespace offload::daemon

#include "offloadd/activity_log.h"

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using Kind = swap::Transfer::Kind;

class ActivityLogTest : public testing::Test {
 protected:
  ActivityLogTest() { log_.SetTensorCount(2); }
  // A transfer that takes a millisecond.
  void Transfer(const swap::Transfer& transfer) {
    auto done = watch_(transfer, [this](absl::Status status) { last_ = std::move(status); });
    clock_.AdvanceNanoseconds(1'000'000);
    done(absl::OkStatus());
  }

  FakeClock clock_;
  ActivityLog log_{&clock_};
  swap::TransferWatch watch_ = log_.Watch();
  absl::Status last_ = absl::UnknownError("never called");
};

TEST_F(ActivityLogTest, BytesAreCountedPerTensor) {
  Transfer({Kind::kRead, 1, 0, 100});
  Transfer({Kind::kRead, 1, 1, 50});
  Transfer({Kind::kWrite, 0, 0, 7});
  Transfer({.kind = Kind::kScratchWrite, .bytes = 1000});
  Transfer({Kind::kRead, 2, 0, 9});  // of a tensor that there is not
  EXPECT_TRUE(last_.ok()) << last_;
  EXPECT_EQ(log_.tallies()[1].bytes_read, 150u);
  EXPECT_EQ(log_.tallies()[0].bytes_written, 7u);
  EXPECT_EQ(log_.tallies()[0].bytes_read, 0u);
}

TEST_F(ActivityLogTest, WaitsAreCountedByCause) {
  const int64_t begin = log_.NowNanoseconds();
  clock_.AdvanceSeconds(2);
  log_.AddWait(0, ActivityLog::WaitCause::kLate, begin);
  log_.AddWait(5, ActivityLog::WaitCause::kLate, begin);
  EXPECT_EQ(log_.tallies()[0].waits[1], 1u);
  EXPECT_EQ(log_.tallies()[0].wait_nanoseconds[1], 2'000'000'000);
  EXPECT_EQ(log_.tallies()[0].waits[0], 0u);
}

TEST_F(ActivityLogTest, TransfersAreKeptOnlyWhileSomebodyTakesThem) {
  Transfer({Kind::kRead, 0, 0, 1});
  EXPECT_TRUE(log_.TakeTransfers().transfers.empty()) << "from now on";
  Transfer({Kind::kRead, 1, 3, 4096});
  const ActivityLog::Taken taken = log_.TakeTransfers();
  ASSERT_EQ(taken.transfers.size(), 1u);
  EXPECT_EQ(taken.transfers[0].transfer.tensor, 1u);
  EXPECT_EQ(taken.transfers[0].transfer.index, 3u);
  EXPECT_EQ(taken.transfers[0].end_nanoseconds - taken.transfers[0].begin_nanoseconds, 1'000'000);
  Transfer({Kind::kRead, 0, 0, 1});
  clock_.AdvanceSeconds(ActivityLog::kPatienceSeconds + 1);
  Transfer({Kind::kRead, 0, 0, 1});
  EXPECT_TRUE(log_.TakeTransfers().transfers.empty()) << "nobody came for them";
}

TEST_F(ActivityLogTest, TheOldestAreDroppedAndCounted) {
  log_.TakeTransfers();
  for (size_t i = 0; i < ActivityLog::kTransfersMax + 10; ++i) {
    watch_({Kind::kRead, 0, static_cast<uint32_t>(i), 1}, [](absl::Status) {})(absl::OkStatus());
  }
  const ActivityLog::Taken first = log_.TakeTransfers();
  EXPECT_EQ(first.dropped, 10u);
  EXPECT_EQ(first.transfers.front().transfer.index, 10u);
  EXPECT_EQ(first.transfers.size(), ActivityLog::kTransfersPerCall);
  EXPECT_TRUE(first.more);
  const ActivityLog::Taken second = log_.TakeTransfers();
  EXPECT_EQ(second.transfers.size(), ActivityLog::kTransfersMax - ActivityLog::kTransfersPerCall);
  EXPECT_EQ(second.dropped, 0u);
  EXPECT_FALSE(second.more);
}

}  // namespace
}  // namespace offload::daemon

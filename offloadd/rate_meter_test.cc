#include "offloadd/rate_meter.h"

#include <deque>
#include <functional>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using Kind = swap::Transfer::Kind;
constexpr uint64_t kMiB = 1 << 20;

class RateMeterTest : public testing::Test {
 protected:
  using Done = std::function<void(absl::Status)>;
  Done Begin(Kind kind, uint64_t bytes) {
    return watch_({.kind = kind, .bytes = bytes}, [this](const absl::Status&) { ++ended_; });
  }
  // So many transfers of a MiB, `depth` at a time, each of which the drive moves in `seconds`, one
  // after the other.
  void Stream(Kind kind, int count, size_t depth, double seconds) {
    std::deque<Done> queue;
    for (int i = 0; i < count; ++i) {
      while (queue.size() >= depth) EndFirst(queue, seconds);
      queue.push_back(Begin(kind, kMiB));
    }
    while (!queue.empty()) EndFirst(queue, seconds);
  }
  void EndFirst(std::deque<Done>& queue, double seconds) {
    clock_.AdvanceSeconds(seconds);
    queue.front()(absl::OkStatus());
    queue.pop_front();
  }

  FakeClock clock_;
  RateMeter meter_{&clock_, 4 * kMiB};
  int told_ = 0, ended_ = 0;
  swap::TransferWatch watch_ = meter_.Watch([this](const swap::Transfer&, Done done) {
    ++told_;
    return done;
  });
};

double Rate(const RateMeter::Sums& sums) {
  return (sums.read_bytes + sums.written_bytes) / sums.seconds;
}

TEST_F(RateMeterTest, ADriveWithEnoughToDoIsMeasured) {
  Stream(Kind::kRead, 200, 8, 0.001);
  Stream(Kind::kScratchWrite, 200, 8, 0.002);
  const RateMeter::Measured measured = meter_.Take();
  EXPECT_NEAR(Rate(measured.reads), 1e3 * kMiB, 0.04e3 * kMiB);
  EXPECT_NEAR(Rate(measured.writes), 0.5e3 * kMiB, 0.02e3 * kMiB);
  EXPECT_EQ(measured.both.seconds, 0);
  EXPECT_EQ(measured.reads.written_bytes + measured.writes.read_bytes, 0);
  EXPECT_EQ(told_, 400);
  EXPECT_EQ(ended_, 400);
  EXPECT_EQ(meter_.Take().reads.seconds, 0);
}

TEST_F(RateMeterTest, ADriveThatWaitsForWorkIsNot) {
  for (int i = 0; i < 100; ++i) {
    Stream(Kind::kRead, 3, 3, 0.001);
    clock_.AdvanceSeconds(1);
  }
  EXPECT_EQ(meter_.Take().reads.seconds, 0);
}

TEST_F(RateMeterTest, BurstsThatEndAtOnceHaveTheirWholeBytes) {
  for (int burst = 0; burst < 10; ++burst) {
    std::deque<Done> queue;
    for (int i = 0; i < 8; ++i) queue.push_back(Begin(Kind::kRead, kMiB));
    clock_.AdvanceSeconds(0.008);
    for (const Done& done : queue) done(absl::OkStatus());
    clock_.AdvanceSeconds(0.1);
  }
  EXPECT_NEAR(Rate(meter_.Take().reads), 1e3 * kMiB, 1);
}

TEST_F(RateMeterTest, DirectionsBesideEachOtherAreApart) {
  const Done read = Begin(Kind::kRead, 8 * kMiB);
  clock_.AdvanceSeconds(1);
  const Done write = Begin(Kind::kWrite, 8 * kMiB);
  clock_.AdvanceSeconds(1);
  read(absl::OkStatus());
  clock_.AdvanceSeconds(3);
  write(absl::OkStatus());
  const RateMeter::Measured measured = meter_.Take();
  EXPECT_DOUBLE_EQ(measured.reads.seconds, 1);
  EXPECT_DOUBLE_EQ(measured.reads.read_bytes, 4 * kMiB);
  EXPECT_DOUBLE_EQ(measured.both.seconds, 1);
  EXPECT_DOUBLE_EQ(measured.both.read_bytes, 4 * kMiB);
  EXPECT_DOUBLE_EQ(measured.both.written_bytes, 2 * kMiB);
  EXPECT_DOUBLE_EQ(measured.writes.seconds, 3);
  EXPECT_DOUBLE_EQ(measured.writes.written_bytes, 6 * kMiB);
}

TEST_F(RateMeterTest, FlushesFailuresAndWhatIsNotThereCountForNothing) {
  const Done flush = Begin(Kind::kCommit, 0);
  Stream(Kind::kWrite, 100, 8, 0.001);
  flush(absl::OkStatus());
  EXPECT_EQ(meter_.Take().writes.seconds, 0);
  const Done failed = Begin(Kind::kRead, 8 * kMiB);
  const Done nothing = Begin(Kind::kRead, 0);
  clock_.AdvanceSeconds(1);
  failed(absl::DataLossError("bad"));
  nothing(absl::OkStatus());
  EXPECT_EQ(meter_.Take().reads.read_bytes, 0);
}

}  // namespace
}  // namespace offload::daemon

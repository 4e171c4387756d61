// The way of operations, over a queue that answers as it is told instead of a kernel.

#include "aio/queue_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"

namespace offload::aio {
namespace {

constexpr uint64_t kBlockBytes = 4096;

// What stands for the kernel, and what it saw.
struct Script {
  std::deque<int> answers;      // of Submit(): > 0 takes at most so many; then all
  std::deque<int64_t> results;  // of transfers in the order taken; then all of their bytes
  bool errors_break = false;
  std::vector<uint64_t> offsets_seen;  // of what was taken, in order
  size_t taken_max = 0;
  bool called_after_break = false;
};
Script script;

class ScriptedQueue final : public KernelQueue {
 public:
  int Submit(std::span<Transfer* const> transfers) override {
    OFFLOAD_CHECK(!transfers.empty());
    script.called_after_break |= broken_;
    size_t count = transfers.size();
    if (!script.answers.empty()) {
      const int answer = script.answers.front();
      script.answers.pop_front();
      if (answer <= 0) {
        broken_ |= script.errors_break && answer == -EBADF;
        return answer;
      }
      count = std::min(count, static_cast<size_t>(answer));
    }
    for (Transfer* const transfer : transfers.first(count)) {
      script.offsets_seen.push_back(transfer->offset_bytes());
      taken_.push_back(transfer);
    }
    script.taken_max = std::max(script.taken_max, taken_.size());
    return static_cast<int>(count);
  }
  bool errors_break() const override { return script.errors_break; }
  size_t Reap(std::span<Completion> completions) override {
    size_t count = 0;
    for (; count < completions.size() && !taken_.empty(); taken_.pop_front()) {
      Transfer* const transfer = taken_.front();
      auto result = static_cast<int64_t>(transfer->left_bytes());
      if (!script.results.empty()) {
        result = script.results.front();
        script.results.pop_front();
      }
      completions[count++] = {transfer, result};
    }
    return count;
  }
  void Wait() override {}
  std::string_view engine() const override { return "scripted"; }

 private:
  std::deque<Transfer*> taken_;
  bool broken_ = false;
};

absl::StatusOr<std::unique_ptr<KernelQueue>> MakeScriptedQueue(int, int, uint32_t) {
  return std::make_unique<ScriptedQueue>();
}

class QueueDeviceTest : public testing::Test {
 protected:
  void SetUp() override { Open(/*queue_depth=*/4); }
  void Open(uint32_t queue_depth) {
    script = {};
    const Geometry geometry = {.size_bytes = uint64_t{1} << 30};
    auto device =
        QueueDevice::Make(MakeScriptedQueue, /*fd=*/-1, geometry, {.queue_depth = queue_depth});
    OFFLOAD_CHECK_OK(device);
    device_ = *std::move(device);
  }

  // Starts reads of two blocks each, one behind the other.
  void Read(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const iovec piece = {blocks_, sizeof(blocks_)};
      const size_t number = outcomes_.size();
      outcomes_.push_back(absl::UnknownError("not called"));
      device_->Read(number * sizeof(blocks_), {&piece, 1}, [this, number](absl::Status status) {
        outcomes_[number] = std::move(status);
        order_.push_back(number);
      });
    }
  }
  void Finish() {
    while (device_->in_flight() > 0) device_->Poll(/*wait=*/true);
  }
  size_t OkCount() const {
    return static_cast<size_t>(std::count(outcomes_.begin(), outcomes_.end(), absl::OkStatus()));
  }

  alignas(4096) std::byte blocks_[2 * kBlockBytes];
  std::unique_ptr<Device> device_;
  std::vector<absl::Status> outcomes_;
  std::vector<size_t> order_;
};

TEST_F(QueueDeviceTest, NoMoreThanTheDepthIsWithTheKernelAndAllOthersFollow) {
  Read(50);
  Finish();
  EXPECT_EQ(OkCount(), 50u);
  EXPECT_EQ(script.taken_max, 4u);
  EXPECT_TRUE(std::is_sorted(script.offsets_seen.begin(), script.offsets_seen.end()));
}

TEST_F(QueueDeviceTest, AnyDepthIsOneAtLeast) {
  Open(/*queue_depth=*/0);
  Read(3);
  Finish();
  EXPECT_EQ(OkCount(), 3u);
  EXPECT_EQ(script.taken_max, 1u);
}

TEST_F(QueueDeviceTest, MoreCompletionsThanOneCallReturnsAreAllTaken) {
  Open(/*queue_depth=*/200);
  Read(200);
  device_->Poll(/*wait=*/false);
  EXPECT_EQ(OkCount(), 200u);
}

TEST_F(QueueDeviceTest, AShortTransferGoesOnBehindWhatItMovedBeforeAllThatWaits) {
  script.results = {kBlockBytes};
  Read(5);
  Finish();
  EXPECT_EQ(OkCount(), 5u);
  const std::vector<uint64_t> expected = {0, 2, 4, 6, 1, 8};
  ASSERT_EQ(script.offsets_seen.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(script.offsets_seen[i], expected[i] * kBlockBytes) << i;
  }
  EXPECT_EQ(device_->counters().short_transfers, 1u);
}

TEST_F(QueueDeviceTest, InterruptedTransfersAreRepeated) {
  script.results = {-EINTR, -EAGAIN, -EINTR};
  Read(2);
  Finish();
  EXPECT_EQ(OkCount(), 2u);
  EXPECT_EQ(device_->counters().retries, 3u);
}

TEST_F(QueueDeviceTest, WhatTheQueueDidNotTakeIsOfferedAgainInOrder) {
  script.answers = {1, -EINTR, 2, -EAGAIN, 0, -EBUSY, -ENOMEM, 1, 3};
  Read(9);
  Finish();
  EXPECT_EQ(OkCount(), 9u);
  EXPECT_TRUE(script.answers.empty());
  EXPECT_TRUE(std::is_sorted(script.offsets_seen.begin(), script.offsets_seen.end()));
}

TEST_F(QueueDeviceTest, ARefusalEndsTheFirstOperationAlone) {
  script.answers = {1, -EFAULT};
  Read(6);
  Finish();
  EXPECT_EQ(OkCount(), 5u);
  EXPECT_TRUE(absl::IsInvalidArgument(outcomes_[1])) << outcomes_[1];
}

TEST_F(QueueDeviceTest, ABrokenQueueFinishesWhatItTookAndEndsAllOthersWithItsError) {
  script.errors_break = true;
  script.answers = {2, -EBADF};
  Read(9);
  Finish();
  EXPECT_EQ(OkCount(), 2u);
  for (size_t i = 2; i < 9; ++i) EXPECT_TRUE(absl::IsFailedPrecondition(outcomes_[i])) << i;
  Read(1);
  Finish();
  EXPECT_TRUE(absl::IsFailedPrecondition(outcomes_[9])) << outcomes_[9];
  EXPECT_FALSE(script.called_after_break);
}

TEST_F(QueueDeviceTest, ABrokenQueueEndsATransferThatWouldHaveGoneOn) {
  script.errors_break = true;
  script.answers = {1, -EBADF};
  script.results = {kBlockBytes};
  Read(2);
  Finish();
  EXPECT_TRUE(absl::IsFailedPrecondition(outcomes_[0])) << outcomes_[0];
  EXPECT_FALSE(script.called_after_break);
}

TEST_F(QueueDeviceTest, OperationsOfACallbackReachTheKernelInTheSamePoll) {
  const iovec piece = {blocks_, sizeof(blocks_)};
  device_->Read(0, {&piece, 1}, [this](absl::Status) { Read(1); });
  EXPECT_EQ(device_->Poll(/*wait=*/true), 1u);
  EXPECT_EQ(script.offsets_seen.size(), 2u);
  Finish();
  EXPECT_EQ(OkCount(), 1u);
}

TEST_F(QueueDeviceTest, DestructorWaitsForAllThatIsTaken) {
  Read(4);
  device_->Poll(/*wait=*/false);
  Read(20);
  device_.reset();
  EXPECT_EQ(OkCount(), 24u);
}

}  // namespace
}  // namespace offload::aio

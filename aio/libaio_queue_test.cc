// The answers of io_submit that a healthy kernel never gives. io_submit below stands before the
// library's, and goes on to the kernel when its script is at its end.

#include <gtest/gtest.h>
#include <libaio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "aio/device.h"
#include "aio/test_file.h"
#include "base/mapped_region.h"

namespace {

struct Script {
  std::deque<long> answers;  // > 0: take at most so many; else the answer itself
  bool refuses_flushes = false;
  int repeated_answer = 0;  // once the answers are at their end, unless 0
  int flushes_seen = 0;
};
Script script;

}  // namespace

extern "C" int io_submit(io_context_t context, long count, iocb** controls) {
  long limit = count;
  if (!script.answers.empty()) {
    const long answer = script.answers.front();
    script.answers.pop_front();
    if (answer <= 0) return static_cast<int>(answer);
    limit = std::min(limit, answer);
  } else if (script.repeated_answer != 0) {
    return script.repeated_answer;
  }
  for (long i = 0; i < limit; ++i) {
    if (controls[i]->aio_lio_opcode != IO_CMD_FDSYNC) continue;
    ++script.flushes_seen;
    if (!script.refuses_flushes) continue;
    if (i == 0) return -EINVAL;
    limit = i;  // the kernel takes those before it first
  }
  const long taken = ::syscall(SYS_io_submit, context, limit, controls);
  return taken < 0 ? -errno : static_cast<int>(taken);
}

namespace offload::aio {
namespace {

constexpr uint64_t kFileBytes = 1 << 20;

class LibaioQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    script = {};
    auto device = OpenDevice(file_.Open(), {.engine = Engine::kLibaio, .queue_depth = 8});
    if (!device.ok()) GTEST_SKIP() << device.status();
    device_ = *std::move(device);
    auto memory = MappedRegion::Anonymous(kFileBytes);
    ASSERT_TRUE(memory.ok());
    memory_ = *std::move(memory);
  }
  void TearDown() override { script = {}; }

  // Starts writes of a page each, and a flush behind every third; returns all outcomes.
  std::vector<absl::Status> WriteAndFlush(size_t count) {
    std::vector<absl::Status> outcomes(count, absl::UnknownError("not called"));
    for (size_t i = 0; i < count; ++i) {
      const auto done = [&outcomes, i](absl::Status status) { outcomes[i] = std::move(status); };
      const iovec piece = {memory_.data() + i * 4096, 4096};
      i % 3 == 2 ? device_->Flush(done) : device_->Write(i * 4096, {&piece, 1}, done);
    }
    while (device_->in_flight() > 0) device_->Poll(/*wait=*/true);
    return outcomes;
  }
  static bool AllOk(const std::vector<absl::Status>& outcomes) {
    return std::all_of(outcomes.begin(), outcomes.end(),
                       [](const absl::Status& status) { return status.ok(); });
  }

  TestFile file_{kFileBytes};
  MappedRegion memory_;
  std::unique_ptr<Device> device_;
};

TEST_F(LibaioQueueTest, FlushesGoToTheKernel) {
  EXPECT_TRUE(AllOk(WriteAndFlush(30)));
  EXPECT_EQ(script.flushes_seen, 10);
  EXPECT_EQ(device_->counters().flushes, 10u);
}

TEST_F(LibaioQueueTest, RefusedFlushesAreDoneByAThreadFromThenOn) {
  script.refuses_flushes = true;
  EXPECT_TRUE(AllOk(WriteAndFlush(30)));
  EXPECT_EQ(device_->counters().flushes, 10u);
  const int seen = script.flushes_seen;
  EXPECT_GT(seen, 0);
  EXPECT_LT(seen, 10) << "those that were on their way";
  EXPECT_TRUE(AllOk(WriteAndFlush(30)));
  EXPECT_EQ(script.flushes_seen, seen);
}

TEST_F(LibaioQueueTest, DestructorWaitsForAFlushOnTheThread) {
  script.refuses_flushes = true;
  int calls = 0;
  for (int i = 0; i < 5; ++i) {
    device_->Flush([&](absl::Status status) {
      EXPECT_EQ(status, absl::OkStatus());
      ++calls;
    });
    device_->Poll(/*wait=*/false);
  }
  device_.reset();
  EXPECT_EQ(calls, 5);
}

TEST_F(LibaioQueueTest, ShortCountsInterruptionsAndStallsAreGoneThrough) {
  script.answers = {1, -EINTR, 2, -EAGAIN, 0, 1, -EBUSY, -ENOMEM, -EAGAIN, 3, -EINTR, 1};
  EXPECT_TRUE(AllOk(WriteAndFlush(40)));
  EXPECT_TRUE(script.answers.empty());
}

TEST_F(LibaioQueueTest, ARefusalConcernsTheFirstOperationOnly) {
  script.answers = {1, -EFAULT};
  const std::vector<absl::Status> outcomes = WriteAndFlush(8);
  EXPECT_EQ(std::count_if(outcomes.begin(), outcomes.end(),
                          [](const absl::Status& status) { return status.ok(); }),
            7);
  EXPECT_TRUE(absl::IsInvalidArgument(outcomes[1])) << outcomes[1];
  EXPECT_EQ(device_->counters().write_errors, 1u);
}

TEST_F(LibaioQueueTest, AKernelThatTakesNothingAnyMoreEndsEveryOperationWithAnError) {
  script.repeated_answer = -EAGAIN;
  for (const absl::Status& outcome : WriteAndFlush(6)) {
    EXPECT_TRUE(absl::IsUnavailable(outcome) || absl::IsDataLoss(outcome)) << outcome;
  }
  EXPECT_EQ(device_->counters().write_errors, 4u);
  EXPECT_EQ(device_->counters().flush_errors, 2u);
}

}  // namespace
}  // namespace offload::aio

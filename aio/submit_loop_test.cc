#include "aio/submit_loop.h"

#include <gtest/gtest.h>

#include <vector>

namespace offload::aio {
namespace {

// Answers as told; after the script, takes whatever is queued.
struct ScriptedKernel {
  int queued;
  std::vector<int> answers;
  int completions = 0;
  size_t next = 0;
  int submit_count = 0, reap_count = 0, pause_count = 0;
  bool repeats_last = false;

  SubmitResult Run() {
    return SubmitAll([this] { return queued; }, [this] { return Submit(); },
                     [this] { return Reap(); }, [this](int) { ++pause_count; });
  }
  int Submit() {
    ++submit_count;
    int answer = queued;
    if (next < answers.size()) answer = answers[next++];
    if (repeats_last && next == answers.size()) --next;
    if (answer > 0) queued -= answer;
    return answer;
  }
  bool Reap() {
    ++reap_count;
    return completions > 0 && completions-- > 0;
  }
};

TEST(SubmitLoopTest, NothingQueuedCallsNobody) {
  ScriptedKernel kernel{0, {}};
  EXPECT_EQ(kernel.Run().submitted, 0u);
  EXPECT_EQ(kernel.submit_count, 0);
}

TEST(SubmitLoopTest, ShortCountsGoOnUntilAllAreTaken) {
  ScriptedKernel kernel{10, {3, 1, 4}};
  const SubmitResult result = kernel.Run();
  EXPECT_EQ(result.submitted, 10u);
  EXPECT_EQ(result.error, 0);
  EXPECT_EQ(kernel.submit_count, 4);
  EXPECT_EQ(kernel.pause_count, 0);
}

TEST(SubmitLoopTest, InterruptionIsRepeatedWithoutReaping) {
  ScriptedKernel kernel{4, {-EINTR, 2, -EINTR, -EINTR}};
  EXPECT_EQ(kernel.Run().submitted, 4u);
  EXPECT_EQ(kernel.reap_count, 0);
}

class SubmitLoopStallTest : public testing::TestWithParam<int> {};

TEST_P(SubmitLoopStallTest, ReapsFirstAndPausesOnlyWhenNothingCouldBeReaped) {
  ScriptedKernel kernel{4, {GetParam(), GetParam(), GetParam()}, /*completions=*/2};
  const SubmitResult result = kernel.Run();
  EXPECT_EQ(result.submitted, 4u);
  EXPECT_EQ(result.error, 0);
  EXPECT_EQ(kernel.reap_count, 3);
  EXPECT_EQ(kernel.pause_count, 1);
}

TEST_P(SubmitLoopStallTest, EndlessStallEndsWithItsError) {
  ScriptedKernel kernel{4, {1, GetParam()}};
  kernel.repeats_last = true;
  const SubmitResult result = kernel.Run();
  EXPECT_EQ(result.submitted, 1u);
  EXPECT_EQ(result.error, GetParam() == 0 ? EIO : -GetParam());
  EXPECT_EQ(kernel.submit_count, 1 + kSubmitStallsMax);
  EXPECT_EQ(kernel.queued, 3);
}

TEST_P(SubmitLoopStallTest, ProgressStartsTheCountAnew) {
  ScriptedKernel kernel{3, {}};
  for (int round = 0; round < 2; ++round) {
    kernel.answers.insert(kernel.answers.end(), kSubmitStallsMax - 1, GetParam());
    kernel.answers.push_back(1);
  }
  EXPECT_EQ(kernel.Run().error, 0);
}

INSTANTIATE_TEST_SUITE_P(Answers, SubmitLoopStallTest,
                         testing::Values(0, -EAGAIN, -EBUSY, -ENOMEM));

TEST(SubmitLoopTest, EndlessInterruptionEndsToo) {
  ScriptedKernel kernel{1, {-EINTR}};
  kernel.repeats_last = true;
  EXPECT_EQ(kernel.Run().error, EINTR);
}

TEST(SubmitLoopTest, FatalErrorsStopAtOnceAndTellHowManyWereTaken) {
  for (const int fatal : {EBADF, EFAULT, EINVAL, ENXIO, EOPNOTSUPP, EEXIST, EBADR, EPERM}) {
    ScriptedKernel kernel{5, {2, -fatal}};
    const SubmitResult result = kernel.Run();
    EXPECT_EQ(result.submitted, 2u);
    EXPECT_EQ(result.error, fatal);
    EXPECT_EQ(kernel.submit_count, 2);
  }
}

}  // namespace
}  // namespace offload::aio

#include "offloadd/core_share.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

// What was given to the threads, by its number, in order.
class CoreShareTest : public testing::Test {
 protected:
  CoreShareTest() {
    share_.Start([](std::function<void()> work) { work(); }, 4);
  }
  void Run(int count) {
    for (int i = 0; i < count; ++i)
      share_.Run([this, number = next_++] { started_.push_back(number); });
  }
  void ExpectStarted(int count) const {
    EXPECT_EQ(started_.size(), static_cast<size_t>(count));
    EXPECT_TRUE(std::ranges::is_sorted(started_));
  }

  CoreShare share_;
  std::vector<int> started_;
  int next_ = 0;
};

TEST_F(CoreShareTest, AllThreadsAreUsedAtFirst) {
  Run(6);
  ExpectStarted(4);
}

TEST_F(CoreShareTest, WhatEndsLetsTheNextOneStart) {
  share_.SetWidth(2);
  Run(5);
  for (int started = 2; started < 5; ++started) {
    ExpectStarted(started);
    share_.Finished();
  }
  ExpectStarted(5);
  for (int running = 2; running > 0; --running) share_.Finished();
  Run(3);
  ExpectStarted(7);
}

TEST_F(CoreShareTest, AWiderShareStartsWhatWaitsAndANarrowerOneEndsNothing) {
  share_.SetWidth(1);
  Run(6);
  ExpectStarted(1);
  share_.SetWidth(3);
  ExpectStarted(3);
  share_.SetWidth(1);
  for (int i = 0; i < 2; ++i) share_.Finished();
  ExpectStarted(3);
  share_.Finished();
  ExpectStarted(4);
}

// As where threads are simulated: what is run may end, and ask for more, before Run() returns.
TEST_F(CoreShareTest, WorkMayRunAndFinishAtOnce) {
  share_.SetWidth(1);
  share_.Run([this] {
    Run(2);
    ExpectStarted(0);
    share_.Finished();
  });
  ExpectStarted(1);
  share_.Finished();
  ExpectStarted(2);
}

}  // namespace
}  // namespace offload::daemon

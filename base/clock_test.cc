#include "base/clock.h"

#include <gtest/gtest.h>

namespace offload {
namespace {

TEST(ClockTest, RealTimeNeverGoesBack) {
  int64_t previous = Clock::Real().NowNanoseconds();
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = Clock::Real().NowNanoseconds();
    ASSERT_GE(now, previous);
    previous = now;
  }
}

TEST(ClockTest, FakeTimeMovesOnlyWhenTold) {
  FakeClock clock;
  EXPECT_EQ(clock.NowNanoseconds(), 0);
  clock.AdvanceSeconds(1.5);
  clock.AdvanceNanoseconds(7);
  EXPECT_EQ(clock.NowNanoseconds(), 1'500'000'007);
  EXPECT_DOUBLE_EQ(clock.NowSeconds(), 1.500000007);
}

}  // namespace
}  // namespace offload

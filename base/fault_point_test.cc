#include "base/fault_point.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>

namespace offload {
namespace {

void PassTimes(const char* name, int count) {
  for (int i = 0; i < count; ++i) FaultPoint(name);
}

TEST(FaultPointTest, UnarmedPointsDoNothing) { PassTimes("store.after_data_flush", 1000); }

TEST(FaultPointTest, UnreadableTextsAreRefused) {
  for (const char* text : {"", "a", "a:", "a:0", "a:x", "a:-1", ":1", "a:1:burn", "a:1:kill:b"}) {
    EXPECT_FALSE(ArmFaultPoint(text)) << text;
  }
}

TEST(FaultPointDeathTest, KillsAtItsThirdPassageAndNotBefore) {
  EXPECT_EXIT(
      {
        if (!ArmFaultPoint("a.b:3")) std::_Exit(1);
        PassTimes("a.b", 3);
        std::_Exit(0);
      },
      testing::KilledBySignal(SIGKILL), "");
  EXPECT_EXIT(
      {
        if (!ArmFaultPoint("a.b:3")) std::_Exit(1);
        PassTimes("a.b", 2);
        PassTimes("a.other", 10);
        std::_Exit(0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(FaultPointDeathTest, ExitsWhenToldSo) {
  EXPECT_EXIT(
      {
        if (!ArmFaultPoint("a.b:1:exit")) std::_Exit(1);
        PassTimes("a.b", 1);
        std::_Exit(0);
      },
      testing::ExitedWithCode(86), "");
}

// The threadsafe style starts the program anew, so that the environment is read as a real one would
// be.
TEST(FaultPointDeathTest, EnvironmentArmsAFreshProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  ::setenv("OFFLOADD_FAULT_POINT", "from.environment:2", 1);
  EXPECT_EXIT(
      {
        PassTimes("from.environment", 2);
        std::_Exit(0);
      },
      testing::KilledBySignal(SIGKILL), "");
  ::setenv("OFFLOADD_FAULT_POINT", "nonsense", 1);
  EXPECT_EXIT(std::_Exit(0), testing::ExitedWithCode(2), "expected name:count");
  ::unsetenv("OFFLOADD_FAULT_POINT");
}

}  // namespace
}  // namespace offload

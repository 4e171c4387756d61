#include "examples/amx_probe.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace offload::examples {
namespace {

TEST(AmxProbeTest, ChildThatReturnsSurvives) {
  EXPECT_TRUE(SurvivesInChild([] {}));
}

TEST(AmxProbeTest, ChildThatMeetsAnIllegalInstructionDoesNot) {
  EXPECT_FALSE(SurvivesInChild([] {
    signal(SIGILL, SIG_DFL);
    raise(SIGILL);
  }));
}

}  // namespace
}  // namespace offload::examples

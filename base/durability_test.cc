#include "base/durability.h"

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload {
namespace {

TEST(DurabilityTest, IsEveryStepUnlessItIsSaid) {
  for (const char* text : {"", "step"}) {
    const auto durability = ParseDurability(text);
    ASSERT_TRUE(durability.ok()) << durability.status();
    EXPECT_EQ(durability->steps, 1u);
    EXPECT_FALSE(durability->has_intervals());
  }
  EXPECT_FALSE(ParseDurability("checkpoint:1")->has_intervals()) << "is the same";
}

TEST(DurabilityTest, IsACountOfStepsOrATime) {
  EXPECT_EQ(ParseDurability("checkpoint:100")->steps, 100u);
  EXPECT_TRUE(ParseDurability("checkpoint:100")->has_intervals());
  const std::pair<const char*, double> times[] = {
      {"checkpoint:30s", 30}, {"checkpoint:10min", 600}, {"checkpoint:2h", 7200}};
  for (const auto& [text, seconds] : times) {
    const auto durability = ParseDurability(text);
    ASSERT_TRUE(durability.ok()) << durability.status();
    EXPECT_EQ(durability->steps, 0u) << text;
    EXPECT_EQ(durability->seconds, seconds) << text;
    EXPECT_TRUE(durability->has_intervals()) << text;
  }
}

TEST(DurabilityTest, NothingElseIsRead) {
  for (const char* text :
       {"always", "checkpoint", "checkpoint:", "checkpoint:0", "checkpoint:x", "checkpoint:-1",
        "checkpoint: 5", "checkpoint:5 min", "checkpoint:10m", "checkpoint:0min", "checkpoint:1.5h",
        "checkpoint:99999999999", "Step"}) {
    EXPECT_EQ(ErrorIdOf(ParseDurability(text).status()), ErrorId::kBadValue) << text;
  }
}

}  // namespace
}  // namespace offload

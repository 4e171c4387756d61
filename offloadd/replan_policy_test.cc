#include "offloadd/replan_policy.h"

#include <optional>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

constexpr double kGB = 1e9;
constexpr proto::MachineRates kAssumed = {
    .read_bytes_per_second = 2 * kGB, .write_bytes_per_second = 1 * kGB, .latency_seconds = 1e-4};

// A step in which the drives only read, at this rate, and only wrote.
RateMeter::Measured Apart(double read, double write) {
  return {.reads = {.seconds = 1, .read_bytes = read},
          .writes = {.seconds = 1, .written_bytes = write}};
}
// A step in which they did both.
RateMeter::Measured Beside(double seconds, double read_bytes, double written_bytes) {
  return {.both = {.seconds = seconds, .read_bytes = read_bytes, .written_bytes = written_bytes}};
}

TEST(FindRatesTest, WhatADirectionAloneGaveIsItsRate) {
  const RatesFound found = FindRates(Apart(1.2 * kGB, 0.4 * kGB), kAssumed, 1e8);
  EXPECT_DOUBLE_EQ(*found.read, 1.2 * kGB);
  EXPECT_DOUBLE_EQ(*found.write, 0.4 * kGB);
  EXPECT_FALSE(FindRates(Apart(1e7, 1e7), kAssumed, 1e8).read.has_value());
}

TEST(FindRatesTest, BothBesideEachOtherAreAsAssumedBetweenOneAfterTheOtherAndAtOnce) {
  for (const double seconds : {1.0, 1.5, 2.0}) {  // 2 GB read in 1 s and 1 GB written in 1 s
    const RatesFound found = FindRates(Beside(seconds, 2 * kGB, 1 * kGB), kAssumed, 1e8);
    EXPECT_DOUBLE_EQ(*found.read, 2 * kGB) << seconds;
    EXPECT_DOUBLE_EQ(*found.write, 1 * kGB) << seconds;
  }
  const RatesFound slow = FindRates(Beside(4, 2 * kGB, 1 * kGB), kAssumed, 1e8);
  EXPECT_DOUBLE_EQ(*slow.read, 1 * kGB);
  EXPECT_DOUBLE_EQ(*slow.write, 0.5 * kGB);
  const RatesFound fast = FindRates(Beside(0.5, 2 * kGB, 0.4 * kGB), kAssumed, 1e8);
  EXPECT_DOUBLE_EQ(*fast.read, 4 * kGB);
  EXPECT_DOUBLE_EQ(*fast.write, 1 * kGB);
}

TEST(FindRatesTest, OneDirectionAloneExplainsBoth) {
  RateMeter::Measured measured = Apart(1 * kGB, 0);
  measured.both = {.seconds = 4, .read_bytes = 2 * kGB, .written_bytes = 1 * kGB};
  const RatesFound found = FindRates(measured, kAssumed, 1e8);
  EXPECT_DOUBLE_EQ(*found.read, 1 * kGB);
  EXPECT_DOUBLE_EQ(*found.write, 0.5 * kGB);  // in the two seconds that reads left
}

class ReplanPolicyTest : public testing::Test {
 protected:
  // Steps until there is a change, at most `steps`; 0: there was none.
  uint32_t StepsToChange(const RateMeter::Measured& measured, uint32_t steps) {
    for (uint32_t step = 1; step <= steps; ++step) {
      if (policy_.Step(measured).has_value()) return step;
    }
    return 0;
  }
  ReplanPolicy policy_{{.steps = 4, .bytes = 1e8, .gap_steps = 16}, kAssumed};
};

TEST_F(ReplanPolicyTest, RatesThatAreOffByAQuarterAtMostChangeNothing) {
  EXPECT_EQ(StepsToChange(Apart(1.55 * kGB, 1.2 * kGB), 1000), 0u);
  EXPECT_DOUBLE_EQ(*policy_.found().read, 1.55 * kGB);
  EXPECT_EQ(policy_.assumed().read_bytes_per_second, 2 * kGB);
}

TEST_F(ReplanPolicyTest, TwoJudgementsOfSomeStepsMakeAChange) {
  EXPECT_EQ(StepsToChange(Apart(1.2 * kGB, 1 * kGB), 1000), 8u);
  EXPECT_DOUBLE_EQ(policy_.assumed().read_bytes_per_second, 1.2 * kGB);
  EXPECT_DOUBLE_EQ(policy_.assumed().write_bytes_per_second, 1 * kGB);
  EXPECT_EQ(policy_.assumed().latency_seconds, kAssumed.latency_seconds);
  EXPECT_EQ(StepsToChange(Apart(1.2 * kGB, 1 * kGB), 1000), 0u);  // it is assumed now
}

TEST_F(ReplanPolicyTest, AStepThatIsSlowNowAndThenChangesNothing) {
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(StepsToChange(Apart(1 * kGB, 1 * kGB), 4), 0u);
    EXPECT_EQ(StepsToChange(Apart(2 * kGB, 1 * kGB), 4), 0u);
  }
}

TEST_F(ReplanPolicyTest, ADriveThatIsNowSlowNowFastIsFollowedEverMoreSeldom) {
  uint32_t changes = 0, last_gap = 0, gap = 0;
  for (uint32_t step = 0; step < 20000; ++step, ++gap) {
    const double rate = step / 100 % 2 == 0 ? 1 * kGB : 2 * kGB;
    if (!policy_.Step(Apart(rate, 1 * kGB)).has_value()) continue;
    if (++changes > 2) {
      EXPECT_GE(gap, std::min(last_gap, 1024u));
    }
    last_gap = changes == 1 ? 16 : 2 * last_gap;
    gap = 0;
  }
  EXPECT_GT(changes, 5u);
  EXPECT_LT(changes, 30u);
}

TEST_F(ReplanPolicyTest, WithoutEvidenceItWaits) {
  EXPECT_EQ(StepsToChange(Apart(1e6, 1e6), 40), 0u);
  EXPECT_FALSE(policy_.found().read.has_value());
  // Hundred steps have together what one lacks.
  EXPECT_GT(StepsToChange(Apart(1e6, 1e6), 400), 100u);
}

TEST(ReplanPolicyUnknownTest, APoolThatCouldNotBeMeasuredIsNotJudged) {
  ReplanPolicy policy({}, {});
  for (int step = 0; step < 100; ++step)
    EXPECT_FALSE(policy.Step(Apart(1 * kGB, 1 * kGB)).has_value());
}

}  // namespace
}  // namespace offload::daemon

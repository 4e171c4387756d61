#include "swap/stripe_map.h"

#include <gtest/gtest.h>

#include <limits>

namespace offload::swap {
namespace {

constexpr uint32_t kUnit = 4096;

std::vector<std::vector<uint32_t>> SomeWeights() {
  std::vector<std::vector<uint32_t>> all = {{1}, {16}, std::vector<uint32_t>(16, 16)};
  for (uint32_t a = 1; a <= 5; ++a) {
    for (uint32_t b = 1; b <= 5; ++b) {
      all.push_back({a, b});
      for (uint32_t c = 1; c <= 5; ++c) all.push_back({a, b, c});
    }
  }
  all.push_back({16, 1, 7, 3});
  return all;
}

// Exhaustive over three cycles: walks the store unit by unit and fills each member without a hole.
TEST(StripeMapTest, EveryUnitHasOnePlaceAndMembersHaveNoHoles) {
  for (const auto& weights : SomeWeights()) {
    for (const uint64_t head_bytes : {0, 3 * 4096}) {
      const auto map = StripeMap::Make({head_bytes, kUnit, weights});
      ASSERT_TRUE(map.ok()) << map.status();
      std::vector<uint64_t> filled(weights.size(), 0);
      filled[0] = head_bytes;
      uint32_t total = 0;
      for (const uint32_t weight : weights) total += weight;
      for (uint64_t unit = 0; unit < 3 * total; ++unit) {
        const uint64_t begin = head_bytes + unit * kUnit;
        for (uint32_t member = 0; member < weights.size(); ++member)
          ASSERT_EQ(map->MemberBytes(member, begin), filled[member]);
        const StripeMap::Run run = map->Find(begin);
        ASSERT_EQ(run.offset_bytes, filled[run.member]) << "the next one of that member";
        ASSERT_EQ(run.unit_left_bytes, kUnit);
        const StripeMap::Run inside = map->Find(begin + 1000);
        ASSERT_EQ(inside.member, run.member);
        ASSERT_EQ(inside.offset_bytes, run.offset_bytes + 1000);
        ASSERT_EQ(inside.unit_left_bytes, kUnit - 1000);
        ASSERT_EQ(map->MemberBytes(run.member, begin + 512), filled[run.member] + 512);
        filled[run.member] += kUnit;
      }
      for (uint32_t member = 0; member < weights.size(); ++member)
        EXPECT_EQ(filled[member], (member == 0 ? head_bytes : 0) + 3 * kUnit * weights[member]);
    }
  }
}

TEST(StripeMapTest, TheHeadLiesOnTheFirstMember) {
  const auto map = StripeMap::Make({8 * 4096, kUnit, {1, 3}});
  ASSERT_TRUE(map.ok());
  for (uint64_t at = 0; at < 8 * 4096; at += 512) {
    const StripeMap::Run run = map->Find(at);
    EXPECT_EQ(run.member, 0u);
    EXPECT_EQ(run.offset_bytes, at);
    EXPECT_EQ(run.unit_left_bytes, 8 * 4096 - at);
    EXPECT_EQ(map->MemberBytes(0, at), at);
    EXPECT_EQ(map->MemberBytes(1, at), 0u);
  }
}

TEST(StripeMapTest, TheMembersOfACycleAreSpread) {
  const auto map = StripeMap::Make({0, kUnit, {4, 4}});
  ASSERT_TRUE(map.ok());
  for (uint64_t unit = 1; unit < 16; ++unit)
    EXPECT_NE(map->Find(unit * kUnit).member, map->Find((unit - 1) * kUnit).member);
}

TEST(StripeMapTest, TheLargestOffsetsDoNotOverflow) {
  const auto map = StripeMap::Make({4096, kStripeUnitBytes, std::vector<uint32_t>(16, 16)});
  ASSERT_TRUE(map.ok());
  uint64_t sum = 0;
  for (uint32_t member = 0; member < 16; ++member)
    sum += map->MemberBytes(member, kStripedBytesMax);
  EXPECT_EQ(sum, kStripedBytesMax);
  const StripeMap::Run last = map->Find(kStripedBytesMax - 1);
  EXPECT_LT(last.offset_bytes, map->MemberBytes(last.member, kStripedBytesMax));
}

TEST(StripeMapTest, RefusesNumbersOutsideTheLimits) {
  for (const StripeNumbers& bad :
       {StripeNumbers{0, kUnit, {}}, StripeNumbers{0, kUnit, {0}}, StripeNumbers{0, kUnit, {17}},
        StripeNumbers{0, 0, {1}}, StripeNumbers{0, 1000, {1}}, StripeNumbers{100, kUnit, {1}},
        StripeNumbers{0, kUnit, std::vector<uint32_t>(17, 1)}}) {
    EXPECT_FALSE(StripeMap::Make(bad).ok());
  }
}

TEST(StripeMapTest, WeightsFollowBandwidths) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const struct {
    std::vector<double> bandwidths;
    std::vector<uint32_t> weights;
  } cases[] = {{{5e9}, {1}},         {{3e9, 3e9}, {1, 1}},   {{6e9, 3e9}, {2, 1}},
               {{3e9, 4e9}, {3, 4}}, {{1e9, 16e9}, {1, 16}}, {{1, 1e12}, {1, 16}},
               {{0, 0}, {1, 1}},     {{nan, 2e9}, {1, 16}},  {{infinity, 2e9}, {1, 16}},
               {{-1, 2e9}, {1, 16}}};
  for (const auto& each : cases) EXPECT_EQ(WeightsOf(each.bandwidths), each.weights);
}

}  // namespace
}  // namespace offload::swap

#include "base/random.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>

namespace offload {
namespace {

TEST(RandomTest, SplitMixGivesItsPublishedSequence) {
  uint64_t state = 1234567;
  EXPECT_EQ(SplitMix64(state), 6457827717110365317u);
  EXPECT_EQ(SplitMix64(state), 3203168211198807973u);
}

TEST(RandomTest, OneSeedIsOneSequenceAndAnotherSeedAnother) {
  Random a(1), b(1), c(2);
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    const uint64_t value = a.Next();
    ASSERT_EQ(value, b.Next());
    differs |= value != c.Next();
  }
  EXPECT_TRUE(differs);
}

TEST(RandomTest, BelowReachesEveryValueAndNoOther) {
  Random random(3);
  std::array<int, 7> counts{};
  for (int i = 0; i < 7000; ++i) {
    const uint64_t value = random.Below(7);
    ASSERT_LT(value, 7u);
    ++counts[value];
  }
  for (const int count : counts) EXPECT_GT(count, 800);
}

TEST(RandomTest, FillWritesEveryByteOfOddSizes) {
  Random random(4);
  std::array<std::byte, 13> seen{};
  for (int i = 0; i < 64; ++i) {
    std::array<std::byte, 13> bytes{};
    random.Fill(bytes);
    for (size_t k = 0; k < bytes.size(); ++k) seen[k] |= bytes[k];
  }
  for (const std::byte value : seen) EXPECT_EQ(value, std::byte{0xff});
}

}  // namespace
}  // namespace offload

#include "kernels/split.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"

namespace offload::kernels {
namespace {

// The low halves at which something changes.
constexpr uint32_t kLowHalves[] = {0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000,
                                   0x8001, 0x8002, 0xFFFE, 0xFFFF};

// What torch's cast does with a finite value: nearest, ties to even.
uint16_t NearestEven(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
bool IsFinite(uint32_t bits) { return (bits & 0x7F800000) != 0x7F800000; }

struct Halves {
  explicit Halves(size_t count) : hi(count), lo(count), ties(count / 8 + 1) {}
  std::vector<uint16_t> hi;
  std::vector<int16_t> lo;
  std::vector<uint8_t> ties;
  size_t tie_count = 0;
};

Halves SplitAll(Isa isa, const std::vector<uint32_t>& master) {
  Halves halves(master.size());
  TieWriter writer{halves.ties.data()};
  Split(isa, master.data(), master.size(), halves.hi.data(), halves.lo.data(), &writer);
  halves.tie_count = writer.position;
  return halves;
}

std::vector<uint32_t> MergeAll(Isa isa, const Halves& halves) {
  std::vector<uint32_t> master(halves.hi.size());
  TieReader reader{halves.ties.data()};
  Merge(isa, halves.hi.data(), halves.lo.data(), master.size(), master.data(), &reader);
  EXPECT_EQ(reader.position, halves.tie_count);
  return master;
}

class SplitTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsSupported(GetParam())) GTEST_SKIP() << "this processor lacks " << IsaName(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(EveryIsa, SplitTest,
                         testing::Values(Isa::kReference, Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return IsaName(info.param); });

TEST_P(SplitTest, EveryHighHalfWithEveryCriticalLowHalfComesBackAndIsNearestEven) {
  std::vector<uint32_t> master;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : kLowHalves) master.push_back((high << 16) | low);
  }
  const Halves halves = SplitAll(GetParam(), master);
  EXPECT_EQ(halves.tie_count, 0x10000u);
  EXPECT_EQ(MergeAll(GetParam(), halves), master);
  for (size_t i = 0; i < master.size(); ++i) {
    if (!IsFinite(master[i])) continue;
    ASSERT_EQ(halves.hi[i], NearestEven(master[i])) << std::hex << master[i];
  }
}

class VectorSplitTest : public SplitTest {};
INSTANTIATE_TEST_SUITE_P(EveryVectorIsa, VectorSplitTest, testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return IsaName(info.param); });

TEST_P(VectorSplitTest, RandomWordsGiveTheHalvesOfTheReference) {
  Random random(1);
  for (size_t count = 0; count < 70; ++count) {
    std::vector<uint32_t> master(count);
    for (uint32_t& word : master) {
      word = static_cast<uint32_t>(random.Next());
      if (random.OneIn(3)) word = (word & 0xFFFF0000) | 0x8000;
    }
    const Halves halves = SplitAll(GetParam(), master);
    const Halves expected = SplitAll(Isa::kReference, master);
    EXPECT_EQ(halves.hi, expected.hi);
    EXPECT_EQ(halves.lo, expected.lo);
    EXPECT_EQ(halves.ties, expected.ties);
    EXPECT_EQ(MergeAll(GetParam(), halves), master);
  }
}

TEST_P(SplitTest, TieBitsContinueWhereTheLastCallStopped) {
  std::vector<uint32_t> master(257);
  for (size_t i = 0; i < master.size(); ++i) {
    master[i] = static_cast<uint32_t>(i * 0x9E3779B9u) & 0xFFFF0000;
    if (i % 3 != 0) master[i] |= 0x8000;
  }
  const Halves whole = SplitAll(GetParam(), master);
  for (size_t cut = 0; cut <= master.size(); ++cut) {
    Halves parts(master.size());
    TieWriter writer{parts.ties.data()};
    Split(GetParam(), master.data(), cut, parts.hi.data(), parts.lo.data(), &writer);
    Split(GetParam(), master.data() + cut, master.size() - cut, parts.hi.data() + cut,
          parts.lo.data() + cut, &writer);
    ASSERT_EQ(parts.hi, whole.hi);
    ASSERT_EQ(parts.ties, whole.ties);
    std::vector<uint32_t> merged(master.size());
    TieReader reader{parts.ties.data()};
    Merge(GetParam(), parts.hi.data(), parts.lo.data(), cut, merged.data(), &reader);
    Merge(GetParam(), parts.hi.data() + cut, parts.lo.data() + cut, master.size() - cut,
          merged.data() + cut, &reader);
    ASSERT_EQ(merged, master);
  }
}

// The rule by its meaning, without tricks on bits: no bf16 value is nearer, and of two equally near
// ones the even one is taken.
TEST(SplitReferenceTest, TheHighHalfIsTheNearestBFloat16) {
  Random random(2);
  std::vector<uint32_t> master(200000);
  for (uint32_t& word : master) {
    do {
      word = static_cast<uint32_t>(random.Next());
      if (random.OneIn(4)) word = (word & 0xFFFF0000) | kLowHalves[random.Below(9)];
    } while ((word & 0x7FFFFFFF) >= 0x7F7F0000);  // below the largest bf16
  }
  const Halves halves = SplitAll(Isa::kReference, master);
  const auto value = [](uint32_t bits) { return double{std::bit_cast<float>(bits)}; };
  for (size_t i = 0; i < master.size(); ++i) {
    const uint32_t below = master[i] & 0xFFFF0000, above = below + 0x10000;
    const double to_below = std::abs(value(master[i]) - value(below));
    const double to_above = std::abs(value(above) - value(master[i]));
    const bool up = to_above < to_below || (to_above == to_below && (below & 0x10000) != 0);
    ASSERT_EQ(halves.hi[i], (up ? above : below) >> 16) << std::hex << master[i];
  }
}

// All 2^32 words in an optimized build, every 61st high half in a slow one.
TEST(SplitExhaustiveTest, IsABijectionOnAllWords) {
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  constexpr uint32_t kStride = 1;
#else
  constexpr uint32_t kStride = 61;
#endif
  std::vector<uint32_t> master(0x10000), merged(0x10000);
  Halves halves(0x10000);
  for (uint32_t high = 0; high < 0x10000; high += kStride) {
    for (uint32_t low = 0; low < 0x10000; ++low) master[low] = (high << 16) | low;
    halves.ties[0] = 0;
    TieWriter writer{halves.ties.data()};
    Split(master.data(), master.size(), halves.hi.data(), halves.lo.data(), &writer);
    ASSERT_EQ(writer.position, 1u);
    TieReader reader{halves.ties.data()};
    Merge(halves.hi.data(), halves.lo.data(), merged.size(), merged.data(), &reader);
    ASSERT_EQ(merged, master) << std::hex << high;
    uint32_t wrong = 0;
    for (uint32_t low = 0; low < 0x10000; ++low) wrong |= halves.hi[low] ^ NearestEven(master[low]);
    ASSERT_TRUE(wrong == 0 || !IsFinite(high << 16)) << std::hex << high;
  }
}

}  // namespace
}  // namespace offload::kernels

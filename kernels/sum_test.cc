#include "kernels/sum.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"

namespace offload::kernels {
namespace {

constexpr Isa kIsas[] = {Isa::kReference, Isa::kAvx2, Isa::kAvx512};
constexpr SumStart kStarts[] = {SumStart::kNothing, SumStart::kZeros, SumStart::kSum};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint16_t Half(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }
float Wide(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }

// Ordinary numbers for the most part; the rest rounds, vanishes or overflows.
float Value(Random& random, bool only_finite) {
  static const float kSpecial[] = {0.0f,
                                   -0.0f,
                                   1e-45f,
                                   -1e-40f,
                                   1.17549435e-38f,
                                   3e38f,
                                   -3e38f,
                                   1e19f,
                                   1.0f,
                                   1.0078125f,
                                   kInfinity,
                                   -kInfinity,
                                   std::bit_cast<float>(0x7FC10000u)};
  const uint64_t kind = random.Below(6);
  if (kind == 0) return kSpecial[random.Below(std::size(kSpecial) - (only_finite ? 8 : 0))];
  if (kind == 1 && !only_finite) return std::bit_cast<float>(static_cast<uint32_t>(random.Next()));
  return static_cast<float>(random.Unit() * 2 - 1);
}

// Values of one dtype, one element off alignment.
struct Values {
  Values(Dtype values_dtype, size_t count, Random& random, bool only_finite = false)
      : dtype(values_dtype), halves(count + 1), words(count + 1) {
    for (size_t i = 1; i <= count; ++i) {
      words[i] = Value(random, only_finite);
      halves[i] = Half(words[i]);
    }
  }
  void* at(size_t begin) {
    return dtype == Dtype::kFloat32 ? static_cast<void*>(&words[1 + begin]) : &halves[1 + begin];
  }
  // The bits of an element; all NaN of fp32 are one, since which operand's bits go on is the
  // compiler's choice.
  uint32_t bits(size_t i) const {
    if (dtype == Dtype::kBFloat16) return halves[1 + i];
    return std::isnan(words[1 + i]) ? 0x7FC00000u : std::bit_cast<uint32_t>(words[1 + i]);
  }

  Dtype dtype;
  std::vector<uint16_t> halves;
  std::vector<float> words;
};

SumRun RunOf(Values& sum, std::vector<Values>& parts, std::vector<const void*>& pointers,
             SumStart start, float factor, size_t begin, size_t count) {
  pointers.clear();
  for (Values& part : parts) pointers.push_back(part.at(begin));
  return {.dtype = sum.dtype,
          .count = count,
          .sum = sum.at(begin),
          .start = start,
          .parts = pointers.data(),
          .part_count = pointers.size(),
          .factor = factor};
}

void ExpectSame(const Values& expected, const Values& got, size_t count) {
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(expected.bits(i), got.bits(i)) << "element " << i;
}

TEST(SumTest, EveryInstructionSetGivesTheBitsOfTheReference) {
  Random random(11);
  for (int round = 0; round < 400; ++round) {
    const Dtype dtype = random.OneIn(2) ? Dtype::kFloat32 : Dtype::kBFloat16;
    const size_t count = 1 + random.Below(200);
    const bool only_finite = random.OneIn(2);
    std::vector<Values> parts;
    for (uint64_t i = 1 + random.Below(5); i > 0; --i)
      parts.emplace_back(dtype, count, random, only_finite);
    const Values before(dtype, count, random, only_finite);
    const float factor = 1.0f / static_cast<float>(1 + random.Below(5));
    for (const SumStart start : kStarts) {
      std::vector<const void*> pointers;
      Values expected = before;
      const bool finite =
          AddParts(Isa::kReference, RunOf(expected, parts, pointers, start, factor, 0, count));
      for (const Isa isa : kIsas) {
        if (!IsSupported(isa)) continue;
        Values sum = before;
        EXPECT_EQ(AddParts(isa, RunOf(sum, parts, pointers, start, factor, 0, count)), finite);
        ExpectSame(expected, sum, count);
        if (HasFailure()) FAIL() << IsaName(isa) << ", round " << round;
      }
    }
  }
}

TEST(SumTest, PartsAddedOneByOneOrInPiecesGiveTheSameBits) {
  Random random(12);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    constexpr size_t kCount = 1000;
    std::vector<Values> parts;
    for (int i = 0; i < 4; ++i) parts.emplace_back(dtype, kCount, random, /*only_finite=*/true);
    const Values before(dtype, kCount, random, /*only_finite=*/true);
    for (const SumStart start : kStarts) {
      std::vector<const void*> pointers;
      Values whole = before, single = before, pieces = before;
      AddParts(RunOf(whole, parts, pointers, start, 0.25f, 0, kCount));
      for (size_t i = 0; i < parts.size(); ++i) {
        std::vector<Values> one = {parts[i]};
        const SumStart next = i == 0 ? start : SumStart::kSum;
        AddParts(RunOf(single, one, pointers, next, 0.25f, 0, kCount));
      }
      for (size_t begin = 0; begin < kCount; begin += 37) {
        const size_t count = std::min<size_t>(37, kCount - begin);
        AddParts(RunOf(pieces, parts, pointers, start, 0.25f, begin, count));
      }
      ExpectSame(whole, single, kCount);
      ExpectSame(whole, pieces, kCount);
    }
  }
}

TEST(SumTest, RoundsAfterEveryOperation) {
  // 256 + 1 is a tie in bf16 that goes to 256, twice; rounded once it would be 258.
  std::vector<uint16_t> ones(40, Half(1)), sum(40, Half(256));
  const void* parts[] = {ones.data(), ones.data()};
  for (const Isa isa : kIsas) {
    if (!IsSupported(isa)) continue;
    EXPECT_TRUE(
        AddParts(isa, {Dtype::kBFloat16, sum.size(), sum.data(), SumStart::kSum, parts, 2}));
    for (const uint16_t half : sum) ASSERT_EQ(Wide(half), 256.0f) << IsaName(isa);
  }
}

TEST(SumTest, ZerosTakeTheSignOfNegativeZeroAndNothingKeepsIt) {
  const std::vector<float> part(20, -0.0f);
  std::vector<float> sum(20, 7.0f);
  const void* parts[] = {part.data()};
  for (const float factor : {1.0f, 0.5f}) {
    AddParts({Dtype::kFloat32, 20, sum.data(), SumStart::kNothing, parts, 1, factor});
    for (const float value : sum) ASSERT_TRUE(value == 0 && std::signbit(value));
    AddParts({Dtype::kFloat32, 20, sum.data(), SumStart::kZeros, parts, 1, factor});
    for (const float value : sum) ASSERT_TRUE(value == 0 && !std::signbit(value));
  }
}

TEST(SumTest, OnePartThatIsNotScaledKeepsItsBits) {
  std::vector<uint16_t> part(33, 0x7FA1), sum(33, 0);
  part[5] = 0xFF91;
  const void* parts[] = {part.data()};
  EXPECT_FALSE(AddParts({Dtype::kBFloat16, 33, sum.data(), SumStart::kNothing, parts, 1}));
  EXPECT_EQ(sum, part);
}

TEST(SumTest, FindsWhatIsNotFiniteWhereverItIs) {
  for (const Isa isa : kIsas) {
    if (!IsSupported(isa)) continue;
    for (const float value : {kInfinity, -kInfinity, std::nanf("")}) {
      for (size_t place = 0; place < 45; ++place) {
        std::vector<float> part(45, 1.0f), other(45, 2.0f), sum(45);
        part[place] = value;
        const void* parts[] = {part.data(), other.data()};
        EXPECT_FALSE(
            AddParts(isa, {Dtype::kFloat32, 45, sum.data(), SumStart::kNothing, parts, 2, 0.5f}))
            << IsaName(isa) << ", element " << place;
        part[place] = 3;
        EXPECT_TRUE(
            AddParts(isa, {Dtype::kFloat32, 45, sum.data(), SumStart::kNothing, parts, 2, 0.5f}));
      }
    }
  }
}

TEST(SumTest, AnOverflowOfTheSumIsNotFinite) {
  const std::vector<float> part(16, 3e38f);
  std::vector<float> sum(16);
  const void* parts[] = {part.data(), part.data()};
  EXPECT_FALSE(AddParts({Dtype::kFloat32, 16, sum.data(), SumStart::kNothing, parts, 2}));
  EXPECT_TRUE(AddParts({Dtype::kFloat32, 16, sum.data(), SumStart::kNothing, parts, 2, 0.5f}));
}

}  // namespace
}  // namespace offload::kernels

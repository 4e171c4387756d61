#include "kernels/square_root.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/implementation.h"
#include "kernels/library_roots.h"

namespace offload::kernels {
namespace {

float Moved(float value, int places) {
  return std::bit_cast<float>(std::bit_cast<int32_t>(value) + places);
}

// A library that is off by a place for some mantissas, by another pattern for each parity of the
// exponent, as those that exist are.
int PlacesOff(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (!std::isnormal(value)) return 0;
  const uint32_t entry = bits & 0x00FFFFFF;
  return entry % 7 == 3 ? 1 : entry % 11 == 5 ? -1 : 0;
}
void TakeRootsCarelessly(std::span<float> values) {
  for (float& value : values) value = Moved(std::sqrt(value), PlacesOff(value));
}
// One that makes normal numbers of subnormal ones first.
void TakeRootsOfNormalNumbers(std::span<float> values) {
  for (float& value : values) {
    const int exponent = value > 0 && !std::isnormal(value) && std::isfinite(value) ? 64 : 0;
    const float normal = std::ldexp(value, exponent);
    value = std::ldexp(Moved(std::sqrt(normal), PlacesOff(normal)), -exponent / 2);
  }
}
void TakeNearestRoots(std::span<float> values) {
  for (float& value : values) value = std::sqrt(value);
}

float Corrected(const SquareRoots& roots, float value) {
  return CorrectRoot(value, std::sqrt(value), roots.corrections());
}

TEST(SquareRootsTest, FollowTheLibraryThatTheyMeasured) {
  const std::optional<SquareRoots> roots = SquareRoots::Measure(TakeRootsCarelessly);
  ASSERT_TRUE(roots.has_value());
  EXPECT_FALSE(roots->AreNearest());
  EXPECT_EQ(roots->sequence(), RootSequence::kNone);
  for (uint32_t bits = 0; bits < 0x7F800000; bits += 4099) {
    const auto value = std::bit_cast<float>(bits);
    std::vector<float> expected = {value};
    TakeRootsCarelessly(expected);
    ASSERT_EQ(Corrected(*roots, value), expected[0]) << value;
  }
}

TEST(SquareRootsTest, FollowALibraryThatMakesSubnormalNumbersNormal) {
  const std::optional<SquareRoots> roots = SquareRoots::Measure(TakeRootsOfNormalNumbers);
  ASSERT_TRUE(roots.has_value());
  int off = 0;
  for (uint32_t bits = 0; bits < 0x7F800000; bits += bits < 0x00800000 ? 61 : 4099) {
    const auto value = std::bit_cast<float>(bits);
    std::vector<float> expected = {value};
    TakeRootsOfNormalNumbers(expected);
    ASSERT_EQ(Corrected(*roots, value), expected[0]) << value;
    if (!std::isnormal(value)) off += expected[0] != std::sqrt(value);
  }
  EXPECT_GT(off, 1000);
  const auto read = SquareRoots::FromBytes(roots->bytes());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(*read, *roots);
}

// Every exponent, the subnormal numbers, what has no root or is its own, and a count that fills no
// vector.
std::vector<float> ManyValues() {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x7F800000; bits += bits < 0x00800000 ? 251 : 16411)
    values.push_back(std::bit_cast<float>(bits));
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {0.0f, -0.0f, -1.0f, infinity, -infinity, std::nanf("")})
    values.push_back(value);
  values.resize(values.size() / 16 * 16 + 5, 3.0f);
  return values;
}

TEST(SquareRootsTest, KnowTheSequenceOfALibrary) {
  for (const RootSequence sequence : {RootSequence::kUnfused12, RootSequence::kFused14}) {
    if (!HasRootsOf(sequence)) continue;
    const auto roots =
        SquareRoots::Measure([&](std::span<float> values) { TakeRootsBy(sequence, values); });
    ASSERT_TRUE(roots.has_value());
    EXPECT_FALSE(roots->AreNearest());
    const std::vector<float> values = ManyValues();
    std::vector<float> expected = values;
    TakeRootsBy(sequence, expected);
    int versions = 0;
    for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
      const Implementation& implementation = ImplementationOf(isa);
      if (!IsSupported(isa) || !implementation.takes_roots_by(sequence)) continue;
      ++versions;
      std::vector<float> taken(values.size());
      implementation.take_roots(sequence, /*of_subnormals=*/true, values.data(), values.size(),
                                taken.data());
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(expected[i])) {
          ASSERT_TRUE(std::isnan(taken[i])) << values[i];
          continue;
        }
        ASSERT_EQ(std::bit_cast<uint32_t>(taken[i]), std::bit_cast<uint32_t>(expected[i]))
            << values[i] << " " << IsaName(isa);
        ASSERT_EQ(Corrected(*roots, values[i]), expected[i]) << values[i];
      }
    }
    EXPECT_EQ(roots->sequence(), versions > 0 ? sequence : RootSequence::kNone);
    EXPECT_EQ(SquareRoots::FromBytes(roots->bytes())->sequence(), roots->sequence());
  }
}

TEST(SquareRootsTest, SayNoSequenceWhereOneRootIsAnother) {
  // The greatest mantissa of an odd exponent, whose root the sequence takes otherwise than here.
  const float odd_one_out = std::bit_cast<float>(0x3FFFFFFFu);
  const auto take_roots = [&](std::span<float> values) {
    const std::vector<float> given(values.begin(), values.end());
    TakeRootsBy(RootSequence::kUnfused12, values);
    for (size_t i = 0; i < given.size(); ++i) {
      const bool is_odd_one = (std::bit_cast<uint32_t>(given[i]) & 0x00FFFFFF) == 0x00FFFFFF;
      const float nearest = std::sqrt(given[i]);
      if (is_odd_one && given[i] > 0) values[i] = Moved(nearest, values[i] == nearest ? -1 : 0);
    }
  };
  const std::optional<SquareRoots> roots = SquareRoots::Measure(take_roots);
  ASSERT_TRUE(roots.has_value());
  EXPECT_EQ(roots->sequence(), RootSequence::kNone);
  std::vector<float> expected = {odd_one_out};
  take_roots(expected);
  EXPECT_EQ(Corrected(*roots, odd_one_out), expected[0]);
}

TEST(SquareRootsTest, LeaveWhatIsNotAPositiveNormalNumberAlone) {
  const std::optional<SquareRoots> roots = SquareRoots::Measure(TakeRootsCarelessly);
  ASSERT_TRUE(roots.has_value());
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {0.0f, -0.0f, infinity, 1e-45f, 1e-39f})
    EXPECT_EQ(std::bit_cast<uint32_t>(Corrected(*roots, value)),
              std::bit_cast<uint32_t>(std::sqrt(value)));
  for (const float value : {-1.0f, -infinity, std::bit_cast<float>(0x7FC00003u)})
    EXPECT_TRUE(std::isnan(Corrected(*roots, value)));
}

TEST(SquareRootsTest, OfALibraryThatRoundsCorrectlyAreTheNearest) {
  const std::optional<SquareRoots> roots = SquareRoots::Measure(TakeNearestRoots);
  ASSERT_TRUE(roots.has_value());
  EXPECT_TRUE(roots->AreNearest());
}

TEST(SquareRootsTest, RefuseALibraryThatTheyCannotFollow) {
  EXPECT_FALSE(SquareRoots::Measure([](std::span<float> values) {
                 for (float& value : values) value = Moved(std::sqrt(value), 2);
               }).has_value());
  // Off by one above 2^100 only: not a matter of mantissa and parity.
  EXPECT_FALSE(SquareRoots::Measure([](std::span<float> values) {
                 for (float& value : values)
                   value = Moved(std::sqrt(value), std::isfinite(value) && value > 0x1p100f);
               }).has_value());
  // That takes subnormal numbers for zeros.
  EXPECT_FALSE(SquareRoots::Measure([](std::span<float> values) {
                 for (float& value : values) value = std::isnormal(value) ? std::sqrt(value) : 0;
               }).has_value());
}

TEST(SquareRootsTest, TravelAsBytes) {
  const std::optional<SquareRoots> roots = SquareRoots::Measure(TakeRootsCarelessly);
  ASSERT_TRUE(roots.has_value());
  EXPECT_EQ(SquareRoots::FromBytes(roots->bytes()), roots);
  EXPECT_FALSE(SquareRoots::FromBytes(roots->bytes().substr(1)).has_value());
  EXPECT_FALSE(SquareRoots::FromBytes("").has_value());
}

}  // namespace
}  // namespace offload::kernels

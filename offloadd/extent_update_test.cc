#include "offloadd/extent_update.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

std::vector<bool> BitsOf(const TieBits& ties, size_t count) {
  TieSource source(ties);
  std::vector<bool> bits;
  for (size_t i = 0; i < count; ++i) bits.push_back(source.reader().Next());
  return bits;
}

TieBits Collect(const std::vector<bool>& bits, uint32_t elements) {
  TieSink sink(elements);
  for (const bool bit : bits) sink.writer().Append(bit);
  return *sink.Finish();
}

TEST(TieBitsTest, SixtyFourBitsFitIntoAWord) {
  std::vector<bool> bits(64);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = i % 3 == 0;
  const TieBits ties = Collect(bits, 1000);
  EXPECT_FALSE(ties.plane.has_value());
  EXPECT_EQ(BitsOf(ties, bits.size()), bits);
}

TEST(TieBitsTest, MoreGoIntoAPlaneOfWholeSectors) {
  std::vector<bool> bits(65);
  bits[0] = bits[64] = true;
  const TieBits ties = Collect(bits, 1000);
  ASSERT_TRUE(ties.plane.has_value());
  EXPECT_EQ(ties.plane->size(), proto::kSectorBytes);
  EXPECT_EQ(BitsOf(ties, bits.size()), bits);
}

TEST(TieBitsTest, NothingOfAnEarlierUseIsLeft) {
  Collect(std::vector<bool>(500, true), 1000);
  { TieSource source(Collect(std::vector<bool>(64, true), 1000)); }
  const TieBits none = Collect({false, false}, 1000);
  EXPECT_EQ(BitsOf(none, 64), std::vector<bool>(64, false));
}

TEST(TieBitsTest, ReadingBeyondTheLastBitGivesZeros) {
  const TieBits one = Collect({true}, 1000);
  const std::vector<bool> bits = BitsOf(one, 200);
  EXPECT_TRUE(bits[0]);
  for (size_t i = 1; i < bits.size(); ++i) EXPECT_FALSE(bits[i]) << i;
}

TEST(ClearResidualTest, DropsTheRangeWithItsTieBitsAndKeepsTheOthers) {
  // Ties at 1, 3, 5, 7 with bits 1, 0, 1, 1.
  std::vector<int16_t> residual = {5, INT16_MIN, 6, INT16_MIN, 7, INT16_MIN, 8, INT16_MIN};
  const TieBits in = Collect({true, false, true, true}, 8);
  const auto out = ClearResidual(residual, 2, 6, in);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(residual, (std::vector<int16_t>{5, INT16_MIN, 0, 0, 0, 0, 8, INT16_MIN}));
  EXPECT_EQ(BitsOf(*out, 3), (std::vector<bool>{true, true, false}));
}

}  // namespace
}  // namespace offload::daemon

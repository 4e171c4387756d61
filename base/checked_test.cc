#include "base/checked.h"

#include <gtest/gtest.h>

namespace offload {
namespace {

TEST(CheckedTest, OverflowIsAMissingValue) {
  EXPECT_EQ(CheckedAdd(UINT64_MAX - 1, 1), UINT64_MAX);
  EXPECT_EQ(CheckedAdd(UINT64_MAX, 1), std::nullopt);
  EXPECT_EQ(CheckedMultiply(1ull << 32, (1ull << 32) - 1), 0xffffffff00000000ull);
  EXPECT_EQ(CheckedMultiply(1ull << 32, 1ull << 32), std::nullopt);
  EXPECT_EQ(CheckedAlignUp(UINT64_MAX - 4095, 4096), UINT64_MAX - 4095);
  EXPECT_EQ(CheckedAlignUp(UINT64_MAX - 4094, 4096), std::nullopt);
}

TEST(CheckedTest, AlignmentRoundsToItsMultiples) {
  EXPECT_EQ(AlignUp(0, 4096), 0u);
  EXPECT_EQ(AlignUp(1, 4096), 4096u);
  EXPECT_EQ(AlignUp(4096, 4096), 4096u);
  EXPECT_EQ(AlignDown(8191, 4096), 4096u);
  EXPECT_TRUE(IsAligned(8192, 4096));
  EXPECT_FALSE(IsAligned(8193, 4096));
  EXPECT_TRUE(IsPowerOfTwo(1));
  EXPECT_FALSE(IsPowerOfTwo(0));
  EXPECT_FALSE(IsPowerOfTwo(12));
}

TEST(CheckedTest, CeilDivideReachesTheTopOfTheRange) {
  EXPECT_EQ(CeilDivide(0, 7), 0u);
  EXPECT_EQ(CeilDivide(8, 7), 2u);
  EXPECT_EQ(CeilDivide(UINT64_MAX, 2), 1ull << 63);
}

TEST(CheckedTest, InsideDoesNotWrapAround) {
  EXPECT_TRUE(IsInside(4096, 4096, 8192));
  EXPECT_FALSE(IsInside(4096, 4097, 8192));
  EXPECT_FALSE(IsInside(UINT64_MAX, 2, 8192));
  EXPECT_FALSE(IsInside(2, UINT64_MAX, 8192));
}

}  // namespace
}  // namespace offload

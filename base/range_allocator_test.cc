#include "base/range_allocator.h"

#include <gtest/gtest.h>

#include <map>

#include "base/random.h"

namespace offload {
namespace {

TEST(RangeAllocatorTest, LendsTheFirstRangeThatFits) {
  RangeAllocator ranges;
  ranges.Add(100, 10);
  ranges.Add(200, 50);
  EXPECT_EQ(ranges.Take(20), 200u);
  EXPECT_EQ(ranges.Take(10), 100u);
  EXPECT_EQ(ranges.Take(31), std::nullopt);
  EXPECT_EQ(ranges.Take(30), 220u);
  EXPECT_EQ(ranges.free_bytes(), 0u);
}

TEST(RangeAllocatorTest, SizesAreRoundedUpToTheAlignmentAndNothingIsOneUnit) {
  RangeAllocator ranges(/*alignment=*/4096);
  ranges.Add(8192, 3 * 4096);
  EXPECT_EQ(ranges.Take(1), 8192u);
  EXPECT_EQ(ranges.Take(0), 12288u);
  EXPECT_EQ(ranges.Take(4097), std::nullopt);
  ranges.Return(12288, 0);
  EXPECT_EQ(ranges.Take(4097), 12288u);
}

TEST(RangeAllocatorTest, ReturnedRangesMergeWithTheirNeighbours) {
  RangeAllocator ranges;
  ranges.Add(0, 30);
  for (const uint64_t offset : {0, 10, 20}) EXPECT_EQ(ranges.Take(10), offset);
  ranges.Return(0, 10);
  ranges.Return(20, 10);
  EXPECT_EQ(ranges.Take(11), std::nullopt);
  ranges.Return(10, 10);
  EXPECT_EQ(ranges.Take(30), 0u);
}

TEST(RangeAllocatorTest, RoomAddedBehindIsOneWithWhatIsThere) {
  RangeAllocator ranges;
  ranges.Add(0, 10);
  ranges.Add(10, 10);
  EXPECT_EQ(ranges.Take(20), 0u);
}

TEST(RangeAllocatorDeathTest, ReturningTwiceIsCaught) {
  RangeAllocator ranges;
  ranges.Add(0, 10);
  EXPECT_EQ(ranges.Take(10), 0u);
  ranges.Return(0, 10);
  EXPECT_DEATH(ranges.Return(0, 10), "range at 0");
  EXPECT_DEATH(ranges.Return(5, 5), "range at 5");
}

TEST(RangeAllocatorTest, LentRangesNeverOverlapAndAllRoomComesBack) {
  constexpr uint64_t kBytes = 1000;
  Random random(7);
  RangeAllocator ranges(/*alignment=*/8);
  ranges.Add(0, kBytes);
  std::map<uint64_t, uint64_t> lent;
  for (int round = 0; round < 20'000; ++round) {
    if (!lent.empty() && random.OneIn(2)) {
      const auto returned = std::next(lent.begin(), random.Below(lent.size()));
      ranges.Return(returned->first, returned->second);
      lent.erase(returned);
      continue;
    }
    const uint64_t size_bytes = 1 + random.Below(120);
    const auto offset = ranges.Take(size_bytes);
    if (!offset.has_value()) continue;
    const auto next = lent.lower_bound(*offset);
    ASSERT_TRUE(next == lent.end() || *offset + size_bytes <= next->first);
    ASSERT_TRUE(next == lent.begin() ||
                std::prev(next)->first + std::prev(next)->second <= *offset);
    ASSERT_LE(*offset + size_bytes, kBytes);
    lent[*offset] = size_bytes;
  }
  for (const auto& [offset, size_bytes] : lent) ranges.Return(offset, size_bytes);
  EXPECT_EQ(ranges.Take(kBytes), 0u);
}

}  // namespace
}  // namespace offload

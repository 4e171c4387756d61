#include "zero3/dimension_order.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

using Sizes = std::vector<int64_t>;

TEST(DimensionOrderTest, RowsHaveNone) {
  EXPECT_TRUE(OrderOf(Sizes{3, 4, 5}, Sizes{20, 5, 1}).empty());
  EXPECT_TRUE(OrderOf(Sizes{7}, Sizes{1}).empty());
  EXPECT_TRUE(OrderOf(Sizes{}, Sizes{}).empty());
}

TEST(DimensionOrderTest, OutermostDimensionComesFirst) {
  EXPECT_EQ(OrderOf(Sizes{3, 4}, Sizes{1, 3}), (DimensionOrder{1, 0}));
  EXPECT_EQ(OrderOf(Sizes{8, 4, 3, 2}, Sizes{24, 1, 8, 4}), (DimensionOrder{0, 2, 3, 1}));
}

TEST(DimensionOrderTest, DimensionsOfOneElementDoNotCount) {
  EXPECT_TRUE(OrderOf(Sizes{8, 4, 1, 1}, Sizes{4, 1, 4, 4}).empty());
  EXPECT_EQ(OrderOf(Sizes{1, 4, 3, 2}, Sizes{1, 1, 8, 4}), (DimensionOrder{2, 3, 1}));
}

TEST(DimensionOrderTest, StridesComeBack) {
  EXPECT_EQ(StridesOf(Sizes{3, 4, 5}, {}), (Sizes{20, 5, 1}));
  EXPECT_EQ(StridesOf(Sizes{8, 4, 3, 2}, {0, 2, 3, 1}), (Sizes{24, 1, 8, 4}));
  EXPECT_EQ(StridesOf(Sizes{3, 4}, {1, 0}), (Sizes{1, 3}));
}

// Elements are numbered as they lie; element {i, j, k} of the rows has to be the one that strides
// say.
template <typename Word>
void ExpectRows(const Sizes& sizes, const DimensionOrder& order) {
  const Sizes strides = StridesOf(sizes, order);
  const auto count = static_cast<uint64_t>(sizes[0] * sizes[1] * sizes[2]);
  std::vector<Word> elements(count), rows(count), back(count);
  std::iota(elements.begin(), elements.end(), Word{0});
  for (uint64_t begin = 0; begin < count; begin += 7) {
    const RowRange range{begin, std::min<uint64_t>(7, count - begin)};
    CopyToRows(sizes, order, sizeof(Word), range,
               reinterpret_cast<const std::byte*>(elements.data()),
               reinterpret_cast<std::byte*>(rows.data() + begin));
    CopyFromRows(sizes, order, sizeof(Word), range,
                 reinterpret_cast<const std::byte*>(rows.data() + begin),
                 reinterpret_cast<std::byte*>(back.data()));
  }
  uint64_t row = 0;
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      for (int64_t k = 0; k < sizes[2]; ++k, ++row)
        ASSERT_EQ(rows[row], i * strides[0] + j * strides[1] + k * strides[2]) << row;
    }
  }
  EXPECT_EQ(back, elements);
}

TEST(DimensionOrderTest, RowsAreCopiedInPieces) {
  for (const DimensionOrder& order :
       {DimensionOrder{}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}) {
    ExpectRows<uint32_t>({3, 4, 5}, order);
    ExpectRows<uint16_t>({5, 2, 7}, order);
    ExpectRows<uint64_t>({4, 3, 6}, order);
  }
  ExpectRows<uint32_t>({6, 1, 5}, {2, 0});
}

}  // namespace
}  // namespace offload::zero3

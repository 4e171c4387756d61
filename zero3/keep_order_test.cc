#include "zero3/keep_order.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

std::vector<uint32_t> Numbers(uint32_t count) {
  std::vector<uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

TEST(SpreadTest, FirstOfThemLieEvenlyAmongAll) {
  for (const uint32_t count : {0u, 1u, 2u, 5u, 32u, 100u}) {
    std::vector<uint32_t> spread = Numbers(count);
    Spread(spread);
    std::vector<uint32_t> sorted = spread;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, Numbers(count)) << "nothing is lost";
  }
  std::vector<uint32_t> spread = Numbers(64);
  Spread(spread);
  for (uint32_t kept = 4; kept <= 64; ++kept) {
    std::vector<uint32_t> first(spread.begin(), spread.begin() + kept);
    std::sort(first.begin(), first.end());
    for (uint32_t i = 0; i + 1 < kept; ++i)
      EXPECT_LE(first[i + 1] - first[i], 2 * 64 / kept) << kept << " stay";
  }
}

TEST(SpreadTest, MoreOfThemAreTheSameAndOthers) {
  std::vector<uint32_t> spread = Numbers(8);
  Spread(spread);
  EXPECT_EQ(spread, std::vector<uint32_t>({0, 4, 2, 6, 1, 5, 3, 7}));
}

proto::Catalogue Catalogue(const std::vector<uint64_t>& extents) {
  std::vector<proto::Tensor> tensors;
  for (size_t i = 0; i < extents.size(); ++i) {
    const auto elements = static_cast<int64_t>(extents[i] * proto::kExtentElements);
    tensors.push_back({.name = std::to_string(i), .shape = {elements}});
  }
  auto catalogue = proto::BuildCatalogue(std::move(tensors));
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  return *std::move(catalogue);
}

TEST(StateOrderTest, EveryTensorKeepsTheSameShare) {
  const std::vector<uint64_t> extents = {64, 16, 4, 64};
  const StateOrder order(Catalogue(extents));
  for (uint64_t percent = 0; percent <= 100; percent += 5) {
    const std::vector<uint32_t> leading = order.Leading(order.total_bytes() * percent / 100);
    for (size_t i = 0; i < extents.size(); ++i) {
      EXPECT_NEAR(leading[i], extents[i] * percent / 100.0, 1.01) << percent << " % of " << i;
    }
  }
}

TEST(StateOrderTest, SumsAreThoseOfTheExtentsThatStay) {
  const proto::Catalogue catalogue = Catalogue({3, 2, 5});
  const StateOrder order(catalogue);
  std::vector<uint32_t> last(3, 0);
  for (uint64_t bytes = 0; bytes <= order.total_bytes(); bytes += 300'001) {
    const std::vector<uint32_t> leading = order.Leading(bytes);
    uint64_t sum = 0;
    for (size_t i = 0; i < leading.size(); ++i) {
      EXPECT_GE(leading[i], last[i]) << "what stays, stays with more memory";
      for (uint32_t extent = 0; extent < leading[i]; ++extent)
        sum += proto::StateBytes(catalogue.store_tensors[i], extent);
    }
    EXPECT_EQ(order.Within(bytes), sum);
    EXPECT_LE(sum, bytes);
    last = leading;
  }
  EXPECT_EQ(order.Leading(order.total_bytes()), std::vector<uint32_t>({3, 2, 5}));
}

}  // namespace
}  // namespace offload::zero3

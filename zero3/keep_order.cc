#include "zero3/keep_order.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <tuple>

namespace offload::zero3 {
namespace {

struct Extent {
  uint64_t share = 0;  // of its tensor's extents that come before it, in 2^-32
  uint32_t rank = 0;   // of its tensor, spread
  uint32_t tensor = 0, index = 0;
};

// Half an extent counts as before: tensors of one extent stay when half of the others do.
uint64_t ShareBefore(uint32_t index, uint32_t count) {
  return ((uint64_t{2} * index + 1) << 31) / count;
}

std::vector<uint32_t> SpreadRanks(size_t count) {
  std::vector<uint32_t> order(count), ranks(count);
  std::iota(order.begin(), order.end(), 0);
  Spread(order);
  for (uint32_t rank = 0; rank < count; ++rank) ranks[order[rank]] = rank;
  return ranks;
}

}  // namespace

void Spread(std::span<uint32_t> ids) {
  if (ids.empty()) return;
  const std::vector<uint32_t> places(ids.begin(), ids.end());
  const int bits = std::bit_width(places.size() - 1);
  size_t next = 0;
  for (uint64_t i = 0; next < ids.size(); ++i) {
    uint64_t place = 0;
    for (int bit = 0; bit < bits; ++bit) place |= (i >> bit & 1) << (bits - 1 - bit);
    if (place < places.size()) ids[next++] = places[place];
  }
}

StateOrder::StateOrder(const proto::Catalogue& catalogue)
    : tensor_count_(catalogue.store_tensors.size()) {
  const std::vector<uint32_t> ranks = SpreadRanks(tensor_count_);
  std::vector<Extent> extents;
  for (uint32_t tensor = 0; tensor < tensor_count_; ++tensor) {
    const proto::StoreTensor& described = catalogue.store_tensors[tensor];
    const uint32_t count = described.trainable ? proto::ExtentCount(described.element_count) : 0;
    for (uint32_t index = 0; index < count; ++index)
      extents.push_back({ShareBefore(index, count), ranks[tensor], tensor, index});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.share, a.rank) < std::tie(b.share, b.rank);
  });
  for (const Extent& extent : extents) {
    tensors_.push_back(extent.tensor);
    sums_.push_back(sums_.back() +
                    proto::StateBytes(catalogue.store_tensors[extent.tensor], extent.index));
  }
}

size_t StateOrder::Count(uint64_t bytes) const {
  const auto above = std::upper_bound(sums_.begin(), sums_.end(), bytes);
  return static_cast<size_t>(above - sums_.begin()) - 1;
}

std::vector<uint32_t> StateOrder::Leading(uint64_t bytes) const {
  std::vector<uint32_t> leading(tensor_count_, 0);
  for (size_t i = 0; i < Count(bytes); ++i) ++leading[tensors_[i]];
  return leading;
}

}  // namespace offload::zero3

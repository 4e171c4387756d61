#include "base/range_allocator.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace offload {

RangeAllocator::RangeAllocator(uint64_t alignment) : alignment_(alignment) {
  OFFLOAD_CHECK(alignment > 0);
}

uint64_t RangeAllocator::RoundUp(uint64_t size_bytes) const {
  return (std::max<uint64_t>(size_bytes, 1) + alignment_ - 1) / alignment_ * alignment_;
}

void RangeAllocator::Add(uint64_t offset, uint64_t size_bytes) {
  if (size_bytes == 0) return;
  auto after = free_.lower_bound(offset);
  OFFLOAD_CHECK(after == free_.end() || offset + size_bytes <= after->first)
      << "range at " << offset << " of " << size_bytes << " is free from " << after->first;
  const auto before = after == free_.begin() ? free_.end() : std::prev(after);
  OFFLOAD_CHECK(before == free_.end() || before->first + before->second <= offset)
      << "range at " << offset << " is free from " << before->first;
  free_bytes_ += size_bytes;
  if (after != free_.end() && offset + size_bytes == after->first) {
    size_bytes += after->second;
    free_.erase(after);
  }
  if (before != free_.end() && before->first + before->second == offset) {
    before->second += size_bytes;
  } else {
    free_[offset] = size_bytes;
  }
}

std::optional<uint64_t> RangeAllocator::Take(uint64_t size_bytes) {
  size_bytes = RoundUp(size_bytes);
  const auto fits = std::find_if(free_.begin(), free_.end(),
                                 [&](const auto& range) { return range.second >= size_bytes; });
  if (fits == free_.end()) return std::nullopt;
  const auto [offset, range_bytes] = *fits;
  free_.erase(fits);
  if (range_bytes > size_bytes) free_[offset + size_bytes] = range_bytes - size_bytes;
  free_bytes_ -= size_bytes;
  return offset;
}

void RangeAllocator::Return(uint64_t offset, uint64_t size_bytes) {
  Add(offset, RoundUp(size_bytes));
}

}  // namespace offload

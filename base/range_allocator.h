// base/range_allocator.h
//
// Lends ranges of offsets: of a buffer, a file, an address space. First fit, so that what is used
// gathers at the front; returned ranges merge with their free neighbours.
//
// Invariants
//   * Every size is rounded up to the alignment; with aligned offsets added, every lent offset is
//   aligned.
//   * No two free ranges touch, and none overlaps a lent one: returning what was not lent is
//   caught.
//
// Thread safety: none; pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace offload {

class RangeAllocator {
 public:
  explicit RangeAllocator(uint64_t alignment = 1);

  // Gives it room that it did not have.
  void Add(uint64_t offset, uint64_t size_bytes);
  // The offset of `size_bytes`, nothing when no free range is as long. At least one unit of the
  // alignment is lent.
  std::optional<uint64_t> Take(uint64_t size_bytes);
  // The whole of what Take(size_bytes) lent.
  void Return(uint64_t offset, uint64_t size_bytes);

  uint64_t free_bytes() const { return free_bytes_; }

 private:
  uint64_t RoundUp(uint64_t size_bytes) const;

  const uint64_t alignment_;
  std::map<uint64_t, uint64_t> free_;  // offset → bytes
  uint64_t free_bytes_ = 0;
};

}  // namespace offload

// proto/gradient_slices.h
//
// How an extent is divided among ranks that add its gradients themselves: rank r adds slice r of
// all ranks' parts, and delivers that (proto/DESIGN.md, "Slices of sums").
//
// Pure functions.
#pragma once

#include <cstdint>

namespace offload::proto {

// Slices begin at multiples of this many elements, where there are enough.
inline constexpr uint64_t kSliceAlignment = 64;

// Whether every rank gets a slice, and a smaller one than the extent.
constexpr bool CanBeSliced(uint64_t element_count, uint32_t world_size) {
  return world_size > 1 && element_count >= world_size;
}
// The first element of slice `rank` of an extent of `element_count`; of slice `world_size`, the
// extent's end.
constexpr uint64_t SliceBegin(uint64_t element_count, uint32_t world_size, uint32_t rank) {
  if (rank == world_size) return element_count;
  const uint64_t begin = element_count * rank / world_size;
  return element_count < kSliceAlignment * world_size ? begin
                                                      : begin / kSliceAlignment * kSliceAlignment;
}
constexpr uint64_t SliceElements(uint64_t element_count, uint32_t world_size, uint32_t rank) {
  return SliceBegin(element_count, world_size, rank + 1) -
         SliceBegin(element_count, world_size, rank);
}

}  // namespace offload::proto

// zero3/keep_order.h
//
// In which order equal things stay in memory for good as there is more of it. Any first part of an
// order lies evenly over the model: a drive is then read from while what stays is computed with,
// instead of before or after it. With more memory the same stay, and more.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/slab_layout.h"

namespace offload::zero3 {

// Reorders so that any first k of them lie evenly among all: by the number of the place, its bits
// reversed (van der Corput's sequence).
void Spread(std::span<uint32_t> ids);

// State of extents: of every tensor the leading ones stay, of all tensors the same share.
class StateOrder {
 public:
  explicit StateOrder(const proto::Catalogue& catalogue);

  uint64_t total_bytes() const { return sums_.back(); }
  // Of as many extents as `bytes` hold; at most that.
  uint64_t Within(uint64_t bytes) const { return sums_[Count(bytes)]; }
  // Of those: how many leading ones of each store tensor.
  std::vector<uint32_t> Leading(uint64_t bytes) const;

 private:
  size_t Count(uint64_t bytes) const;

  size_t tensor_count_;
  std::vector<uint32_t> tensors_;     // store tensor of each extent, in order
  std::vector<uint64_t> sums_ = {0};  // of the first extents
};

}  // namespace offload::zero3

// zero3/gpu/weight_source.h
//
// Where the window takes weights from: the session and its slab, or a test.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace offload::zero3 {

// Called under the window's lock: an implementation must not call the window.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // Asks for a weight to be brought into host memory. Never waits.
  virtual void Prefetch(uint32_t tensor) = 0;
  // A lease on the bytes of a weight, which stay where and as they are until it is returned; null
  // when they are not in host memory. Never waits.
  virtual absl::StatusOr<const std::byte*> TryLease(uint32_t tensor) = 0;
  // The same, after waiting for the bytes. The window holds no other lease meanwhile.
  virtual absl::StatusOr<const std::byte*> Lease(uint32_t tensor) = 0;
  virtual void Return(uint32_t tensor) = 0;
};

}  // namespace offload::zero3

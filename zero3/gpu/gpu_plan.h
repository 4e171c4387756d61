// zero3/gpu/gpu_plan.h
//
// Divides a GPU's budget, gpu_ram, between the window in which weights wait for their operators and
// the gradients that are on their way to the host: a pure function.
//
// Not counted, as in ram: the framework, activations, and one gradient that an operator is writing.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace offload::zero3 {

// Places in the window begin at multiples of this, as what CUDA allocates does.
inline constexpr uint64_t kDeviceAlignment = 256;
constexpr uint64_t DeviceBytes(uint64_t size_bytes) {
  return (size_bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
}

struct GpuTensor {
  uint64_t weight_bytes = 0;
  uint64_t gradient_bytes = 0;  // 0 when it is frozen
};

struct GpuPlan {
  uint64_t window_bytes = 0;
  uint64_t lookahead_bytes = 0;  // of the window: what is copied ahead of its use
  uint64_t gradient_bytes = 0;   // of gradients whose copies are not yet known to be done
  uint64_t weight_bytes = 0;     // of all tensors: a window as large holds them all
  uint64_t floor_bytes = 0;      // the smallest gpu_ram that runs
};

// The window holds at least three times the largest weight, so that an operator of two finds room
// beside any other, or all weights; two of the largest gradients may be on their way, so that a
// copy overlaps with the next operator, or all. Of the rest a quarter goes to gradients while there
// are more. OFD-2003 with the sum when gpu_ram_bytes is below the floor.
absl::StatusOr<GpuPlan> MakeGpuPlan(std::span<const GpuTensor> tensors, uint64_t gpu_ram_bytes);

// The plan as lines for people.
std::string DescribeGpuPlan(const GpuPlan& plan, uint64_t gpu_ram_bytes);

}  // namespace offload::zero3

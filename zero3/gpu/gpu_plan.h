// zero3/gpu/gpu_plan.h
//
// Divides a GPU's budget, gpu_ram, between the window in which weights wait for their operators,
// the gradients that are on their way to the host, and the tensors that stay with all that is kept
// of them and are updated there (device_tier.h in zero3/torch): a pure function.
//
// Not counted, as in ram: the framework, activations, and one gradient that an operator is writing.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
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
  // What the optimizer keeps of it there, a multiple of kDeviceAlignment for each plane; 0 when it
  // is not updated there.
  uint64_t state_bytes = 0;
};

struct GpuPlan {
  uint64_t window_bytes = 0;
  uint64_t lookahead_bytes = 0;  // of the window: what is copied ahead of its use
  uint64_t gradient_bytes = 0;   // of gradients whose copies are not yet known to be done
  uint64_t weight_bytes = 0;     // of all tensors: a window as large holds them all
  uint64_t floor_bytes = 0;      // the smallest gpu_ram that runs
  // The tier: by tensor, whether it stays and is updated there; empty: none does. Beside the window
  // are the weights of those, and what the optimizer keeps of them.
  std::vector<bool> stays;
  uint64_t tier_weight_bytes = 0;
  uint64_t tier_state_bytes = 0;
  uint64_t state_bytes = 0;  // of all tensors that could

  bool Stays(uint32_t tensor) const { return tensor < stays.size() && stays[tensor]; }
  uint64_t tier_bytes() const { return tier_weight_bytes + tier_state_bytes; }
  uint64_t total_bytes() const { return window_bytes + gradient_bytes + tier_bytes(); }
};

// The window holds at least three times the largest weight, so that an operator of two finds room
// beside any other, or all weights; two of the largest gradients may be on their way, so that a
// copy overlaps with the next operator, or all. Of the rest a quarter goes to gradients while there
// are more. Where all of both fit, whole tensors are updated there, in their order, as long as
// what is kept of them fits, too: every byte of it saves the same. `table_bytes` of the tier are
// for what all updates share. OFD-2003 with the sum when gpu_ram_bytes is below the floor.
absl::StatusOr<GpuPlan> MakeGpuPlan(std::span<const GpuTensor> tensors, uint64_t gpu_ram_bytes,
                                    uint64_t table_bytes = 0);

// The plan as lines for people. `why_no_tier`: what stands against one (gpu_tensors.h); may be
// empty.
std::string DescribeGpuPlan(const GpuPlan& plan, uint64_t gpu_ram_bytes,
                            std::string_view why_no_tier = "");

}  // namespace offload::zero3

// zero3/gpu/gpu_tensors.h
//
// What the tensors of a job need of a device, for MakeGpuPlan().
//
// Thread safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/durability.h"
#include "kernels/optimizer.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

// In their order. Buffers stay where the module has them, and need nothing.
std::vector<GpuTensor> GpuTensorsOf(std::span<const proto::Tensor> tensors);

// Where what is kept of a tensor that is updated there lies, from the begin of its place on: as
// kernels::DeviceRun has it. What the optimizer does not keep has no place.
struct TierPlanes {
  std::optional<uint64_t> residual, ties;
  std::array<std::optional<uint64_t>, kernels::kStatePlanesMax> state;
  uint64_t size_bytes = 0;
};
TierPlanes TierPlanesOf(const proto::PlaneSet& planes, uint64_t element_count);

// What decides whether tensors are updated on the device.
struct TierConditions {
  kernels::OptimizerSpec optimizer;  // of the job
  Durability durability;
  uint32_t world_size = 1;
};
// What stands against it for all of them; empty: nothing. Where every step is committed, every step
// would have to bring all of it to the store.
std::string WhyNoTier(const TierConditions& conditions);
// The same with what the optimizer keeps of those that could be: tensors that share their extents
// with no other.
std::vector<GpuTensor> GpuTensorsOf(const proto::Catalogue& catalogue,
                                    const TierConditions& conditions);

}  // namespace offload::zero3

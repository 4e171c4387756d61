// zero3/gpu/gpu_tensors.h
//
// What the tensors of a job need of a device, for MakeGpuPlan().
//
// Thread safety: a pure function.
#pragma once

#include <span>
#include <vector>

#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

// In their order. Buffers stay where the module has them, and need nothing.
std::vector<GpuTensor> GpuTensorsOf(std::span<const proto::Tensor> tensors);

}  // namespace offload::zero3

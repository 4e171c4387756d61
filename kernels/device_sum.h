// kernels/device_sum.h
//
// The ordered sum of kernels/sum.h for parts that live on an accelerator: the same bits, a NaN in
// fp32 being any NaN. It is compiled twice from one source (kernels/device_sum_element.h):
// LaunchSum by nvcc, AddPartsOnHost for the processor, which stands in for a GPU and proves the
// arithmetic where there is none. fp32 and bf16; others are refused.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/sum.h"

namespace offload::kernels {

inline constexpr uint32_t kDevicePartsMax = 64;

// A run of elements, as SumRun is one; pointers are to memory of the device that adds, and stay the
// caller's. `sum` may be none of the parts.
struct DeviceSum {
  Dtype dtype = Dtype::kFloat32;
  SumStart start = SumStart::kNothing;
  uint32_t part_count = 0;  // at least one
  uint64_t count = 0;
  void* sum = nullptr;  // written; read when the start is kSum
  const void* parts[kDevicePartsMax] = {};
  double factor = 1;  // rounded to fp32
};

// Adds by the processor, element by element; `sum` is of host memory.
void AddPartsOnHost(const DeviceSum& sum);

// Launches the sum on `stream` (a cudaStream_t) of the current device and returns at once: 0, or
// the cudaError_t of the launch.
int LaunchSum(const DeviceSum& sum, void* stream);

}  // namespace offload::kernels

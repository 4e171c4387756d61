// accelerator/cuda_error.h
//
// CUDA's error numbers as statuses. Knows no CUDA header, so that it is tested everywhere.
//
// Thread safety: pure functions.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace offload::accelerator {

// What failed, by what the caller may do about it.
enum class CudaFailure { kNone, kNoDevice, kNoMemory, kOther };

// Of a cudaError_t.
CudaFailure CudaFailureOf(int error);

// "cudaMalloc(...): cudaErrorMemoryAllocation (out of memory)" with the identifier that fits; OK
// for error 0.
absl::Status CudaStatus(int error, std::string_view call, std::string_view name,
                        std::string_view text);

// OFD-2001 for cuda:`device` of `count` that the process sees.
absl::Status NoSuchDevice(int device, int count);

}  // namespace offload::accelerator

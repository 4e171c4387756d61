// accelerator/cuda_calls.h
//
// What every translation of CUDA's calls needs: errors as statuses, and the device that the calling
// thread uses.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

inline cudaStream_t Unwrap(Stream stream) { return reinterpret_cast<cudaStream_t>(stream.handle); }
inline cudaEvent_t Unwrap(Event event) { return reinterpret_cast<cudaEvent_t>(event.handle); }

// Takes the error from the runtime: otherwise the next launch of whoever shares the process would
// report it.
absl::Status StatusOf(cudaError_t error, const char* call);
#define OFFLOAD_CUDA(function, ...) StatusOf(function(__VA_ARGS__), #function)

// The calling thread uses a device for a while. Setting a device makes a context on it, hundreds of
// MiB, so a thread that had none of its own stays with ours.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changes_back_ = false;
};

}  // namespace offload::accelerator

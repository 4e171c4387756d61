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

// The calling thread uses a device for a while. Afterwards its device is the one that it had, and
// what has no number (torch's "cuda") means that. A context is hundreds of MiB, and setting a
// device makes one: a thread that had none has none afterwards, on no other device either.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool is_pushed_ = false;
};

}  // namespace offload::accelerator

#include "accelerator/cuda_calls.h"

#include <cuda.h>

#include "accelerator/cuda_error.h"

namespace offload::accelerator {
namespace {

// Whether the calling thread has used a device, so that its current one is more than a default.
bool HasContext() {
  using Function = CUresult (*)(CUcontext*);
  static const Function function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &address, 12000,
                                                               cudaEnableDefault, &result);
    const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<Function>(is_found ? address : nullptr);
  }();
  CUcontext context = nullptr;
  return function != nullptr && function(&context) == CUDA_SUCCESS && context != nullptr;
}

}  // namespace

absl::Status StatusOf(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return CudaStatus(error, call, cudaGetErrorName(error), cudaGetErrorString(error));
}

OnDevice::OnDevice(int device) {
  if (cudaGetDevice(&before_) != cudaSuccess || before_ == device) return;
  changes_back_ = HasContext();
  cudaSetDevice(device);
}

OnDevice::~OnDevice() {
  if (changes_back_) cudaSetDevice(before_);
}

}  // namespace offload::accelerator

#include "accelerator/cuda_plugin.h"

#include "accelerator/cuda_accelerator.h"
#include "base/version.h"

const char* offload_cuda_release() { return offload::kVersion; }

void offload_cuda_open(
    int device, absl::StatusOr<std::unique_ptr<offload::accelerator::Accelerator>>* accelerator) {
  *accelerator = offload::accelerator::OpenCudaDevice(device);
}

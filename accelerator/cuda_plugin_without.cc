// The plug-in of a build without CUDA: the answer is an error, not a missing symbol.
#include "accelerator/cuda_plugin.h"
#include "base/error.h"
#include "base/version.h"

const char* offload_cuda_release() { return offload::kVersion; }

void offload_cuda_open(
    int, absl::StatusOr<std::unique_ptr<offload::accelerator::Accelerator>>* accelerator) {
  *accelerator =
      offload::MakeError(offload::ErrorId::kGpuPlugin, "liboffload_cuda.so was built without CUDA");
}

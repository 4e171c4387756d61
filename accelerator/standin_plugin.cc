// For tests: a plug-in whose devices are stand-ins.
#include "accelerator/cuda_plugin.h"
#include "accelerator/host_accelerator.h"
#include "base/version.h"

const char* offload_cuda_release() { return offload::kVersion; }

void offload_cuda_open(
    int, absl::StatusOr<std::unique_ptr<offload::accelerator::Accelerator>>* accelerator) {
  using offload::accelerator::HostAccelerator;
  *accelerator = std::make_unique<HostAccelerator>(
      HostAccelerator::Options{.pace = offload::accelerator::Pace::kEager});
}

#include "accelerator/cuda_error.h"

#include <string>

#include "base/error.h"

namespace offload::accelerator {
namespace {

// Of driver_types.h; their values are part of CUDA's binary interface.
enum {
  kSuccess = 0,
  kMemoryAllocation = 2,
  kStubLibrary = 34,
  kInsufficientDriver = 35,
  kDevicesUnavailable = 46,  // those that one process has for itself
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNoDriver = 304,  // cudaErrorOperatingSystem: the driver's files cannot be opened
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kCompatNotSupported = 804,
};

}  // namespace

CudaFailure CudaFailureOf(int error) {
  switch (error) {
    case kSuccess:
      return CudaFailure::kNone;
    case kStubLibrary:
    case kInsufficientDriver:
    case kDevicesUnavailable:
    case kNoDevice:
    case kInvalidDevice:
    case kNoDriver:
    case kSystemNotReady:
    case kSystemDriverMismatch:
    case kCompatNotSupported:
      return CudaFailure::kNoDevice;
    case kMemoryAllocation:
      return CudaFailure::kNoMemory;
    default:
      return CudaFailure::kOther;
  }
}

absl::Status CudaStatus(int error, std::string_view call, std::string_view name,
                        std::string_view text) {
  const std::string what =
      std::string(call) + ": " + std::string(name) + " (" + std::string(text) + ")";
  switch (CudaFailureOf(error)) {
    case CudaFailure::kNone:
      return absl::OkStatus();
    case CudaFailure::kNoDevice:
      return MakeError(ErrorId::kGpuMissing, what);
    case CudaFailure::kNoMemory:
      return MakeError(ErrorId::kGpuMemory, what);
    case CudaFailure::kOther:
      break;
  }
  return MakeError(ErrorId::kGpuFailed, what);
}

absl::Status NoSuchDevice(int device, int count) {
  return MakeError(ErrorId::kGpuMissing,
                   "cuda:" + std::to_string(device) + " of " + std::to_string(count) + " devices",
                   "Name one that CUDA_VISIBLE_DEVICES shows; of a GPU that is divided (MIG) a "
                   "process sees one instance, which that names, as cuda:0");
}

}  // namespace offload::accelerator

// accelerator/cuda_accelerator.h
//
// A device of CUDA. Memory comes from cudaMalloc.
//
// Thread safety: as Accelerator. A calling thread keeps the device that it had set.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

// Opens device number `device`. OFD-2001 when there is no driver or no such device, OFD-2002 when
// the runtime that the process has loaded is not the one that this was compiled for.
absl::StatusOr<std::unique_ptr<Accelerator>> OpenCudaDevice(int device);

}  // namespace offload::accelerator

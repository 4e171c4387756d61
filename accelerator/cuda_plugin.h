// accelerator/cuda_plugin.h
//
// What liboffload_cuda.so shows to the outside. Nothing else of the product links CUDA: programs
// open the plug-in when they need a GPU (accelerator/cuda_loader.h). C++ types cross this border,
// so both sides are of one release, which the loader checks first.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

extern "C" {

// The release that the plug-in was built from: kVersion.
const char* offload_cuda_release();

// Opens a device by its number in CUDA. OFD-2001 without driver or device; OFD-2002 from a plug-in
// that was built without CUDA, or when the runtime in the process is of another major version.
void offload_cuda_open(
    int device, absl::StatusOr<std::unique_ptr<offload::accelerator::Accelerator>>* accelerator);
}

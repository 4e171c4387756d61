// accelerator/cuda_loader.h
//
// Opens the CUDA plug-in, liboffload_cuda.so, in a process that links nothing of CUDA. Missing
// driver, missing plug-in and a plug-in that does not fit are each one error.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

// Where the plug-in is: OFFLOADD_CUDA_PLUGIN, else beside the program or library that this code was
// linked into, or in the lib of a prefix whose bin has that.
std::string CudaPluginPath();

// Opens a device by its number in CUDA through the plug-in at `path`, which stays loaded. OFD-2002
// when the plug-in cannot be used, OFD-2001 when the device cannot.
absl::StatusOr<std::unique_ptr<Accelerator>> OpenCuda(int device, const std::string& path);

// Why a process that has loaded these libraries, by path, cannot take the plug-in; "" when it can.
// It has to have one runtime of CUDA, of our major version, and one copy of torch's.
std::string RuntimeConflict(std::span<const std::string> libraries);

}  // namespace offload::accelerator

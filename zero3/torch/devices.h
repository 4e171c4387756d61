// zero3/torch/devices.h
//
// Devices as torch names them, and the accelerators behind them. CUDA's is the plug-in, opened when
// the first model on such a device is attached; tests register others. Streams are asked of torch's
// device guards, which every backend has, so nothing here includes one.
//
// Thread safety: RegisterAccelerator before the first engine; the rest from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::zero3 {

// Opens the accelerator of a device of some type; it outlives every tensor on it.
using AcceleratorOpener =
    std::function<absl::StatusOr<std::shared_ptr<accelerator::Accelerator>>(c10::Device device)>;
void RegisterAccelerator(c10::DeviceType type, AcceleratorOpener open);

// Whether models on devices of this type can be attached.
bool HasAccelerator(c10::DeviceType type);
// OFD-2001, 2002 when it cannot be opened. Requires HasAccelerator().
absl::StatusOr<std::shared_ptr<accelerator::Accelerator>> AcceleratorOf(c10::Device device);

// The stream on which the calling thread launches operators, as torch and as the accelerator name
// it.
c10::Stream CurrentTorchStream(c10::Device device);
accelerator::Stream CurrentStream(c10::Device device);
accelerator::Stream StreamOf(const c10::Stream& stream);
// Waits until it has executed what it was given.
void SynchronizeCurrentStream(c10::Device device);

// ---- Bytes, through torch's own copies: for what happens once, or rarely. They wait. ------------
void CopyToHost(std::byte* host, const std::byte* bytes, size_t size_bytes, c10::Device device);
void CopyToDevice(std::byte* bytes, const std::byte* host, size_t size_bytes, c10::Device device);
// Memory of torch's allocator for the device, and its pointer alone.
at::Tensor AllocateBytes(size_t size_bytes, c10::Device device);
c10::DataPtr TakeBytes(at::Tensor tensor);
// Gives back what that allocator keeps for later and nobody uses.
void FreeUnused(c10::Device device);

}  // namespace offload::zero3

#include "zero3/torch/devices.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

#include "accelerator/cuda_loader.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace offload::zero3 {
namespace {

struct Openers {
  std::mutex mutex;
  std::map<c10::DeviceType, AcceleratorOpener> by_type;
};
Openers& AllOpeners() {
  static auto* const kOpeners = new Openers{
      .mutex = {},
      .by_type = {
          {c10::DeviceType::CUDA,
           [](c10::Device device) -> absl::StatusOr<std::shared_ptr<accelerator::Accelerator>> {
             OFFLOAD_ASSIGN_OR_RETURN(
                 std::unique_ptr<accelerator::Accelerator> cuda,
                 accelerator::OpenCuda(device.index(), accelerator::CudaPluginPath()));
             return std::shared_ptr<accelerator::Accelerator>(std::move(cuda));
           }}}};
  return *kOpeners;
}

at::Tensor Bytes(const std::byte* bytes, size_t size_bytes, c10::Device device) {
  return at::from_blob(
      const_cast<std::byte*>(bytes), {static_cast<int64_t>(size_bytes)},
      /*deleter=*/[](void*) {}, at::TensorOptions(at::kByte).device(device), device);
}

}  // namespace

void RegisterAccelerator(c10::DeviceType type, AcceleratorOpener open) {
  Openers& openers = AllOpeners();
  const std::lock_guard lock(openers.mutex);
  openers.by_type[type] = std::move(open);
}

bool HasAccelerator(c10::DeviceType type) {
  Openers& openers = AllOpeners();
  const std::lock_guard lock(openers.mutex);
  return openers.by_type.contains(type);
}

absl::StatusOr<std::shared_ptr<accelerator::Accelerator>> AcceleratorOf(c10::Device device) {
  Openers& openers = AllOpeners();
  const std::lock_guard lock(openers.mutex);
  const auto opener = openers.by_type.find(device.type());
  OFFLOAD_CHECK(opener != openers.by_type.end()) << device.str();
  return opener->second(device);
}

accelerator::Stream StreamOf(const c10::Stream& stream) {
  return {reinterpret_cast<uintptr_t>(stream.native_handle())};
}

c10::Stream CurrentTorchStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

accelerator::Stream CurrentStream(c10::Device device) {
  return StreamOf(CurrentTorchStream(device));
}

void SynchronizeCurrentStream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

void CopyToHost(std::byte* host, const std::byte* bytes, size_t size_bytes, c10::Device device) {
  const c10::AutoGradMode no_grad(false);
  Bytes(host, size_bytes, at::kCPU).copy_(Bytes(bytes, size_bytes, device));
}

void CopyToDevice(std::byte* bytes, const std::byte* host, size_t size_bytes, c10::Device device) {
  const c10::AutoGradMode no_grad(false);
  Bytes(bytes, size_bytes, device).copy_(Bytes(host, size_bytes, at::kCPU));
  SynchronizeCurrentStream(device);
}

at::Tensor AllocateBytes(size_t size_bytes, c10::Device device) {
  return at::empty({static_cast<int64_t>(size_bytes)}, at::TensorOptions(at::kByte).device(device));
}

void FreeUnused(c10::Device device) {
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator != nullptr && allocator->initialized()) allocator->emptyCache();
}

c10::DataPtr TakeBytes(at::Tensor tensor) {
  c10::StorageImpl* const storage =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return std::exchange(storage->_mutable_data_ptr_no_checks(), c10::DataPtr());
}

}  // namespace offload::zero3

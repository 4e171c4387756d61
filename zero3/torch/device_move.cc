#include "zero3/torch/device_move.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/run_names.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/storage_swap.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

c10::Device Parse(const std::string& text) {
  try {
    return c10::Device(text);
  } catch (const c10::Error&) {
    const std::optional<NameComplaint> complaint = ComplainOfDevice(text);
    ThrowStatus(MakeError(ErrorId::kBadValue,
                          absl::StrCat("device is '", text, "', which ",
                                       complaint.has_value() ? complaint->what : "torch refuses"),
                          complaint.has_value() ? complaint->fix : "Name another, or none"));
  }
}

at::Tensor GradientOn(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.is_leaf() || !tensor.grad().defined()) return {};
  return tensor.grad().to(device);
}

void SetGradient(const at::Tensor& tensor, at::Tensor gradient) {
  if (gradient.defined()) tensor.mutable_grad() = std::move(gradient);
}

}  // namespace

std::optional<c10::Device> DestinationOf(const std::string& text) {
  if (text.empty()) return std::nullopt;
  c10::Device device = Parse(text);
  if (device.is_cpu()) return std::nullopt;
  if (!HasAccelerator(device.type())) {
    ThrowStatus(
        MakeError(ErrorId::kUnsupportedModel,
                  absl::StrCat("device is ", text, ", for which there is no accelerator plug-in"),
                  "Name a CUDA device, such as cuda:0"));
  }
  if (!c10::impl::hasDeviceGuardImpl(device.type())) {
    ThrowStatus(MakeError(
        ErrorId::kGpuMissing,
        absl::StrCat("device is ", text, ", and torch's library for it is not in this program"),
        "Take a torch with CUDA; in C++ link the program with libtorch_cuda.so, or "
        "open that with dlopen()"));
  }
  if (device.has_index()) return device;
  try {
    return c10::impl::VirtualGuardImpl(device.type()).getDevice();
  } catch (const c10::Error&) {  // no driver: whoever opens the device says so
    return c10::Device(device.type(), 0);
  }
}

c10::Storage MoveWithoutBytes(std::span<const at::Tensor> tensors, c10::Device device) {
  const at::NoGradGuard no_grad;
  at::globalContext().lazyInitDevice(device.type());
  const c10::Storage values = tensors.back().unsafeGetTensorImpl()->unsafe_storage();
  const c10::Storage there(c10::Storage::use_byte_size_t(), values.nbytes(),
                           c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                           /*resizable=*/false);
  std::vector<at::Tensor> gradients;  // first what may fail
  for (const at::Tensor& tensor : tensors) gradients.push_back(GradientOn(tensor, device));
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor tensor = tensors[i];
    tensor.set_data(MakeManagedTensor(there, tensor));
    SetGradient(tensor, std::move(gradients[i]));
  }
  return values;
}

void MoveBack(std::span<const at::Tensor> tensors, const c10::Storage& values) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  if (Residency::Of(values.unsafeGetStorageImpl()) != nullptr) return;
  for (at::Tensor tensor : tensors) {
    tensor.set_data(at::empty({0}, tensor.options().device(at::kCPU).requires_grad(false))
                        .set_(values, 0, tensor.sizes(), tensor.strides()));
    SetGradient(tensor, GradientOn(tensor, at::kCPU));
  }
}

void MoveWithBytes(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) return;
  // Under InferenceMode, too, what is trained later stays an ordinary tensor.
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  at::Tensor moved = tensor;
  at::Tensor gradient = GradientOn(tensor, device);
  moved.set_data(tensor.to(device));
  SetGradient(tensor, std::move(gradient));
}

void MoveWithBytes(torch::nn::Module& module, c10::Device device) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> sharing;  // with one before it
  const std::vector<at::Tensor> parameters = module.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      const at::Tensor &first = parameters[k], &other = parameters[i];
      if (!first.is_alias_of(other) || first.is_same(other) || first.sizes() != other.sizes() ||
          first.strides() != other.strides() || first.storage_offset() != other.storage_offset())
        continue;
      sharing.emplace_back(other, first);
      break;
    }
  }
  module.to(device);
  for (auto& [other, first] : sharing) other.set_data(first.detach());
}

}  // namespace offload::zero3

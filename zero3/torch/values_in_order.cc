#include "zero3/torch/values_in_order.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "zero3/torch/devices.h"
#include "zero3/torch/residency.h"

namespace offload::zero3 {

namespace {

// Of page-locked memory, which torch keeps for the next time.
constexpr int64_t kPieceBytes = int64_t{1} << 20;

// From a device, by way of page-locked memory: buffers are copied with every step.
at::Tensor ToHost(const at::Tensor& there) {
  const int64_t size_bytes = there.numel() * static_cast<int64_t>(there.element_size());
  if (size_bytes == 0 || there.is_quantized() || !HasAccelerator(there.device().type()))
    return there.cpu();
  const at::TensorOptions options = there.options().device(at::kCPU);
  if (size_bytes <= kPieceBytes)
    return at::empty(there.sizes(), options.pinned_memory(true)).copy_(there);
  at::Tensor host = at::empty(there.sizes(), options);
  const at::Tensor from = there.view({-1}).view(at::kByte);
  at::Tensor piece = at::empty({kPieceBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  auto* const to = static_cast<std::byte*>(host.mutable_data_ptr());
  for (int64_t begin = 0; begin < size_bytes; begin += kPieceBytes) {
    const int64_t length = std::min(kPieceBytes, size_bytes - begin);
    piece.narrow(0, 0, length).copy_(from.narrow(0, begin, length));
    std::memcpy(to + begin, piece.const_data_ptr(), static_cast<size_t>(length));
  }
  return host;
}

}  // namespace

at::Tensor ValuesInOrder(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // One that was constructed outside memory has no bytes to point to.
  if (Residency::Of(tensor) != nullptr) return tensor.detach().clone(at::MemoryFormat::Contiguous);
  // The bytes of a conjugated or negated view are not its values.
  const at::Tensor in_order = tensor.detach().resolve_conj().resolve_neg().contiguous();
  return in_order.is_cpu() ? in_order : ToHost(in_order);
}

}  // namespace offload::zero3

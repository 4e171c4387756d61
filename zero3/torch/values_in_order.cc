#include "zero3/torch/values_in_order.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "zero3/torch/residency.h"

namespace offload::zero3 {

at::Tensor ValuesInOrder(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // One that was constructed outside memory has no bytes to point to.
  if (Residency::Of(tensor) != nullptr) return tensor.detach().clone(at::MemoryFormat::Contiguous);
  // The bytes of a conjugated or negated view are not its values.
  return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu();
}

}  // namespace offload::zero3

// zero3/torch/values_in_order.h
//
// Bytes of a tensor as a file or a store has them.
//
// Thread safety: as torch's operators on the tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace offload::zero3 {

// Its values on the host, one behind the other, without autograd; the tensor itself where it is so
// already.
at::Tensor ValuesInOrder(const at::Tensor& tensor);

}  // namespace offload::zero3

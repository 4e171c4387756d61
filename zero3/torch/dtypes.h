// zero3/torch/dtypes.h
//
// The types of weights that are trained, as torch and as the daemon call them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/dtype.h"

namespace offload::zero3 {

// Nothing for a type that is not trained here.
inline std::optional<kernels::Dtype> TrainedDtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kernels::Dtype::kFloat32;
    case at::kBFloat16:
      return kernels::Dtype::kBFloat16;
    case at::kHalf:
      return kernels::Dtype::kFloat16;
    case at::kDouble:
      return kernels::Dtype::kFloat64;
    default:
      return std::nullopt;
  }
}

// Of the masters of such weights, and of what an optimizer keeps.
inline at::ScalarType MasterType(at::ScalarType weight) {
  return weight == at::kDouble ? at::kDouble : at::kFloat;
}
inline at::ScalarType MasterType(const at::Tensor& weight) {
  return MasterType(weight.scalar_type());
}

}  // namespace offload::zero3

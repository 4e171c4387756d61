// zero3/torch/rule_update.h
//
// Updates in memory by the rules themselves (kernels/rules), as the daemon makes them: of
// optimizers that torch does not have, so that a new one needs nothing of its own here.
//
// Thread safety: as torch::optim::Optimizer: one thread, which has torch's own threads help.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "kernels/optimizer.h"

namespace offload::zero3 {

// Takes update number `step` of a tensor, 1 for its first. `gradient`, `master` and the planes that
// the optimizer keeps have one shape and one type, fp32 or fp64, and any strides; the gradient is
// strided. Those on a device are updated on the host and copied back.
void UpdateByRule(const kernels::OptimizerSpec& optimizer, int64_t step, const at::Tensor& gradient,
                  at::Tensor& master, std::span<at::Tensor> planes);

}  // namespace offload::zero3

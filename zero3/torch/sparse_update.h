// zero3/torch/sparse_update.h
//
// Steps with sparse gradients, as torch's classes take them. They add the elements of a gradient to
// the weight one by one, so an index that occurs twice is rounded twice: another result than that
// of the dense sum. Where the reference is torch's own class (fp32 and fp64 parameters), SGD that
// keeps nothing and Adagrad therefore do it in the trainer's process, by torch's operators in their
// order. bf16 and fp16 parameters, whose reference is arithmetic on fp32 masters, and optimizers
// that refuse sparse gradients in torch, take the dense sum.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <string_view>
#include <vector>

#include "kernels/optimizer.h"
#include "zero3/torch/kept_state.h"

namespace offload::zero3 {

// Whether the parameter's gradient is added by AddSparsely(). OFD-1604 for options with which
// torch's class keeps sparse state or takes no sparse gradient. `name`: of the parameter, may be
// empty.
bool IsSparseUpdate(const kernels::OptimizerSpec& optimizer, const at::Tensor& parameter,
                    std::string_view name);

// Whether SGD with these groups has momentum over embeddings of `module` with sparse(true): torch's
// class keeps a sparse buffer of their gradients, whose elements are added one by one, and no plane
// of a job has its bits.
bool HasSparseMomentum(const torch::nn::Module& module,
                       const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const torch::optim::SGDOptions& defaults);

// Takes one step: changes `weight`, and of `state` the count and, with Adagrad, the sum, which may
// be undefined before the first.
void AddSparsely(const kernels::OptimizerSpec& optimizer, const at::Tensor& gradient,
                 at::Tensor& weight, KeptState& state);

}  // namespace offload::zero3

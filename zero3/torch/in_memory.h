// zero3/torch/in_memory.h
//
// The trainer in memory that offloading is compared with, bit for bit.
//
// Arithmetic
//   * fp32 parameters: torch's own operators on the parameter itself. Where torch has a fused
//     kernel for the CPU (AdamW, Adam, Adagrad) that, else the operators of torch.optim's loop over
//     parameters, in their order (in_memory.cc).
//   * bf16 and fp16 parameters: the same operators on an fp32 master and fp32 state kept here, with
//     the gradient upcast, then the weight becomes the nearest-even cast of the master.
//   * A parameter without gradient is skipped, as everywhere in torch.
//   * A parameter that somebody else wrote to (copy_, an initialiser) keeps its state, and its
//     master becomes what was written.
// Beyond the state it needs at most one parameter's fp32 gradient and a few temporaries of that
// size.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/optimizer.h"
#include "zero3/torch/named_optimizer.h"

namespace offload::zero3 {

struct InMemoryState {
  torch::Tensor master;  // fp32; of an fp32 parameter the parameter itself
  // fp32, by number of the plane in the optimizer's row; undefined where it keeps none.
  std::array<torch::Tensor, kernels::kStatePlanesMax> planes;
  int64_t step = 0;     // updates of this parameter
  int64_t version = 0;  // of the parameter after our last write
};

class InMemoryOptimizer final : public torch::optim::Optimizer {
 public:
  // Errors as SpecOfAll.
  InMemoryOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                    NamedOptimizer optimizer);

  torch::Tensor step(LossClosure closure = nullptr) override;

  // The state of a parameter; null before its first update.
  const InMemoryState* StateOf(const torch::Tensor& parameter) const;
  // As Engine::Gather.
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) const;

 private:
  void UpdateParameter(const kernels::OptimizerSpec& optimizer, torch::Tensor& parameter);

  const NamedOptimizer optimizer_;
  const kernels::OptimizerSpec kept_;
  std::unordered_map<const void*, InMemoryState> states_;  // by TensorImpl
};

}  // namespace offload::zero3

// zero3/torch/in_memory.h
//
// The trainer in memory that offloading is compared with, bit for bit.
//
// Arithmetic
//   * fp32 parameters: torch's own operators on the parameter itself.
//   * bf16 and fp16 parameters: the same operators on an fp32 master and fp32 moments kept here,
//   with
//     the gradient upcast, then the weight becomes the nearest-even cast of the master.
//   * A parameter without gradient is skipped, as everywhere in torch.
//   * A parameter that somebody else wrote to (copy_, an initialiser) keeps its moments, and its
//     master becomes what was written.
// Beyond the state it needs at most one parameter's fp32 gradient and one temporary of that size.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <unordered_map>

namespace offload::zero3 {

struct InMemoryState {
  torch::Tensor master;   // fp32; of an fp32 parameter the parameter itself
  torch::Tensor exp_avg;  // AdamW: first moment; SGD: momentum buffer, undefined without momentum
  torch::Tensor exp_avg_sq;  // AdamW: second moment; SGD: undefined
  int64_t step = 0;          // updates of this parameter
  int64_t version = 0;       // of the parameter after our last write
};

class InMemoryOptimizer : public torch::optim::Optimizer {
 public:
  torch::Tensor step(LossClosure closure = nullptr) override;

  // The state of a parameter; null before its first update.
  const InMemoryState* StateOf(const torch::Tensor& parameter) const;

 protected:
  // One group with every parameter of the module; a parameter with several names counts once.
  InMemoryOptimizer(torch::nn::Module& module,
                    std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  // Updates state.master with an fp32 gradient; state.step counts this update already.
  virtual void Update(const torch::optim::OptimizerOptions& options, const torch::Tensor& gradient,
                      InMemoryState& state) = 0;

 private:
  void UpdateParameter(const torch::optim::OptimizerOptions& options, torch::Tensor& parameter);

  std::unordered_map<const void*, InMemoryState> states_;  // by TensorImpl
};

}  // namespace offload::zero3

// zero3/torch/in_memory.h
//
// The trainer in memory that offloading is compared with, bit for bit.
//
// Arithmetic
//   * fp32 and fp64 parameters: torch's own operators on the parameter itself. Where torch has a
//   fused kernel for the CPU (AdamW, Adam, Adagrad) that, else the operators of torch.optim's loop
//   over parameters, in their order (in_memory.cc). Optimizers that torch does not have follow
//   their rule (rule_update.h).
//   * bf16 and fp16 parameters: the same operators on an fp32 master and fp32 state kept here, with
//     the gradient upcast, then the weight becomes the nearest-even cast of the master.
//   * A parameter without gradient is skipped, as everywhere in torch.
//   * A sparse gradient is made dense first, or added element by element (sparse_update.h).
//   * A parameter that somebody else wrote to keeps its state, and its master becomes what was
//     written: one whose version changed (copy_, an initialiser), or whose master's cast is not the
//     weight any more (an edit through .data() or a pointer).
// Beyond the state it needs at most one parameter's gradient in the type of its master and a few
// temporaries of that size.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/averaging.h"
#include "kernels/optimizer.h"
#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/torch_state.h"

namespace offload::zero3 {

struct InMemoryState {
  torch::Tensor master;  // fp32; of an fp32 or fp64 parameter the parameter itself
  torch::Tensor
      average;  // of the master; undefined where none is kept, and before the first update
  // In the type of the master, by number of the plane in the optimizer's row; undefined where it
  // keeps none.
  std::array<torch::Tensor, kernels::kStatePlanesMax> planes;
  int64_t step = 0;     // updates of this parameter
  int64_t version = 0;  // of the parameter after our last write
};

// What an optimizer keeps. An engine holds it longer than the trainer holds the optimizer.
class InMemoryStates {
 public:
  explicit InMemoryStates(kernels::OptimizerSpec kept) : kept_(std::move(kept)) {}

  // The state of a parameter; null before its first update.
  const InMemoryState* StateOf(const torch::Tensor& parameter) const;
  // As Engine::Gather.
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) const;
  // Calls of step() that returned.
  int64_t steps() const { return steps_; }
  // Whether it has states of no other parameters.
  bool AreWithin(const std::unordered_set<const void*>& tensors) const;

 private:
  friend class InMemoryOptimizer;

  const kernels::OptimizerSpec kept_;
  std::unordered_map<const void*, InMemoryState> states_;  // by TensorImpl
  int64_t steps_ = 0;
};

class InMemoryOptimizer final : public torch::optim::Optimizer,
                                public StateKeeper,
                                public MasterKeeper {
 public:
  // Errors as SpecOfAll.
  InMemoryOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, NamedOptimizer optimizer,
                    const Averaging& averaging = {});

  torch::Tensor step(LossClosure closure = nullptr) override;
  void BeginWith(std::vector<KeptState> states) override { ReplaceState(states); }
  void ReplaceState(std::span<const KeptState> states) override;
  bool IsLeft() const override { return states_->steps() > 0; }
  std::vector<KeptState> GatherState() const override;
  ShownState& shown_state() override { return shown_; }
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Of a parameter that was not updated yet there is none.
  std::vector<torch::Tensor> Masters() const override;
  bool TakeReadMasters(bool is_last) override;

  const std::shared_ptr<InMemoryStates>& states() const { return states_; }
  const InMemoryState* StateOf(const torch::Tensor& parameter) const {
    return states_->StateOf(parameter);
  }
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) const {
    return states_->Gather(parameter, plane);
  }

 private:
  void ForEachWithGradient(absl::FunctionRef<void(torch::Tensor& parameter)> work);
  // A master follows what was written into its weight since the last step.
  void FollowWeight(const torch::Tensor& parameter);
  void UpdateParameter(const kernels::OptimizerSpec& optimizer, torch::Tensor& parameter);

  // Behind an update; as swa_utils.AveragedModel.
  void MoveAverage(InMemoryState& state) const;

  const NamedOptimizer optimizer_;
  const Averaging averaging_;
  const std::shared_ptr<InMemoryStates> states_;
  ShownState shown_;
};

}  // namespace offload::zero3

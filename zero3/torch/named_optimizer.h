// zero3/torch/named_optimizer.h
//
// An optimizer of the table (kernels/optimizer.h) under torch's names: its options are torch's own
// class, so that schedulers that write lr() into param_groups() work as ever, and they are read
// anew for every step. The public functions of <offload/torch.h> make these; the engines do with
// them.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "base/averaging.h"
#include "kernels/optimizer.h"

namespace offload::zero3 {

struct NamedOptimizer {
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::function<kernels::OptimizerSpec(const torch::optim::OptimizerOptions&)> spec_of;
  // Whether torch counts its update as a write of the weights (their version), which lets the
  // backward of a graph from before the step fail.
  bool counts_as_write = false;
};

// The one that computes what an object of torch::optim computes; nothing for LBFGS and classes that
// are not torch's.
std::optional<NamedOptimizer> NamedAs(const torch::optim::Optimizer& optimizer);

// Every parameter of the module once, in its order.
std::vector<torch::optim::OptimizerParamGroup> OneGroup(const torch::nn::Module& module);

// The optimizer with a group's options. OFD-1002 for values that make no sense.
kernels::OptimizerSpec CheckedSpec(const NamedOptimizer& optimizer,
                                   const torch::optim::OptimizerOptions& options);

// OFD-1002 for a parameter that is in two places: torch steps it as often as a group names it.
void CheckEachOnce(std::span<const torch::optim::OptimizerParamGroup> groups);

// OFD-1604 where `needed` takes a plane that `kept` does not have.
void CheckKeeps(const kernels::OptimizerSpec& kept, const kernels::OptimizerSpec& needed);

// OFD-1604: the job keeps an average that would not move with what `what` says.
absl::Status AverageStays(const Averaging& averaging, const std::string& what);
// The same of a state of `given` updates for what has had `here` in this job, and is `what`.
absl::Status AverageHasMovedOtherwise(const Averaging& averaging, const std::string& what,
                                      uint64_t given, uint64_t here);

// The parameters of all groups (TensorImpl).
std::unordered_set<const void*> ParametersOf(
    std::span<const torch::optim::OptimizerParamGroup> groups);

// The optimizer with its defaults, but keeping all that any of the groups keeps. OFD-1002 for
// values that make no sense, and for a parameter that is in two places.
kernels::OptimizerSpec SpecOfAll(const NamedOptimizer& optimizer,
                                 std::span<const torch::optim::OptimizerParamGroup> groups);

}  // namespace offload::zero3

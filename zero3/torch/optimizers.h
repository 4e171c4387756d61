// zero3/torch/optimizers.h
//
// torch::optim::Optimizer whose arithmetic runs in the daemon.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <memory>
#include <vector>

#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/tensor_engine.h"

namespace offload::zero3 {

class ModuleList;

// The groups' options are read at every step(), which throws OFD-1002 for values that make no sense
// and OFD-1604 for those that need state that the job does not keep. What groups get later is
// looked for in `modules`. It is a StateKeeper.
std::unique_ptr<torch::optim::Optimizer> MakeOffloadOptimizer(
    std::shared_ptr<TensorEngine> engine, std::shared_ptr<ModuleList> modules,
    std::vector<torch::optim::OptimizerParamGroup> groups, NamedOptimizer optimizer);

}  // namespace offload::zero3

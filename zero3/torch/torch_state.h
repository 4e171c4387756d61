// zero3/torch/torch_state.h
//
// What torch's own optimizers (AdamW, Adam, SGD, Adagrad, RMSprop) keep, as KeptState and back. SGD
// counts no updates: a momentum buffer says that there was one.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <span>
#include <vector>

#include "zero3/torch/kept_state.h"

namespace offload::zero3 {

// Of the parameters that it has updated; nothing for other classes. Tensors are the optimizer's
// own. OFD-1604 for a state without updates that is not the one that the class begins with.
std::vector<KeptState> StateOf(const torch::optim::Optimizer& optimizer);

// As if it had made the updates itself. What it had before is gone.
void SetState(torch::optim::Optimizer& optimizer, std::span<const KeptState> states);

// Of the class that the optimizer's states have, without values; holds `held`.
std::unique_ptr<torch::optim::OptimizerParamState> BlankState(
    const torch::optim::Optimizer& optimizer, std::shared_ptr<void> held);

}  // namespace offload::zero3

// zero3/torch/optimizers.h
//
// torch::optim::Optimizer whose arithmetic runs in the daemon. Options are torch's own classes, so
// that schedulers that write lr() into param_groups() work as ever.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <offload/torch.h>

#include <memory>
#include <vector>

#include "zero3/torch/tensor_engine.h"

namespace offload::zero3 {

// OFD-1604 and OFD-1002 for options that are not supported or make no sense.
void CheckOptions(const torch::optim::AdamWOptions& options);
void CheckOptions(const torch::optim::SGDOptions& options);

std::unique_ptr<torch::optim::Optimizer> MakeAdamW(
    std::shared_ptr<TensorEngine> engine, std::vector<torch::optim::OptimizerParamGroup> groups,
    const torch::optim::AdamWOptions& defaults, AdamWFlavour flavour);
std::unique_ptr<torch::optim::Optimizer> MakeSgd(
    std::shared_ptr<TensorEngine> engine, std::vector<torch::optim::OptimizerParamGroup> groups,
    const torch::optim::SGDOptions& defaults);

}  // namespace offload::zero3

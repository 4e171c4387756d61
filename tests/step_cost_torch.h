// tests/step_cost_torch.h
//
// A trainer whose steps are mostly overhead (step_cost_torch.cc), linked with offload and without:
// tests/disabled_benchmark.py compares the two.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

// Attaches the module where the library is linked, else does nothing.
void AttachWhereLinked(torch::nn::Module& module, torch::optim::Optimizer& optimizer);

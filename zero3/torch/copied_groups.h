// zero3/torch/copied_groups.h
//
// Groups of an object of torch::optim that stands for another one.
//
// Thread safety: as torch::optim::Optimizer: one thread for each.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <vector>

namespace offload::zero3 {

// Gives `to` the groups of `from`, with the options that they have now: copies, those of a group
// that names none being the defaults of `from`.
inline void CopyGroups(torch::optim::Optimizer& from, torch::optim::Optimizer& to) {
  auto &source = from.param_groups(), &target = to.param_groups();
  while (target.size() > source.size()) target.pop_back();
  for (size_t i = 0; i < source.size(); ++i) {
    if (i == target.size()) target.emplace_back(std::vector<at::Tensor>());
    target[i].params() = source[i].params();
    target[i].set_options(source[i].has_options() ? source[i].options().clone()
                                                  : from.defaults().clone());
  }
}

}  // namespace offload::zero3

// zero3/torch/update_counts.h
//
// Which steps count as updates of a parameter: those after which its optimizer keeps something, as
// in torch, where a step of SGD without momentum leaves no state. So the first step that has
// momentum fills the buffer, however many went before it. An average counts all of them.
#pragma once

#include "kernels/optimizer.h"

namespace offload::zero3 {

inline bool IsCounted(const kernels::OptimizerSpec& optimizer) {
  return optimizer.name() != "sgd" || optimizer.Get("momentum") != 0 ||
         optimizer.averaging().is_on();
}

}  // namespace offload::zero3

// kernels/trust_ratio.h
//
// The end of the sums that norms are made of (kernels/update.h: Norms), for the processor and for
// GPUs. Internal to kernels/.
#pragma once

#include <cmath>

#include "kernels/device_code.h"

namespace offload::kernels {

// Pairwise, of Norms::kLanes.
OFFLOAD_DEVICE_CODE inline double SumOfLanes(const double* lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

// Of the sums of squares of all blocks.
OFFLOAD_DEVICE_CODE inline double RatioOfSums(double weight, double update) {
  return weight > 0 && update > 0 ? sqrt(weight) / sqrt(update) : 1;
}

}  // namespace offload::kernels

// zero3/torch/square_roots.h
//
// The square roots that torch takes on this processor, in tensors of whichever shape, measured
// (kernels/square_root.h). Some 0.1 s, and 4 MiB while the result lives.
#pragma once

#include "kernels/square_root.h"

namespace offload::zero3 {

// Throws OFD-1604 when they follow no pattern that can be measured.
kernels::SquareRoots MeasureSquareRoots();

}  // namespace offload::zero3

// zero3/torch/square_roots.h
//
// The square roots that torch takes on this processor, in tensors of whichever shape, measured
// (kernels/square_root.h).
#pragma once

#include "kernels/square_root.h"

namespace offload::zero3 {

// Measured by the first call of the process: some 0.1 s, and 4 MiB from then on. Throws OFD-1604
// when they follow no pattern that can be measured.
const kernels::SquareRoots& TorchSquareRoots();

// Whether those of fp64 numbers, which are too many to be measured, are the nearest, as those are
// that the daemon takes. By samples, once per process: a library that gives up the last place does
// so for one number in a hundred.
bool TorchDoubleRootsAreNearest();

}  // namespace offload::zero3

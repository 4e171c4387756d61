// kernels/library_roots.h
//
// The square roots of libraries that exist, number by number, for tests.
#pragma once

#include <span>

#include "kernels/square_root.h"

namespace offload::kernels {

// Whether this processor has the estimate that the sequence begins with.
bool HasRootsOf(RootSequence sequence);
// Replaces values by their roots: the sequence's for positive numbers, of subnormal ones by way of
// the normal number that is 2^64 times as large; the nearest for all others. Requires HasRootsOf().
void TakeRootsBy(RootSequence sequence, std::span<float> values);

}  // namespace offload::kernels

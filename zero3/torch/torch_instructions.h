// zero3/torch/torch_instructions.h
//
// Whether torch computes here with instructions whose results the daemon's updates have.
//
// Thread safety: may be called from any thread.
#pragma once

namespace offload::zero3 {

// Throws OFD-1604 where torch computes without AVX2. Its kernels for that round products and sums
// one by one, while the daemon's updates have the bits of those that fuse them.
void CheckInstructions();

}  // namespace offload::zero3

// kernels/sum.h
//
// Adds gradients of several ranks in a given order, in one pass over the elements:
//
//   S = nothing | zeros | what is in `sum`
//   for each part p:  p' = round(fl32(p) * factor), or p itself when the factor is 1
//                     S  = S is nothing ? p' : round(fl32(S) + fl32(p'))
//
// `round` is to the dtype, nearest and ties to even, after every operation: what torch's mul_ and
// add_ do one after the other, bit for bit. fp64 is computed in fp64 throughout. A NaN stays one;
// in bf16 it becomes 0xFFFF, as in torch's vectors, unless nothing at all is computed with it.
//
// Pure over its arguments, single-threaded, allocates nothing. Results do not depend on where a
// tensor is cut.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/update.h"

namespace offload::kernels {

enum class SumStart : uint8_t { kNothing, kZeros, kSum };

// A run of elements. `sum` may be none of the parts.
struct SumRun {
  Dtype dtype = Dtype::kFloat32;
  size_t count = 0;
  void* sum = nullptr;  // written; read when the start is kSum
  SumStart start = SumStart::kNothing;
  const void* const* parts = nullptr;  // in order; at least one
  size_t part_count = 0;
  double factor = 1;  // rounded to fp32 for all but fp64
};

// True when no element of the new sum is NaN or infinite.
bool AddParts(const SumRun& run);
// The same by a given implementation, which the processor must support: for tests and benchmarks.
bool AddParts(Isa isa, const SumRun& run);

}  // namespace offload::kernels

// kernels/update.h
//
// The optimizer update of a run of elements in one pass: unscale, clip, decay, state, weight, and
// for bf16 and fp16 models the merge of the fp32 master before and the exact split after.
// Formulas and their order of roundings are torch's, bit for bit (torch 2.11, CPU with FMA); every
// rule in kernels/rules names the source of its own.
//
// All functions are pure over their arguments, single-threaded, and allocate nothing: callers split
// tensors among threads. Results do not depend on where a tensor is cut, because a call knows its
// place in its tensor.
//
// Subnormal numbers are computed with, as torch does by default: nothing here touches the
// processor's flush-to-zero modes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "kernels/split.h"

namespace offload::kernels {

// A run of elements of one tensor. Pointers are to its first element; arrays are updated in place.
struct Run {
  size_t count = 0;
  uint64_t begin = 0;         // index of the first element in its tensor
  uint64_t tensor_count = 0;  // elements of the whole tensor: in torch's fused kernels the last
                              // ones, less than 32 bytes of them, round in another order
  // fp32 and fp64 models: the master. bf16 and fp16 models: the working weight, with the rest of
  // the master in a residual. A gradient of fp64 or fp16 comes with a weight of that dtype, and
  // only with one.
  Dtype weight_dtype = Dtype::kFloat32;
  void* weight = nullptr;
  int16_t* residual = nullptr;        // bf16 models only
  uint32_t* half_residual = nullptr;  // fp16 models only
  // bf16: tie bits of these elements before and after, in element order (kernels/split.h); advanced
  // by the call.
  TieReader* ties_in = nullptr;
  TieWriter* ties_out = nullptr;
  // By number of the plane in the optimizer's row. Those that it does not keep may be null.
  float* state[kStatePlanesMax] = {};
  double* double_state[kStatePlanesMax] = {};  // fp64 models: in place of `state`
  Dtype gradient_dtype = Dtype::kFloat32;
  const void* gradient = nullptr;
  // Multiplies the gradient first, rounding to the gradient's dtype as torch's in-place mul_ does;
  // an fp32 number but for fp64 models. 1 means untouched.
  double gradient_scale = 1;
  // SquareRoots::corrections() of the library whose roots are taken, by optimizers that follow
  // somebody who calls one (TakesLibraryRoots()). Null, and of fp64 models: the nearest roots.
  const uint32_t* roots = nullptr;
  // Of optimizers that need norms: TrustRatio() of the whole tensor.
  double trust_ratio = 1;
};

// Sums of squares of a tensor's masters and of their updates before the trust ratio, for optimizers
// whose update of an element depends on them. The order of the additions is fixed: element i of
// the tensor goes to lane i mod 8, ascending within a block of kBlockElements; the lanes of a block
// are added pairwise; blocks are added in ascending order (SumOfLanes, TrustRatio). So it depends
// on neither tiles, threads nor memory.
struct Norms {
  static constexpr size_t kLanes = 8;
  static constexpr uint64_t kBlockElements = 256 * 1024;  // an extent of the store
  double weight[kLanes] = {}, update[kLanes] = {};
};
bool NeedsNorms(const OptimizerSpec& optimizer);
// The sweep before the update: adds the run's elements, all of one block, and changes nothing else.
void AddNorms(const OptimizerSpec& optimizer, int64_t step, const Run& run, Norms* norms);
void AddNorms(Isa isa, const OptimizerSpec& optimizer, int64_t step, const Run& run, Norms* norms);
// ||masters|| / ||updates|| of all blocks of a tensor, 1 when either is zero.
double TrustRatio(std::span<const Norms> blocks);

// Update number `step` of the run's tensor, 1 for its first: bias corrections use it, and state
// that does not begin with zeros begins there.
void Update(const OptimizerSpec& optimizer, int64_t step, const Run& run);
// The same by a given implementation, which the processor must support: for tests and benchmarks.
void Update(Isa isa, const OptimizerSpec& optimizer, int64_t step, const Run& run);

// What multiplies gradients of that dtype, in fp32 and last: the inverse of a loss scale, times a
// clip coefficient, as rounding that to fp16 would lose what the scale has saved. A parameter of
// the rules of torch.optim ("unscale"), without effect on gradients of other types than fp16.
float UnscaleOf(const OptimizerSpec& optimizer, Dtype gradient_dtype);

// True when no element is NaN or infinite.
bool AllFinite(Dtype dtype, const void* values, size_t count);
bool AllFinite(Isa isa, Dtype dtype, const void* values, size_t count);

}  // namespace offload::kernels

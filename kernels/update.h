// kernels/update.h
//
// The optimizer update of a run of elements in one pass: unscale, clip, decay, moments, weight, and
// for bf16 models the merge of the fp32 master from its halves before and the exact split after.
// Formulas and their order of roundings are torch's, bit for bit (torch 2.11, CPU with FMA);
// the notes in update.cc name the source of each.
//
// All functions are pure over their arguments, single-threaded, and allocate nothing: callers split
// tensors among threads. Results do not depend on where a tensor is cut, because a call knows its
// place in its tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/isa.h"
#include "kernels/split.h"

namespace offload::kernels {

enum class Dtype : uint8_t { kFloat32 = 0, kBFloat16 = 1 };

// Which of torch's AdamW implementations the result is bit-equal to.
enum class AdamWFlavour : uint8_t {
  kFused = 0,   // at::_fused_adamw_
  kLerp = 1,    // torch.optim.AdamW default and foreach (up to their vector square root)
  kMulAdd = 2,  // C++ torch::optim::AdamW (up to its vector square root)
};

struct AdamWParameters {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  int64_t step = 1;  // 1 for the first update: bias correction uses it
  AdamWFlavour flavour = AdamWFlavour::kFused;
  bool maximize = false;
};

// torch.optim.SGD:
//   d = g + weight_decay*p
//   buf = first ? d : momentum*buf + (1-dampening)*d
//   p -= lr*(nesterov ? d + momentum*buf : buf)
struct SgdParameters {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  bool first = true;  // the momentum buffer has no value yet
};

// A run of elements of one tensor. Pointers are to its first element; arrays are updated in place.
struct Run {
  size_t count = 0;
  uint64_t begin = 0;         // index of the first element in its tensor
  uint64_t tensor_count = 0;  // elements of the whole tensor: AdamW's last tensor_count mod 8
                              // elements round in another order
  // fp32 model: the master. bf16 model: the working weight, its other half is `residual`.
  Dtype weight_dtype = Dtype::kFloat32;
  void* weight = nullptr;
  int16_t* residual = nullptr;  // bf16 models only
  // bf16: tie bits of these elements before and after, in element order (kernels/split.h); advanced
  // by the call.
  TieReader* ties_in = nullptr;
  TieWriter* ties_out = nullptr;
  float* exp_avg = nullptr;     // SGD: momentum buffer, null when momentum is 0
  float* exp_avg_sq = nullptr;  // AdamW only
  Dtype gradient_dtype = Dtype::kFloat32;
  const void* gradient = nullptr;
  // Multiplies the gradient first, rounding to the gradient's dtype as torch's in-place mul_ does.
  // 1 means untouched.
  float gradient_scale = 1.0f;
};

void UpdateAdamW(const AdamWParameters& parameters, const Run& run);
void UpdateSgd(const SgdParameters& parameters, const Run& run);
// The same by a given implementation, which the processor must support: for tests and benchmarks.
void UpdateAdamW(Isa isa, const AdamWParameters& parameters, const Run& run);
void UpdateSgd(Isa isa, const SgdParameters& parameters, const Run& run);

// True when no element is NaN or infinite.
bool AllFinite(Dtype dtype, const void* values, size_t count);
bool AllFinite(Isa isa, Dtype dtype, const void* values, size_t count);

}  // namespace offload::kernels

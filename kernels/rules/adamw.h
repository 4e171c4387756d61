// kernels/rules/adamw.h
//
// AdamW. Formulas (torch 2.11, CPU with FMA; `fl` rounds a double to fp32, and for fp64
// models, which are computed in fp64 throughout, not at all); a decay of zero multiplies by one,
// which changes nothing:
//   p1 = p * fl(1 - lr*wd)
//   r  = amsgrad ? max(r, v) : v
//   p  = p1 - (fl(lr/(1-b1^t)) * m) / (sqrt(r)/fl(sqrt(1-b2^t)) + fl(eps))
//
// kFused is at::_fused_adamw_. Its m is a lerp, which torch computes from the nearer end:
//   m  = fma(w, g-m, m) for |w| < 0.5, w = fl(1-b1), else fma(w-1, g-m, g)
//   v  = fma(fl(1-b2)*g, g, v*fl(b2))     in its loop over vectors of 32 bytes
//   v  = fma(v, fl(b2), (fl(1-b2)*g)*g)   in its scalar loop over the rest: the rule of the tail
//
// kLerp is lerp_, then mul_ and addcmul_, sqrt, addcdiv_: no tail, Python's `** 0.5` for the root
// of the bias correction, and the roots of torch's vector library (Run::roots).
//
// With `tensor_lr` (Python's lr=torch.tensor(...)) its expressions of lr are of fp32 numbers:
// 1 - fl(lr*fl(wd)) and lr/fl(1-b1^t).
//
// kMulAdd is mul_ and add_ for m, the rest as kLerp:
//   m  = fma(w, g, m*fl(b1))
//
// Maximizing negates the (scaled) gradient before anything else, which is exact.
#pragma once

#include <cstddef>

#include "kernels/vector_run.h"

namespace offload::kernels {

// Which of torch's implementations the result is bit-equal to.
enum class AdamWFlavour : uint8_t {
  kFused = 0,   // at::_fused_adamw_
  kLerp = 1,    // torch.optim.AdamW default and foreach
  kMulAdd = 2,  // C++ torch::optim::AdamW
};

namespace rules {

template <class T>
struct AdamConstants {
  T decay;  // 1 - lr*weight_decay
  T beta1;
  T exp_avg_weight;  // 1 - beta1
  T beta2;
  T exp_avg_sq_weight;      // 1 - beta2
  T bias_correction2_sqrt;  // sqrt(1 - beta2^step)
  T eps;
  T step_size;    // lr / (1 - beta1^step)
  bool is_lerp;   // exp_avg moves by lerp; else it is multiplied, then added to
  bool has_tail;  // the last tensor_count mod 8 elements round exp_avg_sq in another order
  bool amsgrad;
  bool maximize;
  bool takes_library_roots;
};

bool AdamTakesLibraryRoots(const double* values);

// Of values in the order of AdamW's parameters.
template <class T>
AdamConstants<T> AdamConstantsOf(const double* values, int64_t step);

// The moments of the Adam family for one element, stored: returns where the master goes from
// `start`.
template <class T>
T NextAdamMaster(const AdamConstants<T>& constants, const Run& run, size_t i, bool in_tail,
                 T gradient, T start);

// The same for a vector.
template <class V, bool kInTail>
struct AdamMoments {
  using Float = typename V::Float;

  OFFLOAD_DEVICE_CODE AdamMoments(const AdamConstants<typename V::Scalar>& c, const Run& run)
      : beta1(V::Broadcast(c.beta1)),
        exp_avg_weight(V::Broadcast(c.exp_avg_weight)),
        beta2(V::Broadcast(c.beta2)),
        exp_avg_sq_weight(V::Broadcast(c.exp_avg_sq_weight)),
        bias_correction2_sqrt(V::Broadcast(c.bias_correction2_sqrt)),
        eps(V::Broadcast(c.eps)),
        step_size(V::Broadcast(c.step_size)),
        is_lerp(c.is_lerp),
        is_short_lerp(c.exp_avg_weight > -0.5f && c.exp_avg_weight < 0.5f),
        amsgrad(c.amsgrad),
        root(c.takes_library_roots ? run.roots : nullptr) {}

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE Float NextExpAvg(Float exp_avg, Float gradient) const {
    if (!is_lerp) return V::Fma(exp_avg_weight, gradient, exp_avg * beta1);
    const Float distance = gradient - exp_avg;
    if (is_short_lerp) return V::Fma(exp_avg_weight, distance, exp_avg);
    return V::Fma(exp_avg_weight - V::Broadcast(1.0f), distance, gradient);
  }

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE Float NextExpAvgSq(Float exp_avg_sq,
                                                                Float gradient) const {
    const Float weighted = exp_avg_sq_weight * gradient;
    if constexpr (kInTail) return V::Fma(exp_avg_sq, beta2, weighted * gradient);
    return V::Fma(weighted, gradient, exp_avg_sq * beta2);
  }

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE Float NextMaster(const Arrays& arrays, size_t i,
                                                              Float gradient, Float start) const {
    const Float exp_avg = NextExpAvg(V::Load(arrays.state[0] + i), gradient);
    const Float exp_avg_sq = NextExpAvgSq(V::Load(arrays.state[1] + i), gradient);
    V::Store(arrays.state[0] + i, exp_avg);
    V::Store(arrays.state[1] + i, exp_avg_sq);
    Float square = exp_avg_sq;
    if (amsgrad) {
      square = V::Max(V::Load(arrays.state[2] + i), exp_avg_sq);
      V::Store(arrays.state[2] + i, square);
    }
    return start - (step_size * exp_avg) / (root(square) / bias_correction2_sqrt + eps);
  }

  const Float beta1, exp_avg_weight, beta2, exp_avg_sq_weight, bias_correction2_sqrt, eps,
      step_size;
  const bool is_lerp, is_short_lerp, amsgrad;
  const RootTaker<V> root;
};

template <class V, bool kInTail>
struct AdamWStep {
  OFFLOAD_DEVICE_CODE AdamWStep(const AdamConstants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.maximize), decay(V::Broadcast(c.decay)), moments(c, run) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    const typename V::Float gradient = gradient_loader.Load(arrays.gradient + i);
    const typename V::Float decayed = LoadMaster<V>(arrays, i) * decay;
    StoreMaster<V>(arrays, i, moments.NextMaster(arrays, i, gradient, decayed));
  }

  const GradientLoader<V> gradient_loader;
  const typename V::Float decay;
  const AdamMoments<V, kInTail> moments;
};

struct AdamW {
  template <class T>
  using ConstantsOf = AdamConstants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const AdamConstants<T>& constants, const Run& run);
  static constexpr bool kHasTail = true;
  template <class T>
  static size_t TailBegin(const AdamConstants<T>& constants, const Run& run);
  template <class V, bool kInTail>
  using Step = AdamWStep<V, kInTail>;
};

}  // namespace rules
}  // namespace offload::kernels

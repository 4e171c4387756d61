// kernels/rules/lamb.h
//
// LAMB ("Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
// arXiv:1904.00962, algorithm 2, with the identity as its function of the norm). torch has none:
// the order of operations is ours, by torch's operators; `fl` rounds a double to fp32, and
// for fp64 models not at all:
//   m  = fma(fl(1-b1), g, m*fl(b1))
//   v  = fma(fl(1-b2)*g, g, v*fl(b2))
//   u  = (m*fl(1/(1-b1^t))) / (sqrt(v)/fl(sqrt(1-b2^t)) + fl(eps))
//   u' = fma(wd, p, u), or u when wd is zero
//   p  = fma(-fl(lr*ratio), u', p)     ratio = ||p|| / ||u'|| of the tensor, 1 when either is zero
// Two sweeps: the first computes u' and changes nothing, the second computes it again. The sums of
// squares have a fixed order (kernels/update.h: Norms), so that the ratio depends on neither
// threads nor memory.
#pragma once

#include <cstddef>

#include "kernels/vector_run.h"

namespace offload::kernels::rules {

template <class T>
struct LambConstants {
  T beta1, exp_avg_weight;     // 1 - beta1
  T beta2, exp_avg_sq_weight;  // 1 - beta2
  T exp_avg_scale;             // 1 / (1 - beta1^step)
  T bias_correction2_sqrt, eps, weight_decay;
  double lr;
  bool has_weight_decay, maximize;
};

template <class V>
struct LambDirection {
  using Float = typename V::Float;

  OFFLOAD_DEVICE_CODE LambDirection(const LambConstants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.maximize),
        beta1(V::Broadcast(c.beta1)),
        exp_avg_weight(V::Broadcast(c.exp_avg_weight)),
        beta2(V::Broadcast(c.beta2)),
        exp_avg_sq_weight(V::Broadcast(c.exp_avg_sq_weight)),
        exp_avg_scale(V::Broadcast(c.exp_avg_scale)),
        bias_correction2_sqrt(V::Broadcast(c.bias_correction2_sqrt)),
        eps(V::Broadcast(c.eps)),
        weight_decay(V::Broadcast(c.weight_decay)),
        has_weight_decay(c.has_weight_decay) {}

  // u', with the moments that it comes from.
  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE Float operator()(const Arrays& arrays, size_t i,
                                                              Float master, Float* exp_avg,
                                                              Float* exp_avg_sq) const {
    const Float gradient = gradient_loader.Load(arrays.gradient + i);
    *exp_avg = V::Fma(exp_avg_weight, gradient, V::Load(arrays.state[0] + i) * beta1);
    *exp_avg_sq =
        V::Fma(exp_avg_sq_weight * gradient, gradient, V::Load(arrays.state[1] + i) * beta2);
    const Float denominator = V::Sqrt(*exp_avg_sq) / bias_correction2_sqrt + eps;
    const Float update = (*exp_avg * exp_avg_scale) / denominator;
    return has_weight_decay ? V::Fma(weight_decay, master, update) : update;
  }

  const GradientLoader<V> gradient_loader;
  const Float beta1, exp_avg_weight, beta2, exp_avg_sq_weight, exp_avg_scale, bias_correction2_sqrt,
      eps, weight_decay;
  const bool has_weight_decay;
};

template <class V>
struct LambStep {
  OFFLOAD_DEVICE_CODE LambStep(const LambConstants<typename V::Scalar>& c, const Run& run)
      : direction(c, run),
        negative_lr(V::Broadcast(-static_cast<typename V::Scalar>(c.lr * run.trust_ratio))) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    typename V::Float exp_avg, exp_avg_sq;
    const typename V::Float master = LoadMaster<V>(arrays, i);
    const typename V::Float update = direction(arrays, i, master, &exp_avg, &exp_avg_sq);
    V::Store(arrays.state[0] + i, exp_avg);
    V::Store(arrays.state[1] + i, exp_avg_sq);
    StoreMaster<V>(arrays, i, V::Fma(negative_lr, update, master));
  }

  const LambDirection<V> direction;
  const typename V::Float negative_lr;
};

// What the first sweep adds up: the master and u' of a vector.
template <class V>
struct LambTerms {
  OFFLOAD_DEVICE_CODE LambTerms(const LambConstants<typename V::Scalar>& c, const Run& run)
      : direction(c, run) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i,
                                                             typename V::Scalar* weight,
                                                             typename V::Scalar* update) const {
    typename V::Float exp_avg, exp_avg_sq;
    const typename V::Float master = LoadMaster<V>(arrays, i);
    V::Store(weight, master);
    V::Store(update, direction(arrays, i, master, &exp_avg, &exp_avg_sq));
  }

  const LambDirection<V> direction;
};

struct Lamb {
  template <class T>
  using ConstantsOf = LambConstants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const LambConstants<T>& constants, const Run& run);
  template <class T>
  static void ReferenceNorms(const LambConstants<T>& constants, const Run& run, Norms* norms);
  static constexpr bool kHasTail = false;
  template <class V, bool kInTail>
  using Step = LambStep<V>;
  template <class V>
  using Terms = LambTerms<V>;
};

}  // namespace offload::kernels::rules

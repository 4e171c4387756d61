// kernels/rules/lion.h
//
// Lion ("Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675), by the operators of the
// PyTorch program that its authors published with it, in their order; `fl`
// rounds a double to fp32, and for fp64 models not at all:
//   p1 = p * fl(1 - lr*wd)
//   u  = m*fl(b1) + g*fl(1-b1)            each product rounded, then the sum
//   p  = p1 - fl(lr)*sign(u)
//   m  = fma(fl(1-b2), g, m*fl(b2))
#pragma once

#include <cstddef>

#include "kernels/vector_run.h"

namespace offload::kernels::rules {

template <class T>
struct LionConstants {
  T lr, decay;              // decay: 1 - lr*weight_decay
  T beta1, update_weight;   // 1 - beta1
  T beta2, exp_avg_weight;  // 1 - beta2
  bool maximize;
};

template <class V>
struct LionStep {
  using Float = typename V::Float;

  OFFLOAD_DEVICE_CODE LionStep(const LionConstants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.maximize),
        negative_lr(V::Broadcast(-c.lr)),
        decay(V::Broadcast(c.decay)),
        beta1(V::Broadcast(c.beta1)),
        update_weight(V::Broadcast(c.update_weight)),
        beta2(V::Broadcast(c.beta2)),
        exp_avg_weight(V::Broadcast(c.exp_avg_weight)) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    const Float gradient = gradient_loader.Load(arrays.gradient + i);
    const Float decayed = LoadMaster<V>(arrays, i) * decay;
    const Float exp_avg = V::Load(arrays.state[0] + i);
    const Float update = exp_avg * beta1 + gradient * update_weight;
    V::Store(arrays.state[0] + i, V::Fma(exp_avg_weight, gradient, exp_avg * beta2));
    StoreMaster<V>(arrays, i, V::Fma(negative_lr, V::Sign(update), decayed));
  }

  const GradientLoader<V> gradient_loader;
  const Float negative_lr, decay, beta1, update_weight, beta2, exp_avg_weight;
};

struct Lion {
  template <class T>
  using ConstantsOf = LionConstants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const LionConstants<T>& constants, const Run& run);
  static constexpr bool kHasTail = false;
  template <class V, bool kInTail>
  using Step = LionStep<V>;
};

}  // namespace offload::kernels::rules

// kernels/rules/sgd.h
//
// torch.optim.SGD. add(other, alpha) is fma(alpha, other, self) and mul_ rounds by itself, so:
//   d   = fma(wd, p, g), or g when wd is zero
//   buf = first ? d : fma(fl(1-dampening), d, buf*momentum)
//   d   = nesterov ? fma(momentum, buf, d) : buf, and d itself without momentum
//   p   = fma(-lr, d, p)
// Its fused kernel, which is compiled with contraction, comes to the same in its vectors, and to
//   buf = fma(momentum, buf, fl(1-dampening)*d)  in its scalar loop over the rest: the tail's rule.
// Maximizing negates the (scaled) gradient before anything else, which is exact.
#pragma once

#include <cstddef>

#include "kernels/vector_run.h"

namespace offload::kernels::rules {

template <class T>
struct SgdConstants {
  T lr, momentum, weight_decay;
  T gradient_weight;  // 1 - dampening
  bool has_momentum, has_weight_decay, nesterov, maximize;
  bool first;     // the momentum buffer has no value yet
  bool has_tail;  // the last tensor_count mod 8 elements round the buffer in another order
};

template <class V, bool kInTail>
struct SgdStep {
  using Float = typename V::Float;

  OFFLOAD_DEVICE_CODE SgdStep(const SgdConstants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.maximize),
        negative_lr(V::Broadcast(-c.lr)),
        momentum(V::Broadcast(c.momentum)),
        gradient_weight(V::Broadcast(c.gradient_weight)),
        weight_decay(V::Broadcast(c.weight_decay)),
        has_momentum(c.has_momentum),
        has_weight_decay(c.has_weight_decay),
        nesterov(c.nesterov),
        first(c.first) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    const Float master = LoadMaster<V>(arrays, i);
    Float direction = gradient_loader.Load(arrays.gradient + i);
    if (has_weight_decay) direction = V::Fma(weight_decay, master, direction);
    if (has_momentum) {
      Float buffer = direction;
      if (!first) buffer = NextBuffer(V::Load(arrays.state[0] + i), direction);
      V::Store(arrays.state[0] + i, buffer);
      direction = nesterov ? V::Fma(momentum, buffer, direction) : buffer;
    }
    StoreMaster<V>(arrays, i, V::Fma(negative_lr, direction, master));
  }

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE Float NextBuffer(Float buffer, Float direction) const {
    if constexpr (kInTail) return V::Fma(momentum, buffer, gradient_weight * direction);
    return V::Fma(gradient_weight, direction, buffer * momentum);
  }

  const GradientLoader<V> gradient_loader;
  const Float negative_lr, momentum, gradient_weight, weight_decay;
  const bool has_momentum, has_weight_decay, nesterov, first;
};

struct Sgd {
  template <class T>
  using ConstantsOf = SgdConstants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const SgdConstants<T>& constants, const Run& run);
  static constexpr bool kHasTail = true;
  template <class T>
  static size_t TailBegin(const SgdConstants<T>& constants, const Run& run);
  template <class V, bool kInTail>
  using Step = SgdStep<V, kInTail>;
};

}  // namespace offload::kernels::rules

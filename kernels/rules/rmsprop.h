// kernels/rules/rmsprop.h
//
// RMSprop by the operators of torch.optim.RMSprop's loop over parameters; sqrt is that of torch's
// vector library (Run::roots). `fl` rounds a double to fp32, and
// for fp64 models not at all:
//   g'  = fma(wd, p, g), or g when wd is zero
//   sq  = fma(fl(1-alpha)*g', g', sq*fl(alpha))
//   ga  = lerp(ga, g', fl(1-alpha)), from the nearer end       centered only
//   avg = sqrt(centered ? fma(-ga, ga, sq) : sq) + fl(eps)
//   buf = buf*fl(momentum) + g'/avg                            with momentum
//   p   = momentum ? fma(-fl(lr), buf, p) : p - (fl(lr)*g')/avg
// Without `lerp`, the C++ class torch::optim::RMSprop, whose ga is multiplied, then added to:
//   ga  = fma(fl(1-alpha), g', ga*fl(alpha))
#pragma once

#include <cstddef>

#include "kernels/vector_run.h"

namespace offload::kernels::rules {

template <class T>
struct RmsPropConstants {
  T lr, alpha, weight, eps, weight_decay, momentum;  // weight: 1 - alpha
  bool has_weight_decay, has_momentum, centered, lerp, maximize;
};

template <class V>
struct RmsPropStep {
  using Float = typename V::Float;

  OFFLOAD_DEVICE_CODE RmsPropStep(const RmsPropConstants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.maximize),
        lr(V::Broadcast(c.lr)),
        alpha(V::Broadcast(c.alpha)),
        weight(V::Broadcast(c.weight)),
        eps(V::Broadcast(c.eps)),
        weight_decay(V::Broadcast(c.weight_decay)),
        momentum(V::Broadcast(c.momentum)),
        has_weight_decay(c.has_weight_decay),
        has_momentum(c.has_momentum),
        centered(c.centered),
        lerp(c.lerp),
        is_short_lerp(c.weight > -0.5f && c.weight < 0.5f),
        root(run.roots) {}

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE Float NextGradAvg(Float grad_avg,
                                                               Float gradient) const {
    if (!lerp) return V::Fma(weight, gradient, grad_avg * alpha);
    const Float distance = gradient - grad_avg;
    if (is_short_lerp) return V::Fma(weight, distance, grad_avg);
    return V::Fma(weight - V::Broadcast(1.0f), distance, gradient);
  }

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    const Float master = LoadMaster<V>(arrays, i);
    Float gradient = gradient_loader.Load(arrays.gradient + i);
    if (has_weight_decay) gradient = V::Fma(weight_decay, master, gradient);
    const Float square_avg =
        V::Fma(weight * gradient, gradient, V::Load(arrays.state[0] + i) * alpha);
    V::Store(arrays.state[0] + i, square_avg);
    Float variance = square_avg;
    if (centered) {
      const Float grad_avg = NextGradAvg(V::Load(arrays.state[2] + i), gradient);
      V::Store(arrays.state[2] + i, grad_avg);
      variance = V::Fma(V::Broadcast(-1.0f) * grad_avg, grad_avg, square_avg);
    }
    const Float average = root(variance) + eps;
    if (!has_momentum) return StoreMaster<V>(arrays, i, master - (lr * gradient) / average);
    const Float buffer = V::Load(arrays.state[1] + i) * momentum + gradient / average;
    V::Store(arrays.state[1] + i, buffer);
    StoreMaster<V>(arrays, i, V::Fma(V::Broadcast(-1.0f) * lr, buffer, master));
  }

  const GradientLoader<V> gradient_loader;
  const Float lr, alpha, weight, eps, weight_decay, momentum;
  const bool has_weight_decay, has_momentum, centered, lerp, is_short_lerp;
  const RootTaker<V> root;
};

struct RmsProp {
  template <class T>
  using ConstantsOf = RmsPropConstants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const RmsPropConstants<T>& constants, const Run& run);
  static constexpr bool kHasTail = false;
  template <class V, bool kInTail>
  using Step = RmsPropStep<V>;
};

}  // namespace offload::kernels::rules

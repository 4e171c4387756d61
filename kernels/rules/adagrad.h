// kernels/rules/adagrad.h
//
// Adagrad (torch 2.11, CPU with FMA; `fl` rounds a double to fp32, and
// for fp64 models not at all):
//   g'  = fma(wd, p, g), or g when wd is zero
//   sum = fma(g', g', sum), where sum begins with initial_accumulator_value
//   p   = p - (fl(lr/(1 + (t-1)*lr_decay)) * g') / (sqrt(sum) + fl(eps))
// where with `tensor_lr` (Python's lr=torch.tensor(...)) the quotient is one of fp32 numbers.
// With `fused`, as at::_fused_adagrad_ computes it, the root is the nearest; without, as
// torch.optim.Adagrad's loop and the C++ class do, that of torch's vector library (Run::roots).
#pragma once

#include <cstddef>

#include "kernels/vector_run.h"

namespace offload::kernels::rules {

template <class T>
struct AdagradConstants {
  T lr;  // after its decay
  T weight_decay, initial_sum, eps;
  bool has_weight_decay, maximize;
  bool first;  // the sum has no value yet
  bool fused;
};

template <class V>
struct AdagradStep {
  using Float = typename V::Float;

  OFFLOAD_DEVICE_CODE AdagradStep(const AdagradConstants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.maximize),
        lr(V::Broadcast(c.lr)),
        weight_decay(V::Broadcast(c.weight_decay)),
        initial_sum(V::Broadcast(c.initial_sum)),
        eps(V::Broadcast(c.eps)),
        has_weight_decay(c.has_weight_decay),
        first(c.first),
        root(c.fused ? nullptr : run.roots) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    const Float master = LoadMaster<V>(arrays, i);
    Float gradient = gradient_loader.Load(arrays.gradient + i);
    if (has_weight_decay) gradient = V::Fma(weight_decay, master, gradient);
    const Float sum =
        V::Fma(gradient, gradient, first ? initial_sum : V::Load(arrays.state[0] + i));
    V::Store(arrays.state[0] + i, sum);
    StoreMaster<V>(arrays, i, master - (lr * gradient) / (root(sum) + eps));
  }

  const GradientLoader<V> gradient_loader;
  const Float lr, weight_decay, initial_sum, eps;
  const bool has_weight_decay, first;
  const RootTaker<V> root;
};

struct Adagrad {
  template <class T>
  using ConstantsOf = AdagradConstants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const AdagradConstants<T>& constants, const Run& run);
  static constexpr bool kHasTail = false;
  template <class V, bool kInTail>
  using Step = AdagradStep<V>;
};

}  // namespace offload::kernels::rules

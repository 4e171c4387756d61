// kernels/rules/adam.h
//
// Adam as torch.optim.Adam has it, with weight decay as a part of the gradient (L2):
//   g' = fma(wd, p, g), or g when wd is zero
// and then as AdamW (kernels/rules/adamw.h) without its decay, in the same three flavours: kFused
// is at::_fused_adam_, kLerp torch.optim's loop and kMulAdd the C++ class.
#pragma once

#include <cstddef>

#include "kernels/rules/adamw.h"

namespace offload::kernels::rules {

template <class T>
struct AdamL2Constants {
  AdamConstants<T> adam;
  T weight_decay;
  bool has_weight_decay;
};

template <class V, bool kInTail>
struct AdamStep {
  OFFLOAD_DEVICE_CODE AdamStep(const AdamL2Constants<typename V::Scalar>& c, const Run& run)
      : gradient_loader(run, c.adam.maximize),
        weight_decay(V::Broadcast(c.weight_decay)),
        has_weight_decay(c.has_weight_decay),
        moments(c.adam, run) {}

  template <class Arrays>
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE void operator()(const Arrays& arrays, size_t i) const {
    const typename V::Float master = LoadMaster<V>(arrays, i);
    typename V::Float gradient = gradient_loader.Load(arrays.gradient + i);
    if (has_weight_decay) gradient = V::Fma(weight_decay, master, gradient);
    StoreMaster<V>(arrays, i, moments.NextMaster(arrays, i, gradient, master));
  }

  const GradientLoader<V> gradient_loader;
  const typename V::Float weight_decay;
  const bool has_weight_decay;
  const AdamMoments<V, kInTail> moments;
};

struct Adam {
  template <class T>
  using ConstantsOf = AdamL2Constants<T>;
  static const Optimizer kRow;
  template <class T>
  static void Reference(const AdamL2Constants<T>& constants, const Run& run);
  static constexpr bool kHasTail = true;
  template <class T>
  static size_t TailBegin(const AdamL2Constants<T>& constants, const Run& run);
  template <class V, bool kInTail>
  using Step = AdamStep<V, kInTail>;
};

}  // namespace offload::kernels::rules

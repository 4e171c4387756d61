// kernels/vector_update.h
//
// The kernels once for every vector width. V, a type of the including file, names the instructions:
//   V::Float                       a vector of V::kWidth fp32 lanes; + - * / round each lane once
//   V::Load, Store, Broadcast      unaligned: a run may begin inside a bundle of small tensors
//   V::Fma(a, b, c)                a*b + c, rounded once
//   V::Sqrt                        correctly rounded
//   V::LoadBFloat16, V::RoundToBFloat16
//   V::Merge(hi, lo, ties), V::Split(master, hi, lo, ties)
//   V::AnyNonFinite(const float*), V::AnyNonFinite(const uint16_t*)   of kWidth elements
//
// The last elements of a run that do not fill a vector take the same path, through zero-padded
// copies, so a result never depends on where a tensor is cut. Padding never has a tie: its master
// is zero, or the default NaN.
//
// Stores are ordinary ones. Every output line but the tie bits was read just before, so a streaming
// store saves no traffic, and it would send to DRAM the tile that is checksummed next. Measured, it
// halves the rate.
#pragma once

#include <cstring>

#include "kernels/implementation.h"
#include "kernels/vector_sum.h"

namespace offload::kernels {

template <Dtype kDtype>
struct ElementOf {
  using Type = float;
};
template <>
struct ElementOf<Dtype::kBFloat16> {
  using Type = uint16_t;
};

// The arrays of a run, with types.
template <Dtype kWeight, Dtype kGradient>
struct Arrays {
  using Weight = typename ElementOf<kWeight>::Type;
  using Gradient = typename ElementOf<kGradient>::Type;
  static constexpr bool kIsSplit = kWeight == Dtype::kBFloat16;

  Weight* weight;
  int16_t* residual;
  float* exp_avg;
  float* exp_avg_sq;
  const Gradient* gradient;
  TieReader* ties_in;
  TieWriter* ties_out;
};

// One vector's worth of arrays for the elements that do not fill one.
template <class V, class Arrays>
class PaddedArrays {
 public:
  PaddedArrays(const Arrays& arrays, size_t begin, size_t count)
      : arrays_(arrays), begin_(begin), count_(count) {
    CopyIn(weight_, arrays.weight);
    CopyIn(residual_, arrays.residual);
    CopyIn(exp_avg_, arrays.exp_avg);
    CopyIn(exp_avg_sq_, arrays.exp_avg_sq);
    CopyIn(gradient_, arrays.gradient);
  }
  ~PaddedArrays() {
    CopyOut(weight_, arrays_.weight);
    CopyOut(residual_, arrays_.residual);
    CopyOut(exp_avg_, arrays_.exp_avg);
    CopyOut(exp_avg_sq_, arrays_.exp_avg_sq);
  }
  Arrays view() {
    return {weight_,   residual_,       exp_avg_,        exp_avg_sq_,
            gradient_, arrays_.ties_in, arrays_.ties_out};
  }

 private:
  template <class T>
  void CopyIn(T* padded, const T* array) {
    if (array != nullptr) std::memcpy(padded, array + begin_, count_ * sizeof(T));
  }
  template <class T>
  void CopyOut(const T* padded, T* array) {
    if (array != nullptr) std::memcpy(array + begin_, padded, count_ * sizeof(T));
  }

  const Arrays arrays_;
  const size_t begin_, count_;
  typename Arrays::Weight weight_[V::kWidth] = {};
  int16_t residual_[V::kWidth] = {};
  float exp_avg_[V::kWidth] = {};
  float exp_avg_sq_[V::kWidth] = {};
  typename Arrays::Gradient gradient_[V::kWidth] = {};
};

// Takes a step at every vector of [begin, end). By value: a store through the arrays could change
// what a reference points to, and every constant would be loaded again.
template <class V, class Arrays, class Step>
void ForEachVector(const Arrays arrays, size_t begin, size_t end, const Step step) {
  size_t i = begin;
  for (; i + V::kWidth <= end; i += V::kWidth) step(arrays, i);
  if (i == end) return;
  PaddedArrays<V, Arrays> padded(arrays, i, end - i);
  step(padded.view(), 0);
}

// The scale of the gradient and its sign in one factor: rounding is symmetrical.
template <class V>
struct GradientLoader {
  typename V::Float factor;
  bool is_scaled;

  GradientLoader(const Run& run, bool maximize)
      : factor(V::Broadcast(maximize ? -run.gradient_scale : run.gradient_scale)),
        is_scaled(run.gradient_scale != 1.0f) {}

  [[gnu::always_inline]] typename V::Float Load(const float* gradient) const {
    return V::Load(gradient) * factor;
  }
  [[gnu::always_inline]] typename V::Float Load(const uint16_t* gradient) const {
    const typename V::Float scaled = V::LoadBFloat16(gradient) * factor;
    return is_scaled ? V::RoundToBFloat16(scaled) : scaled;
  }
};

template <class V, class Arrays>
[[gnu::always_inline]] inline typename V::Float LoadMaster(const Arrays& arrays, size_t i) {
  if constexpr (Arrays::kIsSplit) {
    return V::Merge(arrays.weight + i, arrays.residual + i, arrays.ties_in);
  } else {
    return V::Load(arrays.weight + i);
  }
}

template <class V, class Arrays>
[[gnu::always_inline]] inline void StoreMaster(const Arrays& arrays, size_t i,
                                               typename V::Float master) {
  if constexpr (Arrays::kIsSplit) {
    V::Split(master, arrays.weight + i, arrays.residual + i, arrays.ties_out);
  } else {
    V::Store(arrays.weight + i, master);
  }
}

template <class V, bool kInTail>
struct AdamWStep {
  using Float = typename V::Float;

  AdamWStep(const AdamWCoefficients& c, const Run& run)
      : gradient_loader(run, c.maximize),
        decay(V::Broadcast(c.decay)),
        beta1(V::Broadcast(c.beta1)),
        exp_avg_weight(V::Broadcast(c.exp_avg_weight)),
        beta2(V::Broadcast(c.beta2)),
        exp_avg_sq_weight(V::Broadcast(c.exp_avg_sq_weight)),
        bias_correction2_sqrt(V::Broadcast(c.bias_correction2_sqrt)),
        eps(V::Broadcast(c.eps)),
        step_size(V::Broadcast(c.step_size)),
        is_lerp(c.is_lerp),
        is_short_lerp(c.exp_avg_weight < 0.5f) {}

  [[gnu::always_inline]] Float NextExpAvg(Float exp_avg, Float gradient) const {
    if (!is_lerp) return V::Fma(exp_avg_weight, gradient, exp_avg * beta1);
    const Float distance = gradient - exp_avg;
    if (is_short_lerp) return V::Fma(exp_avg_weight, distance, exp_avg);
    return V::Fma(exp_avg_weight - V::Broadcast(1.0f), distance, gradient);
  }

  [[gnu::always_inline]] Float NextExpAvgSq(Float exp_avg_sq, Float gradient) const {
    const Float weighted = exp_avg_sq_weight * gradient;
    if constexpr (kInTail) return V::Fma(exp_avg_sq, beta2, weighted * gradient);
    return V::Fma(weighted, gradient, exp_avg_sq * beta2);
  }

  template <class Arrays>
  [[gnu::always_inline]] void operator()(const Arrays& arrays, size_t i) const {
    const Float gradient = gradient_loader.Load(arrays.gradient + i);
    const Float decayed = LoadMaster<V>(arrays, i) * decay;
    const Float exp_avg = NextExpAvg(V::Load(arrays.exp_avg + i), gradient);
    const Float exp_avg_sq = NextExpAvgSq(V::Load(arrays.exp_avg_sq + i), gradient);
    const Float denominator = V::Sqrt(exp_avg_sq) / bias_correction2_sqrt + eps;
    V::Store(arrays.exp_avg + i, exp_avg);
    V::Store(arrays.exp_avg_sq + i, exp_avg_sq);
    StoreMaster<V>(arrays, i, decayed - (step_size * exp_avg) / denominator);
  }

  const GradientLoader<V> gradient_loader;
  const Float decay, beta1, exp_avg_weight, beta2, exp_avg_sq_weight, bias_correction2_sqrt, eps,
      step_size;
  const bool is_lerp, is_short_lerp;
};

template <class V>
struct SgdStep {
  using Float = typename V::Float;

  SgdStep(const SgdCoefficients& c, const Run& run)
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
  [[gnu::always_inline]] void operator()(const Arrays& arrays, size_t i) const {
    const Float master = LoadMaster<V>(arrays, i);
    Float direction = gradient_loader.Load(arrays.gradient + i);
    if (has_weight_decay) direction = V::Fma(weight_decay, master, direction);
    if (has_momentum) {
      Float buffer = direction;
      if (!first) {
        buffer = V::Fma(gradient_weight, direction, V::Load(arrays.exp_avg + i) * momentum);
      }
      V::Store(arrays.exp_avg + i, buffer);
      direction = nesterov ? V::Fma(momentum, buffer, direction) : buffer;
    }
    StoreMaster<V>(arrays, i, V::Fma(negative_lr, direction, master));
  }

  const GradientLoader<V> gradient_loader;
  const Float negative_lr, momentum, gradient_weight, weight_decay;
  const bool has_momentum, has_weight_decay, nesterov, first;
};

// Calls function(arrays) with the arrays of the run's dtypes.
template <class V, Dtype kWeight, class Function>
void WithGradient(const Run& run, const Function& function) {
  auto* weight = static_cast<typename ElementOf<kWeight>::Type*>(run.weight);
  if (run.gradient_dtype == Dtype::kFloat32) {
    function(Arrays<kWeight, Dtype::kFloat32>{weight, run.residual, run.exp_avg, run.exp_avg_sq,
                                              static_cast<const float*>(run.gradient), run.ties_in,
                                              run.ties_out});
  } else {
    function(Arrays<kWeight, Dtype::kBFloat16>{weight, run.residual, run.exp_avg, run.exp_avg_sq,
                                               static_cast<const uint16_t*>(run.gradient),
                                               run.ties_in, run.ties_out});
  }
}
template <class V, class Function>
void WithArrays(const Run& run, const Function& function) {
  if (run.weight_dtype == Dtype::kFloat32) {
    WithGradient<V, Dtype::kFloat32>(run, function);
  } else {
    WithGradient<V, Dtype::kBFloat16>(run, function);
  }
}

template <class V>
void VectorAdamW(const AdamWCoefficients& coefficients, const Run& run) {
  const size_t tail_begin = coefficients.has_tail ? CountBeforeTail(run) : run.count;
  const AdamWStep<V, false> step(coefficients, run);
  const AdamWStep<V, true> tail_step(coefficients, run);
  WithArrays<V>(run, [&](const auto& arrays) {
    ForEachVector<V>(arrays, 0, tail_begin, step);
    ForEachVector<V>(arrays, tail_begin, run.count, tail_step);
  });
}

template <class V>
void VectorSgd(const SgdCoefficients& coefficients, const Run& run) {
  const SgdStep<V> step(coefficients, run);
  WithArrays<V>(run, [&](const auto& arrays) { ForEachVector<V>(arrays, 0, run.count, step); });
}

template <class V>
void VectorSplit(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo, TieWriter* ties) {
  size_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) {
    V::Split(V::Load(reinterpret_cast<const float*>(master + i)), hi + i, lo + i, ties);
  }
  SplitReference(master + i, count - i, hi + i, lo + i, ties);
}

template <class V>
void VectorMerge(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master,
                 TieReader* ties) {
  size_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) {
    V::Store(reinterpret_cast<float*>(master + i), V::Merge(hi + i, lo + i, ties));
  }
  MergeReference(hi + i, lo + i, count - i, master + i, ties);
}

template <class V, class T>
bool AllFiniteOf(Dtype dtype, const T* values, size_t count) {
  constexpr size_t kUnrolled = 8;  // vectors between two branches
  size_t i = 0;
  for (; i + kUnrolled * V::kWidth <= count; i += kUnrolled * V::kWidth) {
    bool found = false;
    for (size_t j = 0; j < kUnrolled; ++j) found |= V::AnyNonFinite(values + i + j * V::kWidth);
    if (found) return false;
  }
  return kReferenceImplementation.all_finite(dtype, values + i, count - i);
}
template <class V>
bool VectorAllFinite(Dtype dtype, const void* values, size_t count) {
  return dtype == Dtype::kFloat32
             ? AllFiniteOf<V>(dtype, static_cast<const float*>(values), count)
             : AllFiniteOf<V>(dtype, static_cast<const uint16_t*>(values), count);
}

template <class V>
constexpr Implementation VectorImplementation() {
  return {VectorAdamW<V>, VectorSgd<V>, VectorSplit<V>, VectorMerge<V>, VectorAllFinite<V>,
          VectorAddParts<V>};
}

// Of the candidates (lanes whose lo is -32768), the lanes whose tie went down.
template <class V>
[[gnu::always_inline]] inline uint32_t TakeTies(uint32_t candidates, TieReader* ties) {
  uint32_t went_down = 0;
  for (; candidates != 0; candidates &= candidates - 1) {
    if (ties->Next()) went_down |= candidates & -candidates;
  }
  return went_down;
}
template <class V>
[[gnu::always_inline]] inline void PutTies(uint32_t candidates, uint32_t went_down,
                                           TieWriter* ties) {
  for (; candidates != 0; candidates &= candidates - 1) {
    ties->Append((went_down & candidates & -candidates) != 0);
  }
}

}  // namespace offload::kernels

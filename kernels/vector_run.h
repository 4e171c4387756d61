// kernels/vector_run.h
//
// A run of elements as vectors, for the steps of kernels/rules and for vector_update.h, which runs
// them. V, a type of the file that is compiled for an instruction set, names the instructions:
//   V::Float                       a vector of V::kWidth fp32 lanes; + - * / round each lane once
//   V::Load, Store, Broadcast      unaligned: a run may begin inside a bundle of small tensors
//   V::Fma(a, b, c)                a*b + c, rounded once
//   V::Sqrt                        correctly rounded
//   V::CorrectRoot(value, nearest, corrections)                       kernels/square_root.h
//   V::Max                         NaN where either is
//   V::Sign                        1, -1, or 0 for zeros and NaN
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

#include "kernels/device_code.h"
#include "kernels/update.h"

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
  float* state[kStatePlanesMax];
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
    for (size_t i = 0; i < kStatePlanesMax; ++i) CopyIn(state_[i], arrays.state[i]);
    CopyIn(gradient_, arrays.gradient);
  }
  ~PaddedArrays() {
    CopyOut(weight_, arrays_.weight);
    CopyOut(residual_, arrays_.residual);
    for (size_t i = 0; i < kStatePlanesMax; ++i) CopyOut(state_[i], arrays_.state[i]);
  }
  Arrays view() {
    return {weight_,   residual_,       {state_[0], state_[1], state_[2]},
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
  static_assert(kStatePlanesMax == 3);
  float state_[kStatePlanesMax][V::kWidth] = {};
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

  OFFLOAD_DEVICE_CODE GradientLoader(const Run& run, bool maximize)
      : factor(V::Broadcast(maximize ? -run.gradient_scale : run.gradient_scale)),
        is_scaled(run.gradient_scale != 1.0f) {}

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float Load(const float* gradient) const {
    return V::Load(gradient) * factor;
  }
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float Load(
      const uint16_t* gradient) const {
    const typename V::Float scaled = V::LoadBFloat16(gradient) * factor;
    return is_scaled ? V::RoundToBFloat16(scaled) : scaled;
  }
};

// The roots that the run asks for.
template <class V>
struct RootTaker {
  const uint32_t* corrections;

  OFFLOAD_DEVICE_CODE explicit RootTaker(const uint32_t* library) : corrections(library) {}

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float operator()(
      typename V::Float value) const {
    const typename V::Float nearest = V::Sqrt(value);
    return corrections == nullptr ? nearest : V::CorrectRoot(value, nearest, corrections);
  }
};

template <class V, class Arrays>
[[gnu::always_inline]] OFFLOAD_DEVICE_CODE inline typename V::Float LoadMaster(const Arrays& arrays,
                                                                               size_t i) {
  if constexpr (Arrays::kIsSplit) {
    return V::Merge(arrays.weight + i, arrays.residual + i, arrays.ties_in);
  } else {
    return V::Load(arrays.weight + i);
  }
}

template <class V, class Arrays>
[[gnu::always_inline]] OFFLOAD_DEVICE_CODE inline void StoreMaster(const Arrays& arrays, size_t i,
                                                                   typename V::Float master) {
  if constexpr (Arrays::kIsSplit) {
    V::Split(master, arrays.weight + i, arrays.residual + i, arrays.ties_out);
  } else {
    V::Store(arrays.weight + i, master);
  }
}

// Calls function(arrays) with the arrays of the run's dtypes.
template <class V, Dtype kWeight, class Function>
void WithGradient(const Run& run, const Function& function) {
  auto* weight = static_cast<typename ElementOf<kWeight>::Type*>(run.weight);
  if (run.gradient_dtype == Dtype::kFloat32) {
    function(Arrays<kWeight, Dtype::kFloat32>{weight,
                                              run.residual,
                                              {run.state[0], run.state[1], run.state[2]},
                                              static_cast<const float*>(run.gradient),
                                              run.ties_in,
                                              run.ties_out});
  } else {
    function(Arrays<kWeight, Dtype::kBFloat16>{weight,
                                               run.residual,
                                               {run.state[0], run.state[1], run.state[2]},
                                               static_cast<const uint16_t*>(run.gradient),
                                               run.ties_in,
                                               run.ties_out});
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

}  // namespace offload::kernels

// kernels/vector_run.h
//
// A run of elements as vectors, for the steps of kernels/rules and for vector_update.h, which runs
// them. V, a type of the file that is compiled for an instruction set, names the instructions:
//   V::Float                       a vector of V::kWidth lanes of V::Scalar, float or, for fp64
//   models,
//                                  double; + - * / round each lane once
//   V::Load, Store, Broadcast      unaligned: a run may begin inside a bundle of small tensors
//   V::Fma(a, b, c)                a*b + c, rounded once
//   V::Sqrt                        correctly rounded
//   V::CorrectRoot(value, nearest, corrections)                       kernels/square_root.h; of
//                                                                     float, like the last lines
//   V::TakesRootsBy(sequence), V::RootBy(sequence, of_subnormals, value)   where it has sequences
//   V::Max                         NaN where either is
//   V::Sign                        1, -1, or 0 for zeros and NaN
//   V::AnyNonFinite                of kWidth elements in memory
//   V::LoadBFloat16, V::RoundToBFloat16
//   V::Merge(hi, lo, ties), V::Split(master, hi, lo, ties)
//   V::LoadHalf, V::RoundToHalf, V::MergeHalf(weight, residual), V::SplitHalf(master, …)
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
#include "kernels/square_root.h"
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
template <>
struct ElementOf<Dtype::kFloat16> {
  using Type = Half;
};
template <>
struct ElementOf<Dtype::kFloat64> {
  using Type = double;
};
// What an optimizer computes with.
template <Dtype kWeight>
struct MasterOf {
  using Type = float;
};
template <>
struct MasterOf<Dtype::kFloat64> {
  using Type = double;
};

// The arrays of a run, with types.
template <Dtype kWeight, Dtype kGradient>
struct Arrays {
  using Weight = typename ElementOf<kWeight>::Type;
  using Gradient = typename ElementOf<kGradient>::Type;
  using State = typename MasterOf<kWeight>::Type;
  static constexpr bool kIsSplit = kWeight == Dtype::kBFloat16;
  static constexpr bool kIsHalf = kWeight == Dtype::kFloat16;

  Weight* weight;
  int16_t* residual;
  State* state[kStatePlanesMax];
  const Gradient* gradient;
  TieReader* ties_in;
  TieWriter* ties_out;
  uint32_t* half_residual;
};

// One vector's worth of arrays for the elements that do not fill one.
template <class V, class Arrays>
class PaddedArrays {
 public:
  PaddedArrays(const Arrays& arrays, size_t begin, size_t count)
      : arrays_(arrays), begin_(begin), count_(count) {
    CopyIn(weight_, arrays.weight);
    CopyIn(residual_, arrays.residual);
    CopyIn(half_residual_, arrays.half_residual);
    for (size_t i = 0; i < kStatePlanesMax; ++i) CopyIn(state_[i], arrays.state[i]);
    CopyIn(gradient_, arrays.gradient);
  }
  ~PaddedArrays() {
    CopyOut(weight_, arrays_.weight);
    CopyOut(residual_, arrays_.residual);
    CopyOut(half_residual_, arrays_.half_residual);
    for (size_t i = 0; i < kStatePlanesMax; ++i) CopyOut(state_[i], arrays_.state[i]);
  }
  Arrays view() {
    return {weight_,       residual_,       {state_[0], state_[1], state_[2]},
            gradient_,     arrays_.ties_in, arrays_.ties_out,
            half_residual_};
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
  uint32_t half_residual_[V::kWidth] = {};
  static_assert(kStatePlanesMax == 3);
  typename Arrays::State state_[kStatePlanesMax][V::kWidth] = {};
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

// fp16 gradients that are multiplied in fp32 when they have been scaled, by the inverse of a loss
// scale (UnscaleOf).
struct UnscaledHalves {
  const Half* values;
  float unscale;
  OFFLOAD_DEVICE_CODE UnscaledHalves operator+(size_t i) const { return {values + i, unscale}; }
};

// The scale of the gradient and its sign in one factor: rounding is symmetrical.
template <class V>
struct GradientLoader {
  typename V::Float factor;
  bool is_scaled;

  OFFLOAD_DEVICE_CODE GradientLoader(const Run& run, bool maximize)
      : factor(V::Broadcast(
            static_cast<typename V::Scalar>(maximize ? -run.gradient_scale : run.gradient_scale))),
        is_scaled(run.gradient_scale != 1) {}

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float Load(
      const typename V::Scalar* gradient) const {
    return V::Load(gradient) * factor;
  }
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float Load(
      const uint16_t* gradient) const {
    const typename V::Float scaled = V::LoadBFloat16(gradient) * factor;
    return is_scaled ? V::RoundToBFloat16(scaled) : scaled;
  }
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float Load(const Half* gradient) const {
    const typename V::Float scaled = V::LoadHalf(gradient) * factor;
    return is_scaled ? V::RoundToHalf(scaled) : scaled;
  }
  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float Load(
      const UnscaledHalves& gradient) const {
    return Load(gradient.values) * V::Broadcast(gradient.unscale);
  }
};

template <class V>
inline constexpr bool kHasRootSequences = requires {
  V::TakesRootsBy(RootSequence::kNone);
};

// The roots that the run asks for.
template <class V>
struct RootTaker {
  const uint32_t* corrections;
  RootSequence sequence = RootSequence::kNone;
  bool of_subnormals = false;

  OFFLOAD_DEVICE_CODE explicit RootTaker(const uint32_t* library) : corrections(library) {
    if constexpr (kHasRootSequences<V>) {
      if (library == nullptr) return;
      const auto taken = static_cast<RootSequence>(library[SquareRoots::kSequenceWord]);
      if (V::TakesRootsBy(taken)) sequence = taken;
      of_subnormals = library[SquareRoots::kSubnormalWord] != 0;
    }
  }

  [[gnu::always_inline]] OFFLOAD_DEVICE_CODE typename V::Float operator()(
      typename V::Float value) const {
    if constexpr (kHasRootSequences<V>) {
      if (sequence != RootSequence::kNone) return V::RootBy(sequence, of_subnormals, value);
    }
    const typename V::Float nearest = V::Sqrt(value);
    if constexpr (sizeof(typename V::Scalar) == sizeof(double)) {
      return nearest;
    } else {
      return corrections == nullptr ? nearest : V::CorrectRoot(value, nearest, corrections);
    }
  }
};

template <class V, class Arrays>
[[gnu::always_inline]] OFFLOAD_DEVICE_CODE inline typename V::Float LoadMaster(const Arrays& arrays,
                                                                               size_t i) {
  if constexpr (Arrays::kIsSplit) {
    return V::Merge(arrays.weight + i, arrays.residual + i, arrays.ties_in);
  } else if constexpr (Arrays::kIsHalf) {
    return V::MergeHalf(arrays.weight + i, arrays.half_residual + i);
  } else {
    return V::Load(arrays.weight + i);
  }
}

template <class V, class Arrays>
[[gnu::always_inline]] OFFLOAD_DEVICE_CODE inline void StoreMaster(const Arrays& arrays, size_t i,
                                                                   typename V::Float master) {
  if constexpr (Arrays::kIsSplit) {
    V::Split(master, arrays.weight + i, arrays.residual + i, arrays.ties_out);
  } else if constexpr (Arrays::kIsHalf) {
    V::SplitHalf(master, arrays.weight + i, arrays.half_residual + i);
  } else {
    V::Store(arrays.weight + i, master);
  }
}

// The arrays of a run of these dtypes.
template <class V, Dtype kWeight, Dtype kGradient>
Arrays<kWeight, kGradient> ArraysOf(const Run& run) {
  using Result = Arrays<kWeight, kGradient>;
  Result arrays{static_cast<typename Result::Weight*>(run.weight),
                run.residual,
                {},
                static_cast<const typename Result::Gradient*>(run.gradient),
                run.ties_in,
                run.ties_out,
                run.half_residual};
  for (size_t i = 0; i < kStatePlanesMax; ++i) {
    if constexpr (kWeight == Dtype::kFloat64) {
      arrays.state[i] = run.double_state[i];
    } else {
      arrays.state[i] = run.state[i];
    }
  }
  return arrays;
}

// Calls function(arrays) with the arrays of the run's dtypes.
template <class V, Dtype kWeight, class Function>
void WithGradient(const Run& run, const Function& function) {
  if (run.gradient_dtype == Dtype::kFloat32) {
    function(ArraysOf<V, kWeight, Dtype::kFloat32>(run));
  } else {
    function(ArraysOf<V, kWeight, Dtype::kBFloat16>(run));
  }
}
template <class V, class Function>
void WithArrays(const Run& run, const Function& function) {
  if constexpr (sizeof(typename V::Scalar) == sizeof(double)) {
    function(ArraysOf<V, Dtype::kFloat64, Dtype::kFloat64>(run));
  } else if (run.weight_dtype == Dtype::kFloat32) {
    WithGradient<V, Dtype::kFloat32>(run, function);
  } else if (run.weight_dtype == Dtype::kFloat16) {
    function(ArraysOf<V, Dtype::kFloat16, Dtype::kFloat16>(run));
  } else {
    WithGradient<V, Dtype::kBFloat16>(run, function);
  }
}

}  // namespace offload::kernels

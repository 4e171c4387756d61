// kernels/vector_update.h
//
// The kernels once for every vector width: the steps of all rules (kernels/rules) over whole runs,
// and split, merge and the search for what is not finite. vector_run.h says what V provides, and D,
// which is V for fp64 models.
#pragma once

#include <type_traits>

#include "kernels/implementation.h"
#include "kernels/vector_run.h"
#include "kernels/vector_sum.h"

namespace offload::kernels {

template <class V, class Rule>
void VectorUpdate(const Coefficients& coefficients, const Run& run) {
  using Constants = typename Rule::template ConstantsOf<typename V::Scalar>;
  const auto& constants = *reinterpret_cast<const Constants*>(coefficients.bytes);
  const typename Rule::template Step<V, false> step(constants, run);
  WithArrays<V>(run, [&](const auto& arrays) {
    if constexpr (Rule::kHasTail) {
      const size_t tail_begin = Rule::TailBegin(constants, run);
      const typename Rule::template Step<V, true> tail_step(constants, run);
      ForEachVector<V>(arrays, 0, tail_begin, step);
      ForEachVector<V>(arrays, tail_begin, run.count, tail_step);
    } else {
      ForEachVector<V>(arrays, 0, run.count, step);
    }
  });
}

template <class V, class Rule>
void VectorNorms(const Coefficients& coefficients, const Run& run, Norms* norms) {
  using Constants = typename Rule::template ConstantsOf<typename V::Scalar>;
  const auto& constants = *reinterpret_cast<const Constants*>(coefficients.bytes);
  const typename Rule::template Terms<V> terms(constants, run);
  alignas(64) typename V::Scalar weight[V::kWidth], update[V::kWidth];
  const auto add = [&](size_t begin, size_t count) {
    for (size_t j = 0; j < count; ++j) {
      const size_t lane = (run.begin + begin + j) % Norms::kLanes;
      norms->weight[lane] += double{weight[j]} * weight[j];
      norms->update[lane] += double{update[j]} * update[j];
    }
  };
  WithArrays<V>(run, [&](const auto& arrays) {
    using RunArrays = std::remove_cvref_t<decltype(arrays)>;
    size_t i = 0;
    for (; i + V::kWidth <= run.count; i += V::kWidth) {
      terms(arrays, i, weight, update);
      add(i, V::kWidth);
    }
    if (i == run.count) return;
    PaddedArrays<V, RunArrays> padded(arrays, i, run.count - i);
    terms(padded.view(), 0, weight, update);
    add(i, run.count - i);
  });
}
template <class V, class Rule>
constexpr NormsFunction VectorNormsOf() {
  if constexpr (requires { &Rule::template ReferenceNorms<typename V::Scalar>; })
    return VectorNorms<V, Rule>;
  return nullptr;
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

template <class V>
void VectorMergeHalf(const Half* weight, const uint32_t* residual, size_t count, float* master) {
  size_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth)
    V::Store(master + i, V::MergeHalf(weight + i, residual + i));
  MergeHalf(weight + i, residual + i, count - i, master + i);
}

template <class V>
void VectorSplitHalf(const float* master, size_t count, Half* weight, uint32_t* residual) {
  size_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth)
    V::SplitHalf(V::Load(master + i), weight + i, residual + i);
  SplitHalf(master + i, count - i, weight + i, residual + i);
}

template <class V>
void VectorUnscaleHalves(const Half* values, size_t count, const HalfScales& scales, float* wide) {
  Run run;
  run.gradient_scale = scales.scale;
  const GradientLoader<V> loader(run, /*maximize=*/false);
  size_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth)
    V::Store(wide + i, loader.Load(UnscaledHalves{values + i, scales.unscale}));
  UnscaleHalvesReference(values + i, count - i, scales, wide + i);
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
template <class V, class D>
bool VectorAllFinite(Dtype dtype, const void* values, size_t count) {
  switch (dtype) {
    case Dtype::kFloat32:
      return AllFiniteOf<V>(dtype, static_cast<const float*>(values), count);
    case Dtype::kBFloat16:
      return AllFiniteOf<V>(dtype, static_cast<const uint16_t*>(values), count);
    case Dtype::kFloat16:
      return AllFiniteOf<V>(dtype, static_cast<const Half*>(values), count);
    case Dtype::kFloat64:
      break;
  }
  return AllFiniteOf<D>(dtype, static_cast<const double*>(values), count);
}

template <class V>
void VectorTakeRoots(RootSequence sequence, bool of_subnormals, const float* values, size_t count,
                     float* roots) {
  size_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth)
    V::Store(roots + i, V::RootBy(sequence, of_subnormals, V::Load(values + i)));
  if (i == count) return;
  float last[V::kWidth] = {};
  std::memcpy(last, values + i, (count - i) * sizeof(float));
  V::Store(last, V::RootBy(sequence, of_subnormals, V::Load(last)));
  std::memcpy(roots + i, last, (count - i) * sizeof(float));
}

template <class V>
void VectorMoveAverage(const AverageStep& step, const typename V::Scalar* master, size_t count,
                       typename V::Scalar* average) {
  using Scalar = typename V::Scalar;
  const auto value = static_cast<Scalar>(step.value);
  const typename V::Float factor = V::Broadcast(value);
  const typename V::Float rest = factor - V::Broadcast(1);
  size_t i = 0;
  if (step.kind == AverageStep::Kind::kMean) {
    for (; i + V::kWidth <= count; i += V::kWidth) {
      const typename V::Float before = V::Load(average + i);
      V::Store(average + i, before + (V::Load(master + i) - before) / factor);
    }
  } else if (step.kind == AverageStep::Kind::kLerp && value < Scalar{0.5}) {
    for (; i + V::kWidth <= count; i += V::kWidth) {
      const typename V::Float before = V::Load(average + i);
      V::Store(average + i, V::Fma(factor, V::Load(master + i) - before, before));
    }
  } else if (step.kind == AverageStep::Kind::kLerp) {
    for (; i + V::kWidth <= count; i += V::kWidth) {
      const typename V::Float end = V::Load(master + i);
      V::Store(average + i, V::Fma(rest, end - V::Load(average + i), end));
    }
  }
  MoveAverageReference(step, master + i, count - i, average + i);
}

template <class V, class D, class... Rule>
constexpr Implementation VectorImplementation(RuleList<Rule...>) {
  return {{VectorUpdate<V, Rule>...},
          {VectorNormsOf<V, Rule>()...},
          {VectorUpdate<D, Rule>...},
          {VectorNormsOf<D, Rule>()...},
          VectorSplit<V>,
          VectorMerge<V>,
          VectorMergeHalf<V>,
          VectorSplitHalf<V>,
          VectorUnscaleHalves<V>,
          VectorAllFinite<V, D>,
          VectorAddParts<V, D>,
          V::TakesRootsBy,
          VectorTakeRoots<V>,
          VectorMoveAverage<V>,
          VectorMoveAverage<D>};
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

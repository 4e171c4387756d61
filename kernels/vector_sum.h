// kernels/vector_sum.h
//
// The ordered sum once for every vector width; V and D as in vector_update.h, and
//   V::StoreBFloat16(uint16_t* to, Float value)   of values that are bf16 numbers; NaN as 0xFFFF
//   V::StoreHalf(Half* to, Float value)
//
// Elements that do not fill a vector are the scalar version's.
#pragma once

#include <type_traits>

#include "kernels/implementation.h"

namespace offload::kernels {

template <class V>
[[gnu::always_inline]] inline typename V::Float LoadElements(const typename V::Scalar* from) {
  return V::Load(from);
}
template <class V>
[[gnu::always_inline]] inline typename V::Float LoadElements(const uint16_t* from) {
  return V::LoadBFloat16(from);
}
template <class V>
[[gnu::always_inline]] inline typename V::Float LoadElements(const Half* from) {
  return V::LoadHalf(from);
}
template <class V>
[[gnu::always_inline]] inline void StoreElements(typename V::Scalar* to, typename V::Float value) {
  V::Store(to, value);
}
template <class V>
[[gnu::always_inline]] inline void StoreElements(uint16_t* to, typename V::Float value) {
  V::StoreBFloat16(to, value);
}
template <class V>
[[gnu::always_inline]] inline void StoreElements(Half* to, typename V::Float value) {
  V::StoreHalf(to, value);
}
template <class V, class T>
[[gnu::always_inline]] inline typename V::Float RoundElements(typename V::Float value) {
  if constexpr (sizeof(T) == sizeof(typename V::Scalar)) {
    return value;
  } else if constexpr (std::is_same_v<T, Half>) {
    return V::RoundToHalf(value);
  } else {
    return V::RoundToBFloat16(value);
  }
}

template <class V, class T, bool kScaled>
[[gnu::always_inline]] inline typename V::Float LoadPart(const void* part, size_t i,
                                                         typename V::Float factor) {
  const typename V::Float value = LoadElements<V>(static_cast<const T*>(part) + i);
  if constexpr (!kScaled) return value;
  return RoundElements<V, T>(value * factor);
}

template <class V, class T, bool kScaled>
bool AddVectors(const SumRun& run, size_t begin) {
  using Float = typename V::Float;
  T* const sum = static_cast<T*>(run.sum);
  const void* const* const parts = run.parts;
  const size_t part_count = run.part_count;
  const bool takes_first = run.start == SumStart::kNothing;
  const bool takes_sum = run.start == SumStart::kSum;
  const Float factor = V::Broadcast(static_cast<typename V::Scalar>(run.factor));
  const Float zero = V::Broadcast(0);
  Float probe = zero;  // becomes NaN with the first NaN or infinity: either times zero is one
  size_t i = begin;
  for (; i + V::kWidth <= run.count; i += V::kWidth) {
    size_t k = 0;
    Float total = zero;
    if (takes_first) total = LoadPart<V, T, kScaled>(parts[k++], i, factor);
    if (takes_sum) total = LoadElements<V>(sum + i);
    for (; k < part_count; ++k) {
      total = RoundElements<V, T>(total + LoadPart<V, T, kScaled>(parts[k], i, factor));
    }
    StoreElements<V>(sum + i, total);
    probe = V::Fma(total, zero, probe);
  }
  typename V::Scalar lanes[V::kWidth];
  V::Store(lanes, probe);
  const bool finite = !V::AnyNonFinite(lanes);
  return (i == run.count || AddPartsReference(run, i)) && finite;
}

template <class V, class T>
bool AddScaled(const SumRun& run, size_t begin) {
  return run.factor == 1 ? AddVectors<V, T, false>(run, begin) : AddVectors<V, T, true>(run, begin);
}
template <class V, class D>
bool VectorAddParts(const SumRun& run, size_t begin) {
  switch (run.dtype) {
    case Dtype::kFloat32:
      return AddScaled<V, float>(run, begin);
    case Dtype::kBFloat16:
      return AddScaled<V, uint16_t>(run, begin);
    case Dtype::kFloat16:
      return AddScaled<V, Half>(run, begin);
    case Dtype::kFloat64:
      break;
  }
  return AddScaled<D, double>(run, begin);
}

}  // namespace offload::kernels

// kernels/rules/scalar_run.h
//
// An element of a run, for the scalar references: they define what the vector versions compute. T
// is what the optimizer computes with: double for fp64 models, float for all others. Every
// operation rounds once; std::fma is one operation. Not for files that are compiled for an
// instruction set.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstring>

#include "kernels/square_root.h"
#include "kernels/update.h"

namespace offload::kernels::rules {

// The gradient as the optimizer sees it: scaled in its own dtype, then negated to maximize.
template <class T>
T LoadGradient(const Run& run, size_t i, bool maximize);
template <class T>
T LoadMaster(const Run& run, size_t i);
template <class T>
void StoreMaster(const Run& run, size_t i, T master);
template <>
float LoadGradient(const Run& run, size_t i, bool maximize);
template <>
double LoadGradient(const Run& run, size_t i, bool maximize);
template <>
float LoadMaster(const Run& run, size_t i);
template <>
double LoadMaster(const Run& run, size_t i);
template <>
void StoreMaster(const Run& run, size_t i, float master);
template <>
void StoreMaster(const Run& run, size_t i, double master);
template <class T>
T* StateOf(const Run& run, size_t number) {
  if constexpr (std::same_as<T, double>) {
    return run.double_state[number];
  } else {
    return run.state[number];
  }
}

// How many elements of the run lie before the tail of its tensor: the last ones, which do not fill
// the 32 bytes of torch's vectors.
size_t CountBeforeTail(const Run& run);

// lerp_ as torch computes it: from the nearer end.
template <class T>
T Lerp(T from, T to, T weight) {
  return std::abs(weight) < T{0.5} ? std::fma(weight, to - from, from)
                                   : std::fma(weight - T{1}, to - from, to);
}
// maximum(): NaN when either is.
template <class T>
T Maximum(T a, T b) {
  return std::isnan(a) || a > b ? a : b;
}

// `corrections` null: the nearest root.
inline float TakeRoot(float value, const uint32_t* corrections) {
  const float nearest = std::sqrt(value);
  return corrections == nullptr ? nearest : CorrectRoot(value, nearest, corrections);
}
inline double TakeRoot(double value, const uint32_t*) { return std::sqrt(value); }

// An element of the tensor into its lanes.
inline void AddSquares(uint64_t element, double weight, double update, Norms* norms) {
  norms->weight[element % Norms::kLanes] += weight * weight;
  norms->update[element % Norms::kLanes] += update * update;
}

inline float Float(double value) { return static_cast<float>(value); }

template <class Constants>
void Keep(const Constants& constants, Coefficients* coefficients) {
  static_assert(sizeof(Constants) <= sizeof(coefficients->bytes));
  std::memcpy(coefficients->bytes, &constants, sizeof(constants));
}

}  // namespace offload::kernels::rules

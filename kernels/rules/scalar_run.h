// kernels/rules/scalar_run.h
//
// An element of a run, for the scalar references: they define what the vector versions compute.
// Every operation rounds once; std::fma is one operation. Not for files that are compiled for an
// instruction set.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>

#include "kernels/square_root.h"
#include "kernels/update.h"

namespace offload::kernels::rules {

// The gradient as the optimizer sees it: scaled in its own dtype, then negated to maximize.
float LoadGradient(const Run& run, size_t i, bool maximize);
float LoadMaster(const Run& run, size_t i);
void StoreMaster(const Run& run, size_t i, float master);

// How many elements of the run lie before the tail of its tensor, the last tensor_count mod 8.
size_t CountBeforeTail(const Run& run);

// lerp_ as torch computes it: from the nearer end.
inline float Lerp(float from, float to, float weight) {
  return weight < 0.5f ? std::fma(weight, to - from, from) : std::fma(weight - 1.0f, to - from, to);
}
// maximum(): NaN when either is.
inline float Maximum(float a, float b) { return std::isnan(a) || a > b ? a : b; }

// `corrections` null: the nearest root.
inline float TakeRoot(float value, const uint32_t* corrections) {
  const float nearest = std::sqrt(value);
  return corrections == nullptr ? nearest : CorrectRoot(value, nearest, corrections);
}

// An element of the tensor into its lanes.
inline void AddSquares(uint64_t element, float weight, float update, Norms* norms) {
  norms->weight[element % Norms::kLanes] += double{weight} * weight;
  norms->update[element % Norms::kLanes] += double{update} * update;
}

inline float Float(double value) { return static_cast<float>(value); }

template <class Constants>
void Keep(const Constants& constants, Coefficients* coefficients) {
  static_assert(sizeof(Constants) <= sizeof(coefficients->bytes));
  std::memcpy(coefficients->bytes, &constants, sizeof(constants));
}

}  // namespace offload::kernels::rules

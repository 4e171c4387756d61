// kernels/element.h
//
// One element as a vector of one lane, for the steps of kernels/rules: what a thread of a GPU
// computes, and the same on the processor. Every operation rounds once, as IEEE 754 says, so both
// compute the bits of the CPU's kernels; of a NaN only that it is one is the same. Both compilers
// are told not to fuse (kernels/BUILD, third_party/cuda/cuda_library.bzl).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/device_code.h"
#include "kernels/half.h"
#include "kernels/square_root.h"
#include "kernels/vector_run.h"

namespace offload::kernels {

// What both have: T is float or double.
template <class T>
struct ElementOfType {
  using Float = T;
  using Scalar = T;
  static constexpr size_t kWidth = 1;

  OFFLOAD_DEVICE_CODE static T Load(const T* from) { return *from; }
  OFFLOAD_DEVICE_CODE static void Store(T* to, T value) { *to = value; }
  OFFLOAD_DEVICE_CODE static T Broadcast(T value) { return value; }
  OFFLOAD_DEVICE_CODE static T Fma(T a, T b, T c) {
    if constexpr (std::is_same_v<T, float>) {
      return fmaf(a, b, c);
    } else {
      return fma(a, b, c);
    }
  }
  OFFLOAD_DEVICE_CODE static T Sqrt(T value) {
    if constexpr (std::is_same_v<T, float>) {
      return sqrtf(value);
    } else {
      return sqrt(value);
    }
  }
  OFFLOAD_DEVICE_CODE static T Max(T a, T b) { return a != a || a > b ? a : b; }
  OFFLOAD_DEVICE_CODE static T Sign(T value) { return value > 0 ? T{1} : value < 0 ? T{-1} : T{0}; }
};

struct Element : ElementOfType<float> {
  OFFLOAD_DEVICE_CODE static float CorrectRoot(float value, float nearest,
                                               const uint32_t* corrections) {
    const uint32_t least = corrections[SquareRoots::kSubnormalWord] != 0 ? 1 : 0x00800000;
    const auto bits = std::bit_cast<uint32_t>(value);
    if (bits - least >= 0x7F800000 - least) return nearest;
    const auto normal = bits >= 0x00800000 ? bits : std::bit_cast<uint32_t>(value * 0x1p64f);
    const uint32_t entry = normal & 0x00FFFFFF;
    const uint32_t places = corrections[entry / 16] << (30 - 2 * (entry % 16));
    static_assert(SquareRoots::kEntriesPerWord == 16);
    const int32_t correction = static_cast<int32_t>(places) >> 30;
    return std::bit_cast<float>(std::bit_cast<int32_t>(nearest) + correction);
  }

  OFFLOAD_DEVICE_CODE static float LoadBFloat16(const uint16_t* from) {
    return std::bit_cast<float>(uint32_t{*from} << 16);
  }
  OFFLOAD_DEVICE_CODE static float RoundToBFloat16(float value) {
    if (value != value) return value;
    const auto bits = std::bit_cast<uint32_t>(value);
    return std::bit_cast<float>((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
  }

  OFFLOAD_DEVICE_CODE static float LoadHalf(const Half* from) { return WideHalf(*from); }
  OFFLOAD_DEVICE_CODE static float RoundToHalf(float value) { return WideHalf(NearestHalf(value)); }
  OFFLOAD_DEVICE_CODE static float MergeHalf(const Half* weight, const uint32_t* residual) {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(WideHalf(*weight)) + *residual);
  }
  OFFLOAD_DEVICE_CODE static void SplitHalf(float master, Half* weight, uint32_t* residual) {
    *weight = NearestHalf(master);
    *residual = std::bit_cast<uint32_t>(master) - std::bit_cast<uint32_t>(WideHalf(*weight));
  }

  // `tie`: whether the element is a tie that went down (kernels/split.h).
  OFFLOAD_DEVICE_CODE static float Merge(const uint16_t* hi, const int16_t* lo, const bool* tie) {
    uint32_t bits = (uint32_t{*hi} << 16) + static_cast<uint32_t>(int32_t{*lo});
    if (*lo == kTie && *tie) bits += 0x10000;
    return std::bit_cast<float>(bits);
  }
  OFFLOAD_DEVICE_CODE static void Split(float master, uint16_t* hi, int16_t* lo, bool* tie) {
    const auto bits = std::bit_cast<uint32_t>(master);
    *lo = static_cast<int16_t>(bits & 0xFFFF);
    const bool is_finite = (bits & 0x7F800000) != 0x7F800000;
    *tie = *lo == kTie && is_finite && (bits & 0x10000) == 0;
    *hi = static_cast<uint16_t>((bits >> 16) + (*lo < 0 && !*tie ? 1 : 0));
  }

 private:
  static constexpr int16_t kTie = -32768;
};

// One element of an fp64 model.
using DoubleElement = ElementOfType<double>;

template <Dtype kWeight>
struct ElementFor {
  using Type = Element;
};
template <>
struct ElementFor<Dtype::kFloat64> {
  using Type = DoubleElement;
};

// Arrays of a run whose tie bits are at hand one by one, and whose fp16 gradients know what
// multiplies them last.
template <Dtype kGradient>
struct GradientsOf {
  using Type = const typename ElementOf<kGradient>::Type*;
};
template <>
struct GradientsOf<Dtype::kFloat16> {
  using Type = UnscaledHalves;
};
template <Dtype kWeight, Dtype kGradient>
struct ElementArrays {
  static constexpr bool kIsSplit = kWeight == Dtype::kBFloat16;
  static constexpr bool kIsHalf = kWeight == Dtype::kFloat16;

  typename ElementOf<kWeight>::Type* weight;
  int16_t* residual;
  uint32_t* half_residual;
  typename MasterOf<kWeight>::Type* state[kStatePlanesMax];
  typename GradientsOf<kGradient>::Type gradient;
  const bool* ties_in;
  bool* ties_out;
};

}  // namespace offload::kernels

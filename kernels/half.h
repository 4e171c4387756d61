// kernels/half.h
//
// fp16 numbers and fp32 numbers, one into the other, in plain arithmetic: what the processor's
// reference and CUDA kernels compute alike. Internal to kernels/; others ask kernels/split.h.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/device_code.h"
#include "kernels/dtype.h"

namespace offload::kernels {

// The nearest, ties to even; infinity from 65520 on.
OFFLOAD_DEVICE_CODE inline Half NearestHalf(float value) {
  constexpr uint32_t kInfinity = 0x7F800000, kRoundsToInfinity = 0x477FF000;  // 65520
  constexpr uint32_t kLeastNormal = 0x38800000, kHalf = 0x3F000000;           // 2^-14, 0.5
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t rest = 0;
  if (magnitude > kInfinity) {
    rest = 0x7E00 | ((magnitude >> 13) & 0x1FF);
  } else if (magnitude >= kRoundsToInfinity) {
    rest = 0x7C00;
  } else if (magnitude >= kLeastNormal) {
    const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
    rest = (rounded - (kLeastNormal - 0x00800000)) >> 13;
  } else {
    // The last place of numbers from 0.5 on is the least subnormal fp16 number: the addition
    // rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    rest = std::bit_cast<uint32_t>(shifted) - kHalf;
  }
  return Half{static_cast<uint16_t>(((bits >> 16) & 0x8000) | rest)};
}

OFFLOAD_DEVICE_CODE inline float WideHalf(Half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1F, mantissa = value.bits & 0x3FF;
  if (exponent == 0x1F) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000 : 0;
    return std::bit_cast<float>(sign | 0x7F800000 | quiet | mantissa << 13);
  }
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

}  // namespace offload::kernels

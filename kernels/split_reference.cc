// The split in plain scalar code: the definition that the vector versions are tested against.
#include <bit>

#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

constexpr uint32_t kExponentBits = 0x7F800000;
constexpr int16_t kTie = -32768;

bool IsFinite(uint32_t bits) { return (bits & kExponentBits) != kExponentBits; }
bool HighHalfIsEven(uint32_t bits) { return (bits & 0x10000) == 0; }

}  // namespace

void SplitReference(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo,
                    TieWriter* ties) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = master[i];
    lo[i] = static_cast<int16_t>(bits & 0xFFFF);
    hi[i] = static_cast<uint16_t>((bits >> 16) + (lo[i] < 0));
    if (lo[i] != kTie) continue;
    const bool went_down = IsFinite(bits) && HighHalfIsEven(bits);
    ties->Append(went_down);
    if (went_down) hi[i] = static_cast<uint16_t>(bits >> 16);
  }
}

void MergeReference(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master,
                    TieReader* ties) {
  for (size_t i = 0; i < count; ++i) {
    master[i] = (uint32_t{hi[i]} << 16) + static_cast<uint32_t>(int32_t{lo[i]});
    if (lo[i] == kTie && ties->Next()) master[i] += 0x10000;
  }
}

Half ToHalf(float value) {
  constexpr uint32_t kInfinity = 0x7F800000, kRoundsToInfinity = 0x477FF000;  // 65520
  constexpr uint32_t kLeastNormal = 0x38800000, kHalf = 0x3F000000;           // 2^-14, 0.5
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const auto with_sign = [sign](uint32_t rest) { return Half{static_cast<uint16_t>(sign | rest)}; };
  if (magnitude > kInfinity) return with_sign(0x7E00 | ((magnitude >> 13) & 0x1FF));
  if (magnitude >= kRoundsToInfinity) return with_sign(0x7C00);
  if (magnitude >= kLeastNormal) {
    const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
    return with_sign((rounded - (kLeastNormal - 0x00800000)) >> 13);
  }
  // The last place of numbers from 0.5 on is the least subnormal fp16 number: the addition rounds.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return with_sign(std::bit_cast<uint32_t>(shifted) - kHalf);
}

float FromHalf(Half value) {
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

void SplitHalf(const float* master, size_t count, Half* weight, uint32_t* residual) {
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(master[i]);
    weight[i] = ToHalf(master[i]);
    residual[i] = bits - std::bit_cast<uint32_t>(FromHalf(weight[i]));
  }
}

void MergeHalf(const Half* weight, const uint32_t* residual, size_t count, float* master) {
  for (size_t i = 0; i < count; ++i) {
    master[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(FromHalf(weight[i])) + residual[i]);
  }
}

}  // namespace offload::kernels

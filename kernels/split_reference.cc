// The split in plain scalar code: the definition that the vector versions are tested against.
#include <bit>

#include "kernels/half.h"
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

Half ToHalf(float value) { return NearestHalf(value); }

float FromHalf(Half value) { return WideHalf(value); }

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

#include "kernels/library_roots.h"

#include <immintrin.h>

#include <cmath>

namespace offload::kernels {
namespace {

float Estimate12(float value) { return _mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(value))); }

[[gnu::target("avx512f")]] float Estimate14(float value) {
  const __m128 lanes = _mm_set_ss(value);
  return _mm_cvtss_f32(_mm_rsqrt14_ss(lanes, lanes));
}

float UnfusedRoot(float value) {
  const float estimate = Estimate12(value), g = value * estimate, h = estimate * 0.5f;
  const float r = 0.5f - g * h, nearer_g = g + g * r, nearer_h = h + h * r;
  return nearer_g + nearer_h * (value - nearer_g * nearer_g);
}

float FusedRoot(float value) {
  const float estimate = Estimate14(value), g = value * estimate, h = estimate * 0.5f;
  return std::fma(h, std::fma(-g, g, value), g);
}

}  // namespace

bool HasRootsOf(RootSequence sequence) {
  return sequence == RootSequence::kUnfused12 ||
         (sequence == RootSequence::kFused14 && __builtin_cpu_supports("avx512f"));
}

void TakeRootsBy(RootSequence sequence, std::span<float> values) {
  for (float& value : values) {
    if (!(value > 0) || !std::isfinite(value)) {
      value = std::sqrt(value);
      continue;
    }
    // Of [1, 4): whatever the estimate is of very small numbers.
    int exponent = 0;
    float normalized = std::frexp(value, &exponent) * 2;
    exponent -= 1;
    if (exponent % 2 != 0) {
      normalized *= 2;
      exponent -= 1;
    }
    const float root =
        sequence == RootSequence::kFused14 ? FusedRoot(normalized) : UnfusedRoot(normalized);
    value = std::ldexp(root, exponent / 2);
  }
}

}  // namespace offload::kernels

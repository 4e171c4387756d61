// The updates in plain scalar code: the definition that the vector versions are tested against.
// Every operation rounds once; std::fma is one operation.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

float FromBFloat16(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }

// Nearest, ties to even, and back to fp32.
float RoundToBFloat16(float value) {
  if (std::isnan(value)) return value;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return FromBFloat16(static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16));
}

// The gradient as the optimizer sees it: scaled in its own dtype, then negated to maximize.
float LoadGradient(const Run& run, size_t i, bool maximize) {
  float gradient;
  if (run.gradient_dtype == Dtype::kFloat32) {
    gradient = static_cast<const float*>(run.gradient)[i] * run.gradient_scale;
  } else {
    const float wide = FromBFloat16(static_cast<const uint16_t*>(run.gradient)[i]);
    gradient = RoundToBFloat16(wide * run.gradient_scale);
  }
  return maximize ? -gradient : gradient;
}

float LoadMaster(const Run& run, size_t i) {
  if (run.weight_dtype == Dtype::kFloat32) return static_cast<const float*>(run.weight)[i];
  uint32_t bits;
  MergeReference(static_cast<const uint16_t*>(run.weight) + i, run.residual + i, 1, &bits,
                 run.ties_in);
  return std::bit_cast<float>(bits);
}

void StoreMaster(const Run& run, size_t i, float master) {
  if (run.weight_dtype == Dtype::kFloat32) {
    static_cast<float*>(run.weight)[i] = master;
    return;
  }
  const uint32_t bits = std::bit_cast<uint32_t>(master);
  SplitReference(&bits, 1, static_cast<uint16_t*>(run.weight) + i, run.residual + i, run.ties_out);
}

float NextExpAvg(const AdamWCoefficients& c, float exp_avg, float gradient) {
  const float weight = c.exp_avg_weight;
  if (!c.is_lerp) return std::fma(weight, gradient, exp_avg * c.beta1);
  const float distance = gradient - exp_avg;
  return weight < 0.5f ? std::fma(weight, distance, exp_avg)
                       : std::fma(weight - 1.0f, distance, gradient);
}

float NextExpAvgSq(const AdamWCoefficients& c, float exp_avg_sq, float gradient, bool in_tail) {
  const float weighted = c.exp_avg_sq_weight * gradient;
  if (in_tail) return std::fma(exp_avg_sq, c.beta2, weighted * gradient);
  return std::fma(weighted, gradient, exp_avg_sq * c.beta2);
}

void AdamW(const AdamWCoefficients& c, const Run& run) {
  const size_t tail_begin = c.has_tail ? CountBeforeTail(run) : run.count;
  for (size_t i = 0; i < run.count; ++i) {
    const float gradient = LoadGradient(run, i, c.maximize);
    const float decayed = LoadMaster(run, i) * c.decay;
    const float exp_avg = NextExpAvg(c, run.exp_avg[i], gradient);
    const float exp_avg_sq = NextExpAvgSq(c, run.exp_avg_sq[i], gradient, i >= tail_begin);
    const float denominator = std::sqrt(exp_avg_sq) / c.bias_correction2_sqrt + c.eps;
    run.exp_avg[i] = exp_avg;
    run.exp_avg_sq[i] = exp_avg_sq;
    StoreMaster(run, i, decayed - (c.step_size * exp_avg) / denominator);
  }
}

void Sgd(const SgdCoefficients& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    float direction = LoadGradient(run, i, c.maximize);
    if (c.has_weight_decay) direction = std::fma(c.weight_decay, master, direction);
    if (c.has_momentum) {
      const float buffer =
          c.first ? direction : std::fma(c.gradient_weight, direction, run.exp_avg[i] * c.momentum);
      run.exp_avg[i] = buffer;
      direction = c.nesterov ? std::fma(c.momentum, buffer, direction) : buffer;
    }
    StoreMaster(run, i, std::fma(-c.lr, direction, master));
  }
}

bool AllFiniteReference(Dtype dtype, const void* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = dtype == Dtype::kFloat32
                            ? static_cast<const float*>(values)[i]
                            : FromBFloat16(static_cast<const uint16_t*>(values)[i]);
    if (!std::isfinite(value)) return false;
  }
  return true;
}

}  // namespace

size_t CountBeforeTail(const Run& run) {
  const uint64_t tail_begin = run.tensor_count / 8 * 8;
  if (tail_begin <= run.begin) return 0;
  return std::min<uint64_t>(run.count, tail_begin - run.begin);
}

constinit const Implementation kReferenceImplementation = {
    AdamW, Sgd, SplitReference, MergeReference, AllFiniteReference, AddPartsReference};

}  // namespace offload::kernels

// The scalar implementation: the references of all rules (kernels/rules), which define what the
// vector versions compute, and what they share.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/implementation.h"
#include "kernels/rules/scalar_run.h"

namespace offload::kernels {
namespace {

float FromBFloat16(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }

// Nearest, ties to even, and back to fp32.
float RoundToBFloat16(float value) {
  if (std::isnan(value)) return value;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return FromBFloat16(static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16));
}

float Wide(uint16_t half) { return FromBFloat16(half); }
float Wide(Half half) { return FromHalf(half); }
template <class T>
T Wide(T value) {
  return value;
}

template <class T>
bool AllFiniteOf(const void* values, size_t count) {
  const auto is_finite = [](T value) { return std::isfinite(Wide(value)); };
  return std::all_of(static_cast<const T*>(values), static_cast<const T*>(values) + count,
                     is_finite);
}

bool AllFiniteReference(Dtype dtype, const void* values, size_t count) {
  switch (dtype) {
    case Dtype::kFloat32:
      return AllFiniteOf<float>(values, count);
    case Dtype::kBFloat16:
      return AllFiniteOf<uint16_t>(values, count);
    case Dtype::kFloat16:
      return AllFiniteOf<Half>(values, count);
    case Dtype::kFloat64:
      break;
  }
  return AllFiniteOf<double>(values, count);
}

template <class Rule, class T>
const typename Rule::template ConstantsOf<T>& ConstantsIn(const Coefficients& coefficients) {
  return *reinterpret_cast<const typename Rule::template ConstantsOf<T>*>(coefficients.bytes);
}

template <class Rule, class T>
void ReferenceUpdate(const Coefficients& coefficients, const Run& run) {
  Rule::Reference(ConstantsIn<Rule, T>(coefficients), run);
}

template <class Rule, class T>
void ReferenceNorms(const Coefficients& coefficients, const Run& run, Norms* norms) {
  Rule::ReferenceNorms(ConstantsIn<Rule, T>(coefficients), run, norms);
}
template <class Rule, class T>
constexpr NormsFunction NormsOf() {
  if constexpr (requires { &Rule::template ReferenceNorms<T>; }) return ReferenceNorms<Rule, T>;
  return nullptr;
}

template <class... Rule>
constexpr Implementation ReferenceImplementation(RuleList<Rule...>) {
  return {{ReferenceUpdate<Rule, float>...},
          {NormsOf<Rule, float>()...},
          {ReferenceUpdate<Rule, double>...},
          {NormsOf<Rule, double>()...},
          SplitReference,
          MergeReference,
          MergeHalf,
          SplitHalf,
          UnscaleHalvesReference,
          AllFiniteReference,
          AddPartsReference,
          [](RootSequence) { return false; },
          nullptr,
          MoveAverageReference,
          MoveAverageReference};
}

}  // namespace

void UnscaleHalvesReference(const Half* values, size_t count, const HalfScales& scales,
                            float* wide) {
  for (size_t i = 0; i < count; ++i) {
    float value = FromHalf(values[i]);
    if (scales.scale != 1) value = FromHalf(ToHalf(value * scales.scale));
    wide[i] = value * scales.unscale;
  }
}

template <class T>
static void MoveAverageOf(const AverageStep& step, const T* master, size_t count, T* average) {
  const T value = static_cast<T>(step.value);
  for (size_t i = 0; i < count; ++i) {
    const T distance = master[i] - average[i];
    if (step.kind == AverageStep::Kind::kTake) {
      average[i] = master[i];
    } else if (step.kind == AverageStep::Kind::kMean) {
      average[i] = average[i] + distance / value;
    } else if (value < T{0.5}) {
      average[i] = std::fma(value, distance, average[i]);
    } else {
      average[i] = std::fma(value - T{1}, distance, master[i]);
    }
  }
}

void MoveAverageReference(const AverageStep& step, const float* master, size_t count,
                          float* average) {
  MoveAverageOf(step, master, count, average);
}

void MoveAverageReference(const AverageStep& step, const double* master, size_t count,
                          double* average) {
  MoveAverageOf(step, master, count, average);
}

constinit const Implementation kReferenceImplementation = ReferenceImplementation(Rules());

namespace rules {

template <>
float LoadGradient(const Run& run, size_t i, bool maximize) {
  const auto scale = static_cast<float>(run.gradient_scale);
  float gradient;
  if (run.gradient_dtype == Dtype::kFloat32) {
    gradient = static_cast<const float*>(run.gradient)[i] * scale;
  } else if (run.gradient_dtype == Dtype::kFloat16) {
    const float wide = FromHalf(static_cast<const Half*>(run.gradient)[i]);
    gradient = FromHalf(ToHalf(wide * scale));
  } else {
    const float wide = FromBFloat16(static_cast<const uint16_t*>(run.gradient)[i]);
    gradient = RoundToBFloat16(wide * scale);
  }
  return maximize ? -gradient : gradient;
}

template <>
double LoadGradient(const Run& run, size_t i, bool maximize) {
  const double gradient = static_cast<const double*>(run.gradient)[i] * run.gradient_scale;
  return maximize ? -gradient : gradient;
}

template <>
float LoadMaster(const Run& run, size_t i) {
  if (run.weight_dtype == Dtype::kFloat32) return static_cast<const float*>(run.weight)[i];
  if (run.weight_dtype == Dtype::kFloat16) {
    float master;
    MergeHalf(static_cast<const Half*>(run.weight) + i, run.half_residual + i, 1, &master);
    return master;
  }
  uint32_t bits;
  MergeReference(static_cast<const uint16_t*>(run.weight) + i, run.residual + i, 1, &bits,
                 run.ties_in);
  return std::bit_cast<float>(bits);
}

template <>
double LoadMaster(const Run& run, size_t i) {
  return static_cast<const double*>(run.weight)[i];
}

template <>
void StoreMaster(const Run& run, size_t i, float master) {
  if (run.weight_dtype == Dtype::kFloat32) {
    static_cast<float*>(run.weight)[i] = master;
    return;
  }
  if (run.weight_dtype == Dtype::kFloat16) {
    SplitHalf(&master, 1, static_cast<Half*>(run.weight) + i, run.half_residual + i);
    return;
  }
  const uint32_t bits = std::bit_cast<uint32_t>(master);
  SplitReference(&bits, 1, static_cast<uint16_t*>(run.weight) + i, run.residual + i, run.ties_out);
}

template <>
void StoreMaster(const Run& run, size_t i, double master) {
  static_cast<double*>(run.weight)[i] = master;
}

size_t CountBeforeTail(const Run& run) {
  const uint64_t per_vector = 32 / MasterBytes(run.weight_dtype);
  const uint64_t tail_begin = run.tensor_count / per_vector * per_vector;
  if (tail_begin <= run.begin) return 0;
  return std::min<uint64_t>(run.count, tail_begin - run.begin);
}

}  // namespace rules
}  // namespace offload::kernels

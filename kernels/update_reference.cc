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

bool AllFiniteReference(Dtype dtype, const void* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = dtype == Dtype::kFloat32
                            ? static_cast<const float*>(values)[i]
                            : FromBFloat16(static_cast<const uint16_t*>(values)[i]);
    if (!std::isfinite(value)) return false;
  }
  return true;
}

template <class Rule>
void ReferenceUpdate(const Coefficients& coefficients, const Run& run) {
  Rule::Reference(*reinterpret_cast<const typename Rule::Constants*>(coefficients.bytes), run);
}

template <class Rule>
void ReferenceNorms(const Coefficients& coefficients, const Run& run, Norms* norms) {
  Rule::ReferenceNorms(*reinterpret_cast<const typename Rule::Constants*>(coefficients.bytes), run,
                       norms);
}
template <class Rule>
constexpr NormsFunction NormsOf() {
  if constexpr (requires { &Rule::ReferenceNorms; }) return ReferenceNorms<Rule>;
  return nullptr;
}

template <class... Rule>
constexpr Implementation ReferenceImplementation(RuleList<Rule...>) {
  return {{ReferenceUpdate<Rule>...}, {NormsOf<Rule>()...}, SplitReference, MergeReference,
          AllFiniteReference,         AddPartsReference};
}

}  // namespace

constinit const Implementation kReferenceImplementation = ReferenceImplementation(Rules());

namespace rules {

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

size_t CountBeforeTail(const Run& run) {
  const uint64_t tail_begin = run.tensor_count / 8 * 8;
  if (tail_begin <= run.begin) return 0;
  return std::min<uint64_t>(run.count, tail_begin - run.begin);
}

}  // namespace rules
}  // namespace offload::kernels

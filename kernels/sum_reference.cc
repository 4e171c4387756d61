// The ordered sum in plain scalar code: the definition that the vector versions are tested against.
#include <bit>
#include <cmath>

#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

float Wide(float value) { return value; }
float Wide(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }

void Narrow(float value, float* to) { *to = value; }
void Narrow(float value, uint16_t* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  *to = std::isnan(value) ? uint16_t{0xFFFF}
                          : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
template <class T>
float Round(float value) {
  T narrow;
  Narrow(value, &narrow);
  return Wide(narrow);
}

template <class T>
bool Add(const SumRun& run, size_t begin) {
  T* sum = static_cast<T*>(run.sum);
  bool finite = true;
  for (size_t i = begin; i < run.count; ++i) {
    float total = run.start == SumStart::kSum ? Wide(sum[i]) : 0.0f;
    for (size_t k = 0; k < run.part_count; ++k) {
      float part = Wide(static_cast<const T*>(run.parts[k])[i]);
      if (run.factor != 1.0f) part = Round<T>(part * run.factor);
      const bool is_first = k == 0 && run.start == SumStart::kNothing;
      total = is_first ? part : Round<T>(total + part);
    }
    Narrow(total, &sum[i]);
    finite &= std::isfinite(total);
  }
  return finite;
}

}  // namespace

bool AddPartsReference(const SumRun& run, size_t begin) {
  return run.dtype == Dtype::kFloat32 ? Add<float>(run, begin) : Add<uint16_t>(run, begin);
}

}  // namespace offload::kernels

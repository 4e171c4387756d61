// The ordered sum in plain scalar code: the definition that the vector versions are tested against.
#include <bit>
#include <cmath>

#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

float Wide(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }
float Wide(float value) { return value; }
double Wide(double value) { return value; }
float Wide(Half value) { return FromHalf(value); }

void Narrow(float value, float* to) { *to = value; }
void Narrow(double value, double* to) { *to = value; }
void Narrow(float value, Half* to) { *to = ToHalf(value); }
void Narrow(float value, uint16_t* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  *to = std::isnan(value) ? uint16_t{0xFFFF}
                          : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
template <class T, class Computed>
Computed Round(Computed value) {
  T narrow;
  Narrow(value, &narrow);
  return Wide(narrow);
}

template <class T>
bool Add(const SumRun& run, size_t begin) {
  using Computed = decltype(Wide(T()));
  T* sum = static_cast<T*>(run.sum);
  const auto factor = static_cast<Computed>(run.factor);
  bool finite = true;
  for (size_t i = begin; i < run.count; ++i) {
    Computed total = run.start == SumStart::kSum ? Wide(sum[i]) : 0;
    for (size_t k = 0; k < run.part_count; ++k) {
      Computed part = Wide(static_cast<const T*>(run.parts[k])[i]);
      if (run.factor != 1) part = Round<T>(part * factor);
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
  switch (run.dtype) {
    case Dtype::kFloat32:
      return Add<float>(run, begin);
    case Dtype::kBFloat16:
      return Add<uint16_t>(run, begin);
    case Dtype::kFloat16:
      return Add<Half>(run, begin);
    case Dtype::kFloat64:
      break;
  }
  return Add<double>(run, begin);
}

}  // namespace offload::kernels

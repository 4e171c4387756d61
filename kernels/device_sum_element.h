// kernels/device_sum_element.h
//
// One element of an ordered sum: what a thread of a GPU computes, and the same on the processor.
// Internal to kernels/.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/device_code.h"
#include "kernels/device_sum.h"

namespace offload::kernels {

// How elements of a dtype are read as fp32, and how fp32 is rounded to them.
struct FloatElement {
  using Type = float;
  OFFLOAD_DEVICE_CODE static float Wide(float value) { return value; }
  OFFLOAD_DEVICE_CODE static float Narrow(float value) { return value; }
};
struct BFloat16Element {
  using Type = uint16_t;
  OFFLOAD_DEVICE_CODE static float Wide(uint16_t half) {
    return std::bit_cast<float>(uint32_t{half} << 16);
  }
  OFFLOAD_DEVICE_CODE static uint16_t Narrow(float value) {
    if (value != value) return 0xFFFF;
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

template <class Element>
struct ElementSum {
  using Type = typename Element::Type;

  OFFLOAD_DEVICE_CODE static float Round(float value) {
    return Element::Wide(Element::Narrow(value));
  }
  OFFLOAD_DEVICE_CODE static void Add(const DeviceSum& sum, float factor, uint64_t i) {
    Type* const to = static_cast<Type*>(sum.sum) + i;
    const auto part = [&](uint32_t k) { return static_cast<const Type*>(sum.parts[k])[i]; };
    const bool takes_first = sum.start == SumStart::kNothing;
    if (takes_first && sum.part_count == 1 && factor == 1.0f) {
      *to = part(0);  // nothing is computed with it
      return;
    }
    float total = sum.start == SumStart::kSum ? Element::Wide(*to) : 0.0f;
    for (uint32_t k = 0; k < sum.part_count; ++k) {
      float value = Element::Wide(part(k));
      if (factor != 1.0f) value = Round(value * factor);
      total = k == 0 && takes_first ? value : Round(total + value);
    }
    *to = Element::Narrow(total);
  }
};

// Aborts when the sum is not one of a device.
void CheckDeviceSum(const DeviceSum& sum);

}  // namespace offload::kernels

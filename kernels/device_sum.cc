// The sum of a device's parts by the processor.
#include "kernels/device_sum.h"

#include "base/check.h"
#include "kernels/device_sum_element.h"

namespace offload::kernels {
namespace {

template <class Element>
void AddAll(const DeviceSum& sum) {
  const auto factor = static_cast<float>(sum.factor);
  for (uint64_t i = 0; i < sum.count; ++i) ElementSum<Element>::Add(sum, factor, i);
}

}  // namespace

void CheckDeviceSum(const DeviceSum& sum) {
  OFFLOAD_CHECK(sum.part_count > 0 && sum.part_count <= kDevicePartsMax)
      << "a sum of " << sum.part_count << " parts";
  OFFLOAD_CHECK(sum.dtype == Dtype::kFloat32 || sum.dtype == Dtype::kBFloat16)
      << "devices add fp32 and bf16";
}

void AddPartsOnHost(const DeviceSum& sum) {
  CheckDeviceSum(sum);
  sum.dtype == Dtype::kFloat32 ? AddAll<FloatElement>(sum) : AddAll<BFloat16Element>(sum);
}

}  // namespace offload::kernels

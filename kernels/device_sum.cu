// The sum of a device's parts by a GPU: a thread takes elements that are a grid apart.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/device_sum_element.h"

namespace offload::kernels {
namespace {

constexpr int kThreadsPerBlock = 256;
constexpr uint64_t kBlocksMax = 64 * 1024;

template <class Element>
__global__ void __launch_bounds__(kThreadsPerBlock)
    AddElements(const __grid_constant__ DeviceSum sum, const float factor) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < sum.count; i += stride)
    ElementSum<Element>::Add(sum, factor, i);
}

template <class Element>
cudaError_t Launch(const DeviceSum& sum, cudaStream_t stream) {
  const uint64_t blocks =
      std::min(kBlocksMax, (sum.count + kThreadsPerBlock - 1) / kThreadsPerBlock);
  AddElements<Element><<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0, stream>>>(
      sum, static_cast<float>(sum.factor));
  return cudaGetLastError();
}

}  // namespace

int LaunchSum(const DeviceSum& sum, void* stream) {
  CheckDeviceSum(sum);
  if (sum.count == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  return sum.dtype == Dtype::kFloat32 ? Launch<FloatElement>(sum, on)
                                      : Launch<BFloat16Element>(sum, on);
}

}  // namespace offload::kernels

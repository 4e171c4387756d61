// The update of a device's planes by a GPU: a thread takes elements that are a grid apart, a warp
// 32 in a row, so that its tie bits are one word.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/device_rules.h"

namespace offload::kernels {
namespace {

constexpr int kThreadsPerBlock = 256;
constexpr uint64_t kBlocksMax = 64 * 1024;
constexpr uint32_t kWarp = 32;

template <class Rule, Dtype kWeight, Dtype kGradient>
__global__ void __launch_bounds__(kThreadsPerBlock)
    UpdateElements(
        const typename Rule::template ConstantsOf<typename MasterOf<kWeight>::Type> constants,
        const DeviceRun run, const float unscale, const uint64_t tail_begin) {
  using V = typename ElementFor<kWeight>::Type;
  const Run scalars = ScalarsOf(run);
  const typename Rule::template Step<V, false> body(constants, scalars);
  const typename Rule::template Step<V, true> tail(constants, scalars);
  ElementArrays<kWeight, kGradient> arrays = ArraysOf<kWeight, kGradient>(run, unscale);
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint32_t lane = threadIdx.x % kWarp;
  // All lanes of a warp go round together: the vote needs them.
  for (uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x - lane; first < run.count;
       first += stride) {
    const uint64_t i = first + lane;
    bool before = false, after = false;
    if constexpr (kWeight == Dtype::kBFloat16) before = (run.ties[first / kWarp] >> lane) & 1;
    arrays.ties_in = &before;
    arrays.ties_out = &after;
    if (i < tail_begin) {
      body(arrays, i);
    } else if (i < run.count) {
      tail(arrays, i);
    }
    if constexpr (kWeight == Dtype::kBFloat16) {
      const uint32_t word = __ballot_sync(0xFFFFFFFFu, after);
      if (lane == 0) run.ties[first / kWarp] = word;
    }
  }
}

}  // namespace

int LaunchUpdate(const OptimizerSpec& optimizer, int64_t step, const DeviceRun& run, void* stream) {
  CheckDeviceRun(optimizer, run);
  if (run.count == 0) return cudaSuccess;
  const uint64_t blocks =
      std::min(kBlocksMax, (run.count + kThreadsPerBlock - 1) / kThreadsPerBlock);
  cudaError_t error = cudaErrorInvalidDeviceFunction;  // none of DeviceRules
  const float unscale = UnscaleOf(optimizer, run.gradient_dtype);
  WithDeviceRule(DeviceRules(), optimizer, step, run,
                 [&]<class Rule, Dtype kWeight, Dtype kGradient>(const auto& constants) {
                   UpdateElements<Rule, kWeight, kGradient>
                       <<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0,
                          static_cast<cudaStream_t>(stream)>>>(constants, run, unscale,
                                                               TailBeginOf<Rule>(constants, run));
                   error = cudaGetLastError();
                 });
  return error;
}

}  // namespace offload::kernels

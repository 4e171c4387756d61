// The update of a device's planes by a GPU: a thread takes elements that are a grid apart, a warp
// 32 in a row, so that its tie bits are one word. Norms are taken before it: a block of threads
// computes the terms of a block of elements, and one thread for each lane adds them in their order.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/device_rules.h"
#include "kernels/trust_ratio.h"

namespace offload::kernels {
namespace {

constexpr int kThreadsPerBlock = 256;
constexpr uint64_t kBlocksMax = 64 * 1024;
constexpr uint32_t kWarp = 32;

template <class Rule, Dtype kWeight, Dtype kGradient>
__global__ void __launch_bounds__(kThreadsPerBlock) UpdateElements(
    const typename Rule::template ConstantsOf<typename MasterOf<kWeight>::Type> constants,
    const DeviceRun run, const float unscale, const uint64_t tail_begin) {
  using V = typename ElementFor<kWeight>::Type;
  Run scalars = ScalarsOf(run);
  if constexpr (kHasTerms<Rule>) scalars.trust_ratio = *TrustRatioOf(run);
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

template <class Rule, Dtype kWeight, Dtype kGradient>
__global__ void __launch_bounds__(kThreadsPerBlock) AddSquares(
    const typename Rule::template ConstantsOf<typename MasterOf<kWeight>::Type> constants,
    const DeviceRun run, const float unscale) {
  using V = typename ElementFor<kWeight>::Type;
  using T = typename V::Scalar;
  static_assert(Norms::kBlockElements % kThreadsPerBlock == 0);
  static_assert(kThreadsPerBlock % Norms::kLanes == 0);
  __shared__ T weights[kThreadsPerBlock], updates[kThreadsPerBlock];
  __shared__ double sums[2 * Norms::kLanes];
  const Run scalars = ScalarsOf(run);
  const typename Rule::template Terms<V> terms(constants, scalars);
  ElementArrays<kWeight, kGradient> arrays = ArraysOf<kWeight, kGradient>(run, unscale);
  const uint64_t begin = uint64_t{blockIdx.x} * Norms::kBlockElements;
  const uint64_t left = run.count - begin;
  const uint64_t count = left < Norms::kBlockElements ? left : Norms::kBlockElements;
  const bool adds = threadIdx.x < 2 * Norms::kLanes;
  const T* const values = threadIdx.x < Norms::kLanes ? weights : updates;
  double sum = 0;
  for (uint64_t first = 0; first < count; first += kThreadsPerBlock) {
    const uint64_t at = first + threadIdx.x, i = begin + at;
    if (at < count) {
      bool before = false;
      if constexpr (kWeight == Dtype::kBFloat16) before = (run.ties[i / kWarp] >> (i % kWarp)) & 1;
      arrays.ties_in = &before;
      terms(arrays, i, &weights[threadIdx.x], &updates[threadIdx.x]);
    }
    __syncthreads();
    for (uint64_t k = threadIdx.x % Norms::kLanes;
         adds && k < kThreadsPerBlock && first + k < count; k += Norms::kLanes)
      sum += double{values[k]} * values[k];
    __syncthreads();
  }
  if (adds) sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < 2)
    run.norms[2 * blockIdx.x + threadIdx.x] = SumOfLanes(sums + threadIdx.x * Norms::kLanes);
}

// By one thread: the order of the additions is fixed.
__global__ void TakeTrustRatio(const DeviceRun run) {
  double weights = 0, updates = 0;
  for (uint64_t block = 0; block < NormBlocks(run.count); ++block) {
    weights += run.norms[2 * block];
    updates += run.norms[2 * block + 1];
  }
  *TrustRatioOf(run) = RatioOfSums(weights, updates);
}

template <class Rule, Dtype kWeight, Dtype kGradient, class Constants>
cudaError_t TakeNorms(const Constants& constants, const DeviceRun& run, float unscale,
                      cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(NormBlocks(run.count));
  AddSquares<Rule, kWeight, kGradient>
      <<<blocks, kThreadsPerBlock, 0, stream>>>(constants, run, unscale);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  TakeTrustRatio<<<1, 1, 0, stream>>>(run);
  return cudaGetLastError();
}

}  // namespace

int LaunchUpdate(const OptimizerSpec& optimizer, int64_t step, const DeviceRun& run, void* stream) {
  CheckDeviceRun(optimizer, run);
  if (run.count == 0) return cudaSuccess;
  const uint64_t blocks =
      std::min(kBlocksMax, (run.count + kThreadsPerBlock - 1) / kThreadsPerBlock);
  const auto on = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaSuccess;
  const float unscale = UnscaleOf(optimizer, run.gradient_dtype);
  WithDeviceRule(Rules(), optimizer, step, run,
                 [&]<class Rule, Dtype kWeight, Dtype kGradient>(const auto& constants) {
                   if constexpr (kHasTerms<Rule>)
                     error = TakeNorms<Rule, kWeight, kGradient>(constants, run, unscale, on);
                   if (error != cudaSuccess) return;
                   UpdateElements<Rule, kWeight, kGradient>
                       <<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0, on>>>(
                           constants, run, unscale, TailBeginOf<Rule>(constants, run));
                   error = cudaGetLastError();
                 });
  return error;
}

}  // namespace offload::kernels

// kernels/device_update.h
//
// The update of kernels/update.h for planes that live on an accelerator: the same rules, the same
// fused pass (unscale, clip, decay, state, weight, merge and split), the same bits. It is compiled
// twice from one source (kernels/element.h): LaunchUpdate by nvcc, UpdateOnHost for the processor,
// which stands in for a GPU and proves the arithmetic where there is none.
//
// Rules whose update depends on norms of the whole tensor (LAMB) sweep over it once before, and add
// in the order of kernels/update.h. Dtypes are those of kernels/update.h.
//
// Tie bits: in a store they are packed, one for each element whose residual is -32768
// (kernels/split.h). Threads cannot share a position in them, so on a device there is one bit per
// element, and the packed form is made where planes come and go: UnpackTies, PackTies.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/optimizer.h"
#include "kernels/split.h"
#include "kernels/update.h"

namespace offload::kernels {

// A run of elements of one tensor, as Run is one; pointers are to memory of the device that updates
// it, and stay the caller's.
struct DeviceRun {
  uint64_t count = 0;
  uint64_t begin = 0;         // index of the first element in its tensor
  uint64_t tensor_count = 0;  // elements of the whole tensor
  Dtype weight_dtype = Dtype::kFloat32;
  void* weight = nullptr;
  int16_t* residual = nullptr;        // bf16 models only
  uint32_t* half_residual = nullptr;  // fp16 models only
  // bf16 models only: bit i mod 32 of word i / 32 is set where the tie of the run's element i went
  // down. The words are this run's alone; bits behind the last element are zeroed.
  uint32_t* ties = nullptr;
  float* state[kStatePlanesMax] = {};
  double* double_state[kStatePlanesMax] = {};  // fp64 models: in place of `state`
  Dtype gradient_dtype = Dtype::kFloat32;
  const void* gradient = nullptr;
  double gradient_scale = 1;
  // One fp32 value on the device that takes the place of gradient_scale, so that a clip coefficient
  // never has to come to the host; may be null.
  const float* gradient_scale_on_device = nullptr;
  const uint32_t* roots = nullptr;  // Run::roots, on the device
  // Of optimizers that need norms (NeedsNorms()), whose run is a whole tensor: NormBytes() that
  // nothing else uses while the update runs.
  double* norms = nullptr;
};

// In `norms`: the sums of squares of each block's masters and of its updates, one behind the other,
// and behind all blocks the trust ratio.
constexpr uint64_t NormBlocks(uint64_t count) {
  return (count + Norms::kBlockElements - 1) / Norms::kBlockElements;
}
constexpr uint64_t NormBytes(uint64_t count) {
  return (2 * NormBlocks(count) + 1) * sizeof(double);
}

// Updates by the processor, element by element; `run` is in host memory.
void UpdateOnHost(const OptimizerSpec& optimizer, int64_t step, const DeviceRun& run);

// Launches the update on `stream` (a cudaStream_t) of the current device and returns at once: 0, or
// the cudaError_t of the launch.
int LaunchUpdate(const OptimizerSpec& optimizer, int64_t step, const DeviceRun& run, void* stream);

// Words of tie bits of `count` elements on a device.
constexpr uint64_t TieWords(uint64_t count) { return (count + 31) / 32; }
// Spreads packed tie bits of the elements whose residuals are given: TieWords(count) words.
void UnpackTies(const int16_t* residual, size_t count, TieReader* packed, uint32_t* ties);
void PackTies(const int16_t* residual, size_t count, const uint32_t* ties, TieWriter* packed);

}  // namespace offload::kernels

// kernels/average.h
//
// Moves averages of masters (base/averaging.h) behind their update, with the roundings of torch's
// swa_utils.AveragedModel on the CPU (torch 2.11), bit for bit:
//   kTake   average = master
//   kLerp   lerp_, as get_ema_multi_avg_fn: fma(w, master - average, average) for w < 0.5, w =
//           fl(1 - decay), else fma(w - 1, master - average, master)
//   kMean   average + (master - average) / n, as AveragedModel without a function of its own
// in fp32, of fp64 models in fp64.
//
// Thread safety: pure over their arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/averaging.h"
#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/split.h"

namespace offload::kernels {

// Elements of one tensor; arrays are `count` long.
struct AverageRun {
  size_t count = 0;
  Dtype weight_dtype = Dtype::kFloat32;
  const void* weight = nullptr;             // fp32 and fp64: the master
  const int16_t* residual = nullptr;        // bf16
  const uint32_t* half_residual = nullptr;  // fp16
  TieReader ties;                           // bf16: of the first element on
  void* average = nullptr;                  // of the master's type; updated in place
};
void MoveAverage(const AverageStep& step, const AverageRun& run);
// The same by a given implementation, which the processor must support: for tests.
void MoveAverage(Isa isa, const AverageStep& step, const AverageRun& run);

}  // namespace offload::kernels

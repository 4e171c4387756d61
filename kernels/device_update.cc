// The update of a device's planes by the processor.
#include "kernels/device_update.h"

#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/device_rules.h"
#include "kernels/run_checks.h"
#include "kernels/trust_ratio.h"

namespace offload::kernels {
namespace {

constexpr int16_t kTie = -32768;

bool TieOf(const uint32_t* ties, uint64_t i) { return (ties[i / 32] >> (i % 32)) & 1; }
void SetTie(uint32_t* ties, uint64_t i, bool tie) {
  const uint32_t bit = uint32_t{1} << (i % 32);
  ties[i / 32] = tie ? ties[i / 32] | bit : ties[i / 32] & ~bit;
}

template <class Step, class Arrays>
void StepOver(const Step& step, Arrays arrays, uint32_t* ties, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    bool before = false, after = false;
    if constexpr (Arrays::kIsSplit) before = TieOf(ties, i);
    arrays.ties_in = &before;
    arrays.ties_out = &after;
    step(arrays, i);
    if constexpr (Arrays::kIsSplit) SetTie(ties, i, after);
  }
}

// Adds the terms of all elements, and leaves the ratio.
template <class Terms, class Arrays>
void TakeNorms(const Terms& terms, Arrays arrays, const DeviceRun& run) {
  using T = std::remove_pointer_t<std::remove_cvref_t<decltype(arrays.state[0])>>;
  double all_weights = 0, all_updates = 0;
  for (uint64_t begin = 0; begin < run.count; begin += Norms::kBlockElements) {
    const uint64_t end = std::min<uint64_t>(run.count, begin + Norms::kBlockElements);
    Norms lanes;
    for (uint64_t i = begin; i < end; ++i) {
      bool before = false;
      if constexpr (Arrays::kIsSplit) before = TieOf(run.ties, i);
      arrays.ties_in = &before;
      T weight = 0, update = 0;
      terms(arrays, i, &weight, &update);
      lanes.weight[i % Norms::kLanes] += double{weight} * weight;
      lanes.update[i % Norms::kLanes] += double{update} * update;
    }
    double* const sums = run.norms + 2 * (begin / Norms::kBlockElements);
    sums[0] = SumOfLanes(lanes.weight);
    sums[1] = SumOfLanes(lanes.update);
    all_weights += sums[0];
    all_updates += sums[1];
  }
  *TrustRatioOf(run) = RatioOfSums(all_weights, all_updates);
}

}  // namespace

void CheckDeviceRun(const OptimizerSpec& optimizer, const DeviceRun& run) {
  CheckPlanes(optimizer, run, run.ties != nullptr);
  if (!NeedsNorms(optimizer) || run.count == 0) return;
  OFFLOAD_CHECK(run.norms != nullptr && run.count == run.tensor_count)
      << optimizer.name() << " takes norms of whole tensors";
}

void UpdateOnHost(const OptimizerSpec& optimizer, int64_t step, const DeviceRun& run) {
  CheckDeviceRun(optimizer, run);
  const float unscale = UnscaleOf(optimizer, run.gradient_dtype);
  if (run.count == 0) return;
  WithDeviceRule(Rules(), optimizer, step, run,
                 [&]<class Rule, Dtype kWeight, Dtype kGradient>(const auto& constants) {
                   using V = typename ElementFor<kWeight>::Type;
                   const uint64_t tail_begin = TailBeginOf<Rule>(constants, run);
                   Run scalars = ScalarsOf(run);
                   const auto arrays = ArraysOf<kWeight, kGradient>(run, unscale);
                   if constexpr (kHasTerms<Rule>) {
                     const typename Rule::template Terms<V> terms(constants, scalars);
                     TakeNorms(terms, arrays, run);
                     scalars.trust_ratio = *TrustRatioOf(run);
                   }
                   const typename Rule::template Step<V, false> body(constants, scalars);
                   const typename Rule::template Step<V, true> tail(constants, scalars);
                   StepOver(body, arrays, run.ties, 0, tail_begin);
                   StepOver(tail, arrays, run.ties, tail_begin, run.count);
                 });
  if (run.weight_dtype == Dtype::kBFloat16) {
    for (uint64_t i = run.count; i % 32 != 0; ++i) SetTie(run.ties, i, false);
  }
}

void UnpackTies(const int16_t* residual, size_t count, TieReader* packed, uint32_t* ties) {
  std::fill_n(ties, TieWords(count), 0);
  for (size_t i = 0; i < count; ++i) {
    if (residual[i] == kTie) SetTie(ties, i, packed->Next());
  }
}

void PackTies(const int16_t* residual, size_t count, const uint32_t* ties, TieWriter* packed) {
  for (size_t i = 0; i < count; ++i) {
    if (residual[i] == kTie) packed->Append(TieOf(ties, i));
  }
}

}  // namespace offload::kernels

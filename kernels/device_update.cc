// The update of a device's planes by the processor.
#include "kernels/device_update.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/device_rules.h"

namespace offload::kernels {
namespace {

constexpr int16_t kTie = -32768;

bool TieOf(const uint32_t* ties, uint64_t i) { return (ties[i / 32] >> (i % 32)) & 1; }
void SetTie(uint32_t* ties, uint64_t i, bool tie) {
  const uint32_t bit = uint32_t{1} << (i % 32);
  ties[i / 32] = tie ? ties[i / 32] | bit : ties[i / 32] & ~bit;
}

template <class Step, Dtype kWeight, Dtype kGradient>
void StepOver(const Step& step, const DeviceRun& run, uint64_t begin, uint64_t end) {
  ElementArrays<kWeight, kGradient> arrays = ArraysOf<kWeight, kGradient>(run);
  for (uint64_t i = begin; i < end; ++i) {
    bool before = false, after = false;
    if constexpr (kWeight == Dtype::kBFloat16) before = TieOf(run.ties, i);
    arrays.ties_in = &before;
    arrays.ties_out = &after;
    step(arrays, i);
    if constexpr (kWeight == Dtype::kBFloat16) SetTie(run.ties, i, after);
  }
}

}  // namespace

void CheckDeviceRun(const OptimizerSpec& optimizer, const DeviceRun& run) {
  OFFLOAD_CHECK(run.count <= run.tensor_count && run.begin <= run.tensor_count - run.count)
      << "run of " << run.count << " elements at " << run.begin << " of " << run.tensor_count;
  const auto is_served = [](Dtype dtype) {
    return dtype == Dtype::kFloat32 || dtype == Dtype::kBFloat16;
  };
  OFFLOAD_CHECK(is_served(run.weight_dtype) && is_served(run.gradient_dtype))
      << "devices update fp32 and bf16 weights, not " << DtypeName(run.weight_dtype)
      << " with gradients of " << DtypeName(run.gradient_dtype);
  OFFLOAD_CHECK(run.weight_dtype == Dtype::kFloat32 ||
                (run.residual != nullptr && run.ties != nullptr))
      << "a bf16 run needs its residual and tie bits";
  for (size_t i = 0; i < kStatePlanesMax; ++i) {
    OFFLOAD_CHECK(run.count == 0 || run.state[i] != nullptr || optimizer.Plane(i) == nullptr)
        << optimizer.name() << " needs " << optimizer.Plane(i)->name;
  }
}

bool SupportsDeviceUpdate(const OptimizerSpec& optimizer) {
  return WithDeviceRule(DeviceRules(), optimizer, 1, []<class Rule>(const auto&) {});
}

void UpdateOnHost(const OptimizerSpec& optimizer, int64_t step, const DeviceRun& run) {
  CheckDeviceRun(optimizer, run);
  const bool found =
      WithDeviceRule(DeviceRules(), optimizer, step, [&]<class Rule>(const auto& constants) {
        const uint64_t tail_begin = TailBeginOf<Rule>(constants, run);
        const Run scalars = ScalarsOf(run);
        WithDtypes(run, [&]<Dtype kWeight, Dtype kGradient>() {
          using Body = typename Rule::template Step<Element, false>;
          using Tail = typename Rule::template Step<Element, true>;
          StepOver<Body, kWeight, kGradient>(Body(constants, scalars), run, 0, tail_begin);
          StepOver<Tail, kWeight, kGradient>(Tail(constants, scalars), run, tail_begin, run.count);
        });
      });
  OFFLOAD_CHECK(found) << optimizer.name() << " has no update for devices";
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

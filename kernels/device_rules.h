// kernels/device_rules.h
//
// The rules that run on devices, and what both of their compilations share. Internal to kernels/.
#pragma once

#include "kernels/device_update.h"
#include "kernels/element.h"
#include "kernels/rules/rules.h"

namespace offload::kernels {

using DeviceRules = RuleList<rules::AdamW, rules::Sgd, rules::Adam>;

// What a rule's step asks of a run beside the arrays.
OFFLOAD_DEVICE_CODE inline Run ScalarsOf(const DeviceRun& run) {
  Run scalars;
  scalars.gradient_scale =
      run.gradient_scale_on_device == nullptr ? run.gradient_scale : *run.gradient_scale_on_device;
  scalars.roots = run.roots;
  return scalars;
}

// The arrays of a run with its dtypes, fp32 and bf16. Ties stay null: each element has its own.
template <Dtype kWeight, Dtype kGradient>
OFFLOAD_DEVICE_CODE inline ElementArrays<kWeight, kGradient> ArraysOf(const DeviceRun& run) {
  return {static_cast<typename ElementOf<kWeight>::Type*>(run.weight),
          run.residual,
          {run.state[0], run.state[1], run.state[2]},
          static_cast<const typename ElementOf<kGradient>::Type*>(run.gradient),
          nullptr,
          nullptr};
}

// How many elements of the run lie before the tail of their tensor.
template <class Rule>
uint64_t TailBeginOf(const typename Rule::template ConstantsOf<float>& constants,
                     const DeviceRun& run) {
  if constexpr (Rule::kHasTail) {
    Run place;
    place.count = run.count;
    place.begin = run.begin;
    place.tensor_count = run.tensor_count;
    return Rule::TailBegin(constants, place);
  } else {
    return run.count;
  }
}

// Calls function.operator()<Rule>(constants) for the rule of an optimizer; false when it is none of
// DeviceRules.
template <class Function, class... Rule>
bool WithDeviceRule(RuleList<Rule...>, const OptimizerSpec& optimizer, int64_t step,
                    const Function& function) {
  Coefficients coefficients;
  const auto call = [&]<class R>() {
    if (&R::kRow != &optimizer.row()) return false;
    optimizer.row().prepare(optimizer.values().data(), step, &coefficients);
    function.template operator()<R>(
        *reinterpret_cast<const typename R::template ConstantsOf<float>*>(coefficients.bytes));
    return true;
  };
  return (call.template operator()<Rule>() || ...);
}

// Calls function.operator()<weight dtype, gradient dtype>() with those of a run.
template <class Function>
void WithDtypes(const DeviceRun& run, const Function& function) {
  constexpr Dtype kFloat = Dtype::kFloat32, kHalf = Dtype::kBFloat16;
  const bool is_split = run.weight_dtype == kHalf, is_half = run.gradient_dtype == kHalf;
  if (is_split && is_half) return function.template operator()<kHalf, kHalf>();
  if (is_split) return function.template operator()<kHalf, kFloat>();
  if (is_half) return function.template operator()<kFloat, kHalf>();
  return function.template operator()<kFloat, kFloat>();
}

// Aborts when the run lacks what the optimizer needs.
void CheckDeviceRun(const OptimizerSpec& optimizer, const DeviceRun& run);

}  // namespace offload::kernels

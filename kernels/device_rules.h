// kernels/device_rules.h
//
// How the rules run on devices: what both of their compilations share. Internal to kernels/.
#pragma once

#include "kernels/device_update.h"
#include "kernels/element.h"
#include "kernels/rules/rules.h"
#include "kernels/run_checks.h"

namespace offload::kernels {

// Whether a rule sweeps over the tensor once before, for its norms.
template <class Rule>
inline constexpr bool kHasTerms = requires {
  typename Rule::template Terms<Element>;
};

OFFLOAD_DEVICE_CODE inline double* TrustRatioOf(const DeviceRun& run) {
  return run.norms + 2 * NormBlocks(run.count);
}

// What a rule's step asks of a run beside the arrays, and beside norms.
OFFLOAD_DEVICE_CODE inline Run ScalarsOf(const DeviceRun& run) {
  Run scalars;
  scalars.gradient_scale =
      run.gradient_scale_on_device == nullptr ? run.gradient_scale : *run.gradient_scale_on_device;
  scalars.roots = run.roots;
  return scalars;
}

// The arrays of a run with its dtypes. Ties stay null: each element has its own.
template <Dtype kWeight, Dtype kGradient>
OFFLOAD_DEVICE_CODE inline ElementArrays<kWeight, kGradient> ArraysOf(const DeviceRun& run,
                                                                      float unscale) {
  ElementArrays<kWeight, kGradient> arrays{
      static_cast<typename ElementOf<kWeight>::Type*>(run.weight),
      run.residual,
      run.half_residual,
      {},
      {},
      nullptr,
      nullptr};
  for (size_t i = 0; i < kStatePlanesMax; ++i) {
    if constexpr (kWeight == Dtype::kFloat64) {
      arrays.state[i] = run.double_state[i];
    } else {
      arrays.state[i] = run.state[i];
    }
  }
  const auto* const gradient =
      static_cast<const typename ElementOf<kGradient>::Type*>(run.gradient);
  if constexpr (kGradient == Dtype::kFloat16) {
    arrays.gradient = {gradient, unscale};
  } else {
    arrays.gradient = gradient;
  }
  return arrays;
}

// How many elements of the run lie before the tail of their tensor.
template <class Rule, class Constants>
uint64_t TailBeginOf(const Constants& constants, const DeviceRun& run) {
  if constexpr (Rule::kHasTail) {
    Run place;
    place.count = run.count;
    place.begin = run.begin;
    place.tensor_count = run.tensor_count;
    place.weight_dtype = run.weight_dtype;
    return Rule::TailBegin(constants, place);
  } else {
    return run.count;
  }
}

// Calls function.operator()<weight dtype, gradient dtype>() with those of a run.
template <class Function>
void WithDtypes(const DeviceRun& run, const Function& function) {
  constexpr Dtype kSingle = Dtype::kFloat32, kBrain = Dtype::kBFloat16;
  constexpr Dtype kDouble = Dtype::kFloat64, kHalf = Dtype::kFloat16;
  if (run.weight_dtype == kDouble) return function.template operator()<kDouble, kDouble>();
  if (run.weight_dtype == kHalf) return function.template operator()<kHalf, kHalf>();
  const bool is_split = run.weight_dtype == kBrain, is_brain = run.gradient_dtype == kBrain;
  if (is_split && is_brain) return function.template operator()<kBrain, kBrain>();
  if (is_split) return function.template operator()<kBrain, kSingle>();
  if (is_brain) return function.template operator()<kSingle, kBrain>();
  return function.template operator()<kSingle, kSingle>();
}

// Calls function.operator()<Rule, weight dtype, gradient dtype>(constants) for the rule of an
// optimizer and the dtypes of a run.
template <class Function, class... Rule>
void WithDeviceRule(RuleList<Rule...>, const OptimizerSpec& optimizer, int64_t step,
                    const DeviceRun& run, const Function& function) {
  const Coefficients coefficients = CoefficientsOf(optimizer, step, run.weight_dtype);
  const auto call = [&]<class R>() {
    if (&R::kRow != &optimizer.row()) return false;
    WithDtypes(run, [&]<Dtype kWeight, Dtype kGradient>() {
      using Constants = typename R::template ConstantsOf<typename MasterOf<kWeight>::Type>;
      function.template operator()<R, kWeight, kGradient>(
          *reinterpret_cast<const Constants*>(coefficients.bytes));
    });
    return true;
  };
  (call.template operator()<Rule>() || ...);
}

// Aborts when the run lacks what the optimizer needs.
void CheckDeviceRun(const OptimizerSpec& optimizer, const DeviceRun& run);

}  // namespace offload::kernels

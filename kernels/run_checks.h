// kernels/run_checks.h
//
// What an update asks of a run before it begins, and the constants that it computes with: the same
// for runs in the host's memory and on a device. Internal to kernels/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "kernels/update.h"

namespace offload::kernels {

// Aborts when the run lacks what the optimizer needs. Both kinds of runs have their tie bits in
// places of their own: `has_ties`.
template <class AnyRun>
void CheckPlanes(const OptimizerSpec& optimizer, const AnyRun& run, bool has_ties) {
  OFFLOAD_CHECK(run.count <= run.tensor_count && run.begin <= run.tensor_count - run.count)
      << "run of " << run.count << " elements at " << run.begin << " of " << run.tensor_count;
  OFFLOAD_CHECK(run.weight_dtype != Dtype::kBFloat16 || (run.residual != nullptr && has_ties))
      << "a bf16 run needs its residual and tie bits";
  OFFLOAD_CHECK(run.weight_dtype != Dtype::kFloat16 || run.half_residual != nullptr)
      << "an fp16 run needs its residual";
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat16}) {
    OFFLOAD_CHECK((run.weight_dtype == dtype) == (run.gradient_dtype == dtype))
        << DtypeName(run.weight_dtype) << " weights with " << DtypeName(run.gradient_dtype)
        << " gradients";
  }
  const bool is_double = run.weight_dtype == Dtype::kFloat64;
  for (size_t i = 0; i < kStatePlanesMax; ++i) {
    const bool is_there = is_double ? run.double_state[i] != nullptr : run.state[i] != nullptr;
    OFFLOAD_CHECK(run.count == 0 || is_there || optimizer.Plane(i) == nullptr)
        << optimizer.name() << " needs " << optimizer.Plane(i)->name;
  }
}

// The constants of an update in the dtype that weights of this one are computed with.
inline Coefficients CoefficientsOf(const OptimizerSpec& optimizer, int64_t step,
                                   Dtype weight_dtype) {
  const Optimizer& row = optimizer.row();
  const auto prepare = weight_dtype == Dtype::kFloat64 ? row.prepare_double : row.prepare;
  Coefficients coefficients;
  prepare(optimizer.values().data(), step, &coefficients);
  return coefficients;
}

}  // namespace offload::kernels

// Chooses the implementation, and turns an optimizer's parameters into fp32 constants.
//
// Where the formulas come from (torch 2.11, CPU with FMA; `fl` rounds a double to fp32):
//
// AdamW, all flavours; a decay of zero multiplies by one, which changes nothing:
//   p1 = p * fl(1 - lr*wd)
//   p  = p1 - (fl(lr/(1-b1^t)) * m) / (sqrt(v)/fl(sqrt(1-b2^t)) + fl(eps))
//
// kFused is at::_fused_adamw_. Its m is a lerp, which torch computes from the nearer end:
//   m  = fma(w, g-m, m) for w = fl(1-b1) < 0.5, else fma(w-1, g-m, g)
//   v  = fma(fl(1-b2)*g, g, v*fl(b2))     in its loop over vectors of 8
//   v  = fma(v, fl(b2), (fl(1-b2)*g)*g)   in its scalar loop over the rest: the rule of the tail
//
// kLerp is lerp_, then mul_ and addcmul_, addcdiv_: no tail, and Python's `** 0.5` for the root of
// the bias correction.
//
// kMulAdd is mul_ and add_ for m, the rest as kLerp:
//   m  = fma(w, g, m*fl(b1))
//
// SGD. add(other, alpha) is fma(alpha, other, self) and mul_ rounds by itself, so:
//   d   = fma(wd, p, g), or g when wd is zero
//   buf = first ? d : fma(fl(1-dampening), d, buf*momentum)
//   d   = nesterov ? fma(momentum, buf, d) : buf
//   p   = fma(-lr, d, p)
//
// Maximizing negates the (scaled) gradient before anything else; in both families it is exact.
//
// Subnormal numbers are computed with, as torch does by default: nothing here touches the
// processor's flush-to-zero modes.
#include "kernels/update.h"

#include <cmath>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

constexpr Isa kBestFirst[] = {Isa::kAvx512, Isa::kAvx2, Isa::kReference};

// An unknown name means no limit.
Isa LimitFromEnvironment() {
  const char* limit = std::getenv("OFFLOADD_ISA");
  for (const Isa isa : kBestFirst) {
    if (limit != nullptr && std::string_view(limit) == IsaName(isa)) return isa;
  }
  return Isa::kAvx512;
}

Isa ChooseIsa() {
  const Isa limit = LimitFromEnvironment();
  for (const Isa isa : kBestFirst) {
    if (isa <= limit && IsSupported(isa)) return isa;
  }
  return Isa::kReference;
}

float Float(double value) { return static_cast<float>(value); }

void CheckRun(const Run& run) {
  OFFLOAD_CHECK(run.count <= run.tensor_count && run.begin <= run.tensor_count - run.count)
      << "run of " << run.count << " elements at " << run.begin << " of " << run.tensor_count;
  OFFLOAD_CHECK(run.weight_dtype == Dtype::kFloat32 ||
                (run.residual != nullptr && run.ties_in != nullptr && run.ties_out != nullptr))
      << "a bf16 run needs its residual and tie bits";
}

}  // namespace

bool IsSupported(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  switch (isa) {
    case Isa::kReference:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
}

Isa BestIsa() {
  static const Isa isa = ChooseIsa();
  return isa;
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      return "reference";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const Implementation& ImplementationOf(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      break;
    case Isa::kAvx2:
      return kAvx2Implementation;
    case Isa::kAvx512:
      return kAvx512Implementation;
  }
  return kReferenceImplementation;
}

AdamWCoefficients CoefficientsOf(const AdamWParameters& parameters) {
  const double step = static_cast<double>(parameters.step);
  const double bias_correction1 = 1 - std::pow(parameters.beta1, step);
  const double bias_correction2 = 1 - std::pow(parameters.beta2, step);
  const bool is_python = parameters.flavour == AdamWFlavour::kLerp;
  return {
      .decay = Float(1 - parameters.lr * parameters.weight_decay),
      .beta1 = Float(parameters.beta1),
      .exp_avg_weight = Float(1 - parameters.beta1),
      .beta2 = Float(parameters.beta2),
      .exp_avg_sq_weight = Float(1 - parameters.beta2),
      .bias_correction2_sqrt =
          Float(is_python ? std::pow(bias_correction2, 0.5) : std::sqrt(bias_correction2)),
      .eps = Float(parameters.eps),
      .step_size = Float(parameters.lr / bias_correction1),
      .is_lerp = parameters.flavour != AdamWFlavour::kMulAdd,
      .has_tail = parameters.flavour == AdamWFlavour::kFused,
      .maximize = parameters.maximize,
  };
}

SgdCoefficients CoefficientsOf(const SgdParameters& parameters) {
  return {
      .lr = Float(parameters.lr),
      .momentum = Float(parameters.momentum),
      .weight_decay = Float(parameters.weight_decay),
      .gradient_weight = Float(1 - parameters.dampening),
      .has_momentum = parameters.momentum != 0,
      .has_weight_decay = parameters.weight_decay != 0,
      .nesterov = parameters.nesterov,
      .maximize = parameters.maximize,
      .first = parameters.first,
  };
}

void UpdateAdamW(Isa isa, const AdamWParameters& parameters, const Run& run) {
  CheckRun(run);
  OFFLOAD_CHECK(run.count == 0 || (run.exp_avg != nullptr && run.exp_avg_sq != nullptr))
      << "AdamW needs both moments";
  ImplementationOf(isa).adamw(CoefficientsOf(parameters), run);
}

void UpdateSgd(Isa isa, const SgdParameters& parameters, const Run& run) {
  CheckRun(run);
  OFFLOAD_CHECK(run.count == 0 || parameters.momentum == 0 || run.exp_avg != nullptr)
      << "SGD with momentum needs its buffer";
  ImplementationOf(isa).sgd(CoefficientsOf(parameters), run);
}

bool AllFinite(Isa isa, Dtype dtype, const void* values, size_t count) {
  return ImplementationOf(isa).all_finite(dtype, values, count);
}

void UpdateAdamW(const AdamWParameters& parameters, const Run& run) {
  UpdateAdamW(BestIsa(), parameters, run);
}

void UpdateSgd(const SgdParameters& parameters, const Run& run) {
  UpdateSgd(BestIsa(), parameters, run);
}

bool AllFinite(Dtype dtype, const void* values, size_t count) {
  return AllFinite(BestIsa(), dtype, values, count);
}

}  // namespace offload::kernels

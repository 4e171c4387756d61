#include "kernels/rules/adamw.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kFlavour, kAmsgrad, kMaximize, kTensorLr };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kNotNegative},
    {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.999, Range::kFraction},
    {"eps", 1e-8, Range::kNotNegative},
    {"weight_decay", 1e-2, Range::kNotNegative},
    {"flavour", 0, Range::kFlavour},
    {"amsgrad", 0, Range::kFlag},
    {"maximize", 0, Range::kFlag},
    {"tensor_lr", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {
    {"exp_avg"}, {"exp_avg_sq"}, {"max_exp_avg_sq", nullptr, kAmsgrad}};

float NextExpAvg(const AdamConstants& c, float exp_avg, float gradient) {
  if (!c.is_lerp) return std::fma(c.exp_avg_weight, gradient, exp_avg * c.beta1);
  return Lerp(exp_avg, gradient, c.exp_avg_weight);
}

float NextExpAvgSq(const AdamConstants& c, float exp_avg_sq, float gradient, bool in_tail) {
  const float weighted = c.exp_avg_sq_weight * gradient;
  if (in_tail) return std::fma(exp_avg_sq, c.beta2, weighted * gradient);
  return std::fma(weighted, gradient, exp_avg_sq * c.beta2);
}

void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  Keep(AdamConstantsOf(values, step), coefficients);
}

}  // namespace

constinit const Optimizer AdamW::kRow = {.name = "adamw",
                                         .parameters = kParameters,
                                         .planes = kPlanes,
                                         .conflict = nullptr,
                                         .prepare = Prepare,
                                         .takes_library_roots = AdamTakesLibraryRoots};

bool AdamTakesLibraryRoots(const double* values) {
  return values[kFlavour] != static_cast<double>(AdamWFlavour::kFused);
}

AdamConstants AdamConstantsOf(const double* values, int64_t step) {
  const auto flavour = static_cast<AdamWFlavour>(static_cast<int>(values[kFlavour]));
  const double count = static_cast<double>(step);
  const double bias_correction1 = 1 - std::pow(values[kBeta1], count);
  const double bias_correction2 = 1 - std::pow(values[kBeta2], count);
  const bool is_python = flavour == AdamWFlavour::kLerp;
  const bool is_tensor = values[kTensorLr] != 0;
  const float lr = Float(values[kLr]);
  return {
      .decay = is_tensor ? 1 - lr * Float(values[kWeightDecay])
                         : Float(1 - values[kLr] * values[kWeightDecay]),
      .beta1 = Float(values[kBeta1]),
      .exp_avg_weight = Float(1 - values[kBeta1]),
      .beta2 = Float(values[kBeta2]),
      .exp_avg_sq_weight = Float(1 - values[kBeta2]),
      .bias_correction2_sqrt =
          Float(is_python ? std::pow(bias_correction2, 0.5) : std::sqrt(bias_correction2)),
      .eps = Float(values[kEps]),
      .step_size = is_tensor ? lr / Float(bias_correction1) : Float(values[kLr] / bias_correction1),
      .is_lerp = flavour != AdamWFlavour::kMulAdd,
      .has_tail = flavour == AdamWFlavour::kFused,
      .amsgrad = values[kAmsgrad] != 0,
      .maximize = values[kMaximize] != 0,
      .takes_library_roots = AdamTakesLibraryRoots(values),
  };
}

float NextAdamMaster(const AdamConstants& c, const Run& run, size_t i, bool in_tail, float gradient,
                     float start) {
  const float exp_avg = NextExpAvg(c, run.state[0][i], gradient);
  const float exp_avg_sq = NextExpAvgSq(c, run.state[1][i], gradient, in_tail);
  run.state[0][i] = exp_avg;
  run.state[1][i] = exp_avg_sq;
  float square = exp_avg_sq;
  if (c.amsgrad) run.state[2][i] = square = Maximum(run.state[2][i], exp_avg_sq);
  const float root = TakeRoot(square, c.takes_library_roots ? run.roots : nullptr);
  return start - (c.step_size * exp_avg) / (root / c.bias_correction2_sqrt + c.eps);
}

size_t AdamW::TailBegin(const Constants& c, const Run& run) {
  return c.has_tail ? CountBeforeTail(run) : run.count;
}

void AdamW::Reference(const Constants& c, const Run& run) {
  const size_t tail_begin = TailBegin(c, run);
  for (size_t i = 0; i < run.count; ++i) {
    const float gradient = LoadGradient(run, i, c.maximize);
    const float decayed = LoadMaster(run, i) * c.decay;
    StoreMaster(run, i, NextAdamMaster(c, run, i, i >= tail_begin, gradient, decayed));
  }
}

}  // namespace offload::kernels::rules

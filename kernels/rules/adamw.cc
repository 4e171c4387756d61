#include "kernels/rules/adamw.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kFlavour, kAmsgrad, kMaximize, kTensorLr };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kRate},           {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.999, Range::kFraction},   {"eps", 1e-8, Range::kRate},
    {"weight_decay", 1e-2, Range::kRate}, {"flavour", 0, Range::kFlavour},
    {"amsgrad", 0, Range::kFlag},         {"maximize", 0, Range::kFlag},
    {"tensor_lr", 0, Range::kFlag},       {"unscale", 1, Range::kNotNegative},  // update.cc
};
constexpr StatePlane kPlanes[] = {
    {"exp_avg"}, {"exp_avg_sq"}, {"max_exp_avg_sq", nullptr, kAmsgrad}};

template <class T>
T NextExpAvg(const AdamConstants<T>& c, T exp_avg, T gradient) {
  if (!c.is_lerp) return std::fma(c.exp_avg_weight, gradient, exp_avg * c.beta1);
  return Lerp(exp_avg, gradient, c.exp_avg_weight);
}

template <class T>
T NextExpAvgSq(const AdamConstants<T>& c, T exp_avg_sq, T gradient, bool in_tail) {
  const T weighted = c.exp_avg_sq_weight * gradient;
  if (in_tail) return std::fma(exp_avg_sq, c.beta2, weighted * gradient);
  return std::fma(weighted, gradient, exp_avg_sq * c.beta2);
}

template <class T>
void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  Keep(AdamConstantsOf<T>(values, step), coefficients);
}

}  // namespace

constinit const Optimizer AdamW::kRow = {.name = "adamw",
                                         .parameters = kParameters,
                                         .planes = kPlanes,
                                         .conflict = nullptr,
                                         .prepare = Prepare<float>,
                                         .prepare_double = Prepare<double>,
                                         .takes_library_roots = AdamTakesLibraryRoots};

bool AdamTakesLibraryRoots(const double* values) {
  return values[kFlavour] != static_cast<double>(AdamWFlavour::kFused);
}

template <class T>
AdamConstants<T> AdamConstantsOf(const double* values, int64_t step) {
  const auto flavour = static_cast<AdamWFlavour>(static_cast<int>(values[kFlavour]));
  const double count = static_cast<double>(step);
  const double bias_correction1 = 1 - std::pow(values[kBeta1], count);
  const double bias_correction2 = 1 - std::pow(values[kBeta2], count);
  const bool is_python = flavour == AdamWFlavour::kLerp;
  const bool is_tensor = values[kTensorLr] != 0;
  const float lr = Float(values[kLr]);
  // Its kernel is compiled with FMA, which joins the product and the difference.
  const double decay = flavour == AdamWFlavour::kFused
                           ? std::fma(-values[kLr], values[kWeightDecay], 1.0)
                           : 1 - values[kLr] * values[kWeightDecay];
  return {
      .decay = is_tensor ? T{1 - lr * Float(values[kWeightDecay])} : static_cast<T>(decay),
      .beta1 = static_cast<T>(values[kBeta1]),
      .exp_avg_weight = static_cast<T>(1 - values[kBeta1]),
      .beta2 = static_cast<T>(values[kBeta2]),
      .exp_avg_sq_weight = static_cast<T>(1 - values[kBeta2]),
      .bias_correction2_sqrt =
          static_cast<T>(is_python ? std::pow(bias_correction2, 0.5) : std::sqrt(bias_correction2)),
      .eps = static_cast<T>(values[kEps]),
      .step_size = is_tensor ? T{lr / Float(bias_correction1)}
                             : static_cast<T>(values[kLr] / bias_correction1),
      .is_lerp = flavour != AdamWFlavour::kMulAdd,
      .has_tail = flavour == AdamWFlavour::kFused,
      .amsgrad = values[kAmsgrad] != 0,
      .maximize = values[kMaximize] != 0,
      .takes_library_roots = AdamTakesLibraryRoots(values),
  };
}

template <class T>
T NextAdamMaster(const AdamConstants<T>& c, const Run& run, size_t i, bool in_tail, T gradient,
                 T start) {
  T& exp_avg = StateOf<T>(run, 0)[i];
  T& exp_avg_sq = StateOf<T>(run, 1)[i];
  exp_avg = NextExpAvg(c, exp_avg, gradient);
  exp_avg_sq = NextExpAvgSq(c, exp_avg_sq, gradient, in_tail);
  T square = exp_avg_sq;
  if (c.amsgrad) {
    T& maximum = StateOf<T>(run, 2)[i];
    maximum = square = Maximum(maximum, exp_avg_sq);
  }
  const T root = TakeRoot(square, c.takes_library_roots ? run.roots : nullptr);
  return start - (c.step_size * exp_avg) / (root / c.bias_correction2_sqrt + c.eps);
}

template <class T>
size_t AdamW::TailBegin(const AdamConstants<T>& c, const Run& run) {
  return c.has_tail ? CountBeforeTail(run) : run.count;
}

template <class T>
void AdamW::Reference(const AdamConstants<T>& c, const Run& run) {
  const size_t tail_begin = TailBegin(c, run);
  for (size_t i = 0; i < run.count; ++i) {
    const T gradient = LoadGradient<T>(run, i, c.maximize);
    const T decayed = LoadMaster<T>(run, i) * c.decay;
    StoreMaster<T>(run, i, NextAdamMaster(c, run, i, i >= tail_begin, gradient, decayed));
  }
}

template AdamConstants<float> AdamConstantsOf(const double*, int64_t);
template AdamConstants<double> AdamConstantsOf(const double*, int64_t);
template float NextAdamMaster(const AdamConstants<float>&, const Run&, size_t, bool, float, float);
template double NextAdamMaster(const AdamConstants<double>&, const Run&, size_t, bool, double,
                               double);
template size_t AdamW::TailBegin(const AdamConstants<float>&, const Run&);
template size_t AdamW::TailBegin(const AdamConstants<double>&, const Run&);
template void AdamW::Reference(const AdamConstants<float>&, const Run&);
template void AdamW::Reference(const AdamConstants<double>&, const Run&);

}  // namespace offload::kernels::rules

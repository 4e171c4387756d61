#include "kernels/rules/lamb.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMaximize };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kRate},           {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.999, Range::kFraction},   {"eps", 1e-6, Range::kRate},
    {"weight_decay", 0.01, Range::kRate}, {"maximize", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {{"exp_avg"}, {"exp_avg_sq"}};

template <class T>
void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const double count = static_cast<double>(step);
  const LambConstants<T> constants = {
      .beta1 = static_cast<T>(values[kBeta1]),
      .exp_avg_weight = static_cast<T>(1 - values[kBeta1]),
      .beta2 = static_cast<T>(values[kBeta2]),
      .exp_avg_sq_weight = static_cast<T>(1 - values[kBeta2]),
      .exp_avg_scale = static_cast<T>(1 / (1 - std::pow(values[kBeta1], count))),
      .bias_correction2_sqrt = static_cast<T>(std::sqrt(1 - std::pow(values[kBeta2], count))),
      .eps = static_cast<T>(values[kEps]),
      .weight_decay = static_cast<T>(values[kWeightDecay]),
      .lr = values[kLr],
      .has_weight_decay = values[kWeightDecay] != 0,
      .maximize = values[kMaximize] != 0,
  };
  Keep(constants, coefficients);
}

template <class T>
struct Direction {
  T exp_avg, exp_avg_sq, update;
};

template <class T>
Direction<T> DirectionOf(const LambConstants<T>& c, const Run& run, size_t i, T master) {
  const T gradient = LoadGradient<T>(run, i, c.maximize);
  const T exp_avg = std::fma(c.exp_avg_weight, gradient, StateOf<T>(run, 0)[i] * c.beta1);
  const T exp_avg_sq =
      std::fma(c.exp_avg_sq_weight * gradient, gradient, StateOf<T>(run, 1)[i] * c.beta2);
  const T denominator = std::sqrt(exp_avg_sq) / c.bias_correction2_sqrt + c.eps;
  T update = (exp_avg * c.exp_avg_scale) / denominator;
  if (c.has_weight_decay) update = std::fma(c.weight_decay, master, update);
  return {exp_avg, exp_avg_sq, update};
}

}  // namespace

constinit const Optimizer Lamb::kRow = {.name = "lamb",
                                        .parameters = kParameters,
                                        .planes = kPlanes,
                                        .conflict = nullptr,
                                        .prepare = Prepare<float>,
                                        .prepare_double = Prepare<double>};

template <class T>
void Lamb::Reference(const LambConstants<T>& c, const Run& run) {
  const T negative_lr = -static_cast<T>(c.lr * run.trust_ratio);
  for (size_t i = 0; i < run.count; ++i) {
    const T master = LoadMaster<T>(run, i);
    const Direction<T> direction = DirectionOf(c, run, i, master);
    StateOf<T>(run, 0)[i] = direction.exp_avg;
    StateOf<T>(run, 1)[i] = direction.exp_avg_sq;
    StoreMaster<T>(run, i, std::fma(negative_lr, direction.update, master));
  }
}

template <class T>
void Lamb::ReferenceNorms(const LambConstants<T>& c, const Run& run, Norms* norms) {
  for (size_t i = 0; i < run.count; ++i) {
    const T master = LoadMaster<T>(run, i);
    AddSquares(run.begin + i, master, DirectionOf(c, run, i, master).update, norms);
  }
}

template void Lamb::Reference(const LambConstants<float>&, const Run&);
template void Lamb::Reference(const LambConstants<double>&, const Run&);
template void Lamb::ReferenceNorms(const LambConstants<float>&, const Run&, Norms*);
template void Lamb::ReferenceNorms(const LambConstants<double>&, const Run&, Norms*);

}  // namespace offload::kernels::rules

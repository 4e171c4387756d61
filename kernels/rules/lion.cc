#include "kernels/rules/lion.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kBeta1, kBeta2, kWeightDecay, kMaximize };

constexpr Parameter kParameters[] = {
    {"lr", 1e-4, Range::kRate},        {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.99, Range::kFraction}, {"weight_decay", 0, Range::kRate},
    {"maximize", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {{"exp_avg"}};

template <class T>
void Prepare(const double* values, int64_t, Coefficients* coefficients) {
  const LionConstants<T> constants = {
      .lr = static_cast<T>(values[kLr]),
      .decay = static_cast<T>(1 - values[kLr] * values[kWeightDecay]),
      .beta1 = static_cast<T>(values[kBeta1]),
      .update_weight = static_cast<T>(1 - values[kBeta1]),
      .beta2 = static_cast<T>(values[kBeta2]),
      .exp_avg_weight = static_cast<T>(1 - values[kBeta2]),
      .maximize = values[kMaximize] != 0,
  };
  Keep(constants, coefficients);
}

template <class T>
T Sign(T value) {
  return static_cast<T>((value > 0) - (value < 0));
}

}  // namespace

constinit const Optimizer Lion::kRow = {.name = "lion",
                                        .parameters = kParameters,
                                        .planes = kPlanes,
                                        .conflict = nullptr,
                                        .prepare = Prepare<float>,
                                        .prepare_double = Prepare<double>};

template <class T>
void Lion::Reference(const LionConstants<T>& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const T gradient = LoadGradient<T>(run, i, c.maximize);
    const T decayed = LoadMaster<T>(run, i) * c.decay;
    const T exp_avg = StateOf<T>(run, 0)[i];
    const T update = exp_avg * c.beta1 + gradient * c.update_weight;
    StateOf<T>(run, 0)[i] = std::fma(c.exp_avg_weight, gradient, exp_avg * c.beta2);
    StoreMaster<T>(run, i, std::fma(-c.lr, Sign(update), decayed));
  }
}

template void Lion::Reference(const LionConstants<float>&, const Run&);
template void Lion::Reference(const LionConstants<double>&, const Run&);

}  // namespace offload::kernels::rules

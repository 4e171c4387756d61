#include "kernels/rules/lion.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kBeta1, kBeta2, kWeightDecay, kMaximize };

constexpr Parameter kParameters[] = {
    {"lr", 1e-4, Range::kNotNegative}, {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.99, Range::kFraction}, {"weight_decay", 0, Range::kNotNegative},
    {"maximize", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {{"exp_avg"}};

void Prepare(const double* values, int64_t, Coefficients* coefficients) {
  const LionConstants constants = {
      .lr = Float(values[kLr]),
      .decay = Float(1 - values[kLr] * values[kWeightDecay]),
      .beta1 = Float(values[kBeta1]),
      .update_weight = Float(1 - values[kBeta1]),
      .beta2 = Float(values[kBeta2]),
      .exp_avg_weight = Float(1 - values[kBeta2]),
      .maximize = values[kMaximize] != 0,
  };
  Keep(constants, coefficients);
}

float Sign(float value) { return static_cast<float>((value > 0) - (value < 0)); }

}  // namespace

constinit const Optimizer Lion::kRow = {.name = "lion",
                                        .parameters = kParameters,
                                        .planes = kPlanes,
                                        .conflict = nullptr,
                                        .prepare = Prepare};

void Lion::Reference(const Constants& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const float gradient = LoadGradient(run, i, c.maximize);
    const float decayed = LoadMaster(run, i) * c.decay;
    const float exp_avg = run.state[0][i];
    const float update = exp_avg * c.beta1 + gradient * c.update_weight;
    run.state[0][i] = std::fma(c.exp_avg_weight, gradient, exp_avg * c.beta2);
    StoreMaster(run, i, std::fma(-c.lr, Sign(update), decayed));
  }
}

}  // namespace offload::kernels::rules

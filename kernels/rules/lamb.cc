#include "kernels/rules/lamb.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMaximize };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kNotNegative},           {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.999, Range::kFraction},          {"eps", 1e-6, Range::kNotNegative},
    {"weight_decay", 0.01, Range::kNotNegative}, {"maximize", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {{"exp_avg"}, {"exp_avg_sq"}};

void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const double count = static_cast<double>(step);
  const LambConstants constants = {
      .beta1 = Float(values[kBeta1]),
      .exp_avg_weight = Float(1 - values[kBeta1]),
      .beta2 = Float(values[kBeta2]),
      .exp_avg_sq_weight = Float(1 - values[kBeta2]),
      .exp_avg_scale = Float(1 / (1 - std::pow(values[kBeta1], count))),
      .bias_correction2_sqrt = Float(std::sqrt(1 - std::pow(values[kBeta2], count))),
      .eps = Float(values[kEps]),
      .weight_decay = Float(values[kWeightDecay]),
      .lr = values[kLr],
      .has_weight_decay = values[kWeightDecay] != 0,
      .maximize = values[kMaximize] != 0,
  };
  Keep(constants, coefficients);
}

struct Direction {
  float exp_avg, exp_avg_sq, update;
};

Direction DirectionOf(const LambConstants& c, const Run& run, size_t i, float master) {
  const float gradient = LoadGradient(run, i, c.maximize);
  const float exp_avg = std::fma(c.exp_avg_weight, gradient, run.state[0][i] * c.beta1);
  const float exp_avg_sq =
      std::fma(c.exp_avg_sq_weight * gradient, gradient, run.state[1][i] * c.beta2);
  const float denominator = std::sqrt(exp_avg_sq) / c.bias_correction2_sqrt + c.eps;
  float update = (exp_avg * c.exp_avg_scale) / denominator;
  if (c.has_weight_decay) update = std::fma(c.weight_decay, master, update);
  return {exp_avg, exp_avg_sq, update};
}

}  // namespace

constinit const Optimizer Lamb::kRow = {.name = "lamb",
                                        .parameters = kParameters,
                                        .planes = kPlanes,
                                        .conflict = nullptr,
                                        .prepare = Prepare};

void Lamb::Reference(const Constants& c, const Run& run) {
  const float negative_lr = -Float(c.lr * run.trust_ratio);
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    const Direction direction = DirectionOf(c, run, i, master);
    run.state[0][i] = direction.exp_avg;
    run.state[1][i] = direction.exp_avg_sq;
    StoreMaster(run, i, std::fma(negative_lr, direction.update, master));
  }
}

void Lamb::ReferenceNorms(const Constants& c, const Run& run, Norms* norms) {
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    AddSquares(run.begin + i, master, DirectionOf(c, run, i, master).update, norms);
  }
}

}  // namespace offload::kernels::rules

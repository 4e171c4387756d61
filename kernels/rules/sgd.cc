#include "kernels/rules/sgd.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kMomentum, kDampening, kWeightDecay, kNesterov, kMaximize };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kNotNegative}, {"momentum", 0, Range::kNotNegative},
    {"dampening", 0, Range::kFinite},  {"weight_decay", 0, Range::kNotNegative},
    {"nesterov", 0, Range::kFlag},     {"maximize", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {{"momentum_buffer", "exp_avg", kMomentum}};

const char* Conflict(const double* values) {
  if (values[kNesterov] == 0 || (values[kMomentum] > 0 && values[kDampening] == 0)) return nullptr;
  return "nesterov needs momentum and no dampening";
}

void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const SgdConstants constants = {
      .lr = Float(values[kLr]),
      .momentum = Float(values[kMomentum]),
      .weight_decay = Float(values[kWeightDecay]),
      .gradient_weight = Float(1 - values[kDampening]),
      .has_momentum = values[kMomentum] != 0,
      .has_weight_decay = values[kWeightDecay] != 0,
      .nesterov = values[kNesterov] != 0,
      .maximize = values[kMaximize] != 0,
      .first = step == 1,
  };
  Keep(constants, coefficients);
}

}  // namespace

constinit const Optimizer Sgd::kRow = {.name = "sgd",
                                       .parameters = kParameters,
                                       .planes = kPlanes,
                                       .conflict = Conflict,
                                       .prepare = Prepare};

void Sgd::Reference(const Constants& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    float direction = LoadGradient(run, i, c.maximize);
    if (c.has_weight_decay) direction = std::fma(c.weight_decay, master, direction);
    if (c.has_momentum) {
      const float buffer =
          c.first ? direction
                  : std::fma(c.gradient_weight, direction, run.state[0][i] * c.momentum);
      run.state[0][i] = buffer;
      direction = c.nesterov ? std::fma(c.momentum, buffer, direction) : buffer;
    }
    StoreMaster(run, i, std::fma(-c.lr, direction, master));
  }
}

}  // namespace offload::kernels::rules

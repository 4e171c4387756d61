#include "kernels/rules/adagrad.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kLrDecay, kWeightDecay, kInitialSum, kEps, kMaximize, kFused, kTensorLr };

constexpr Parameter kParameters[] = {
    {"lr", 1e-2, Range::kNotNegative},
    {"lr_decay", 0, Range::kNotNegative},
    {"weight_decay", 0, Range::kNotNegative},
    {"initial_accumulator_value", 0, Range::kNotNegative},
    {"eps", 1e-10, Range::kNotNegative},
    {"maximize", 0, Range::kFlag},
    {"fused", 1, Range::kFlag},
    {"tensor_lr", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {{"sum"}};

void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const double decay = 1 + static_cast<double>(step - 1) * values[kLrDecay];
  const AdagradConstants constants = {
      .lr = values[kTensorLr] != 0 ? Float(values[kLr]) / Float(decay) : Float(values[kLr] / decay),
      .weight_decay = Float(values[kWeightDecay]),
      .initial_sum = Float(values[kInitialSum]),
      .eps = Float(values[kEps]),
      .has_weight_decay = values[kWeightDecay] != 0,
      .maximize = values[kMaximize] != 0,
      .first = step == 1,
      .fused = values[kFused] != 0,
  };
  Keep(constants, coefficients);
}

}  // namespace

constinit const Optimizer Adagrad::kRow = {
    .name = "adagrad",
    .parameters = kParameters,
    .planes = kPlanes,
    .conflict = nullptr,
    .prepare = Prepare,
    .takes_library_roots = [](const double* values) { return values[kFused] == 0; }};

void Adagrad::Reference(const Constants& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    float gradient = LoadGradient(run, i, c.maximize);
    if (c.has_weight_decay) gradient = std::fma(c.weight_decay, master, gradient);
    const float sum = std::fma(gradient, gradient, c.first ? c.initial_sum : run.state[0][i]);
    run.state[0][i] = sum;
    StoreMaster(
        run, i,
        master - (c.lr * gradient) / (TakeRoot(sum, c.fused ? nullptr : run.roots) + c.eps));
  }
}

}  // namespace offload::kernels::rules

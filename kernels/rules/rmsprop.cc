#include "kernels/rules/rmsprop.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kAlpha, kEps, kWeightDecay, kMomentum, kCentered, kMaximize, kLerp };

constexpr Parameter kParameters[] = {
    {"lr", 1e-2, Range::kNotNegative},    {"alpha", 0.99, Range::kNotNegative},
    {"eps", 1e-8, Range::kNotNegative},   {"weight_decay", 0, Range::kNotNegative},
    {"momentum", 0, Range::kNotNegative}, {"centered", 0, Range::kFlag},
    {"maximize", 0, Range::kFlag},        {"lerp", 1, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {
    {"square_avg"}, {"momentum_buffer", nullptr, kMomentum}, {"grad_avg", nullptr, kCentered}};

void Prepare(const double* values, int64_t, Coefficients* coefficients) {
  const RmsPropConstants constants = {
      .lr = Float(values[kLr]),
      .alpha = Float(values[kAlpha]),
      .weight = Float(1 - values[kAlpha]),
      .eps = Float(values[kEps]),
      .weight_decay = Float(values[kWeightDecay]),
      .momentum = Float(values[kMomentum]),
      .has_weight_decay = values[kWeightDecay] != 0,
      .has_momentum = values[kMomentum] != 0,
      .centered = values[kCentered] != 0,
      .lerp = values[kLerp] != 0,
      .maximize = values[kMaximize] != 0,
  };
  Keep(constants, coefficients);
}

}  // namespace

constinit const Optimizer RmsProp::kRow = {
    .name = "rmsprop",
    .parameters = kParameters,
    .planes = kPlanes,
    .conflict = nullptr,
    .prepare = Prepare,
    .takes_library_roots = [](const double*) { return true; }};

void RmsProp::Reference(const Constants& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    float gradient = LoadGradient(run, i, c.maximize);
    if (c.has_weight_decay) gradient = std::fma(c.weight_decay, master, gradient);
    const float square_avg = std::fma(c.weight * gradient, gradient, run.state[0][i] * c.alpha);
    run.state[0][i] = square_avg;
    float variance = square_avg;
    if (c.centered) {
      const float start = run.state[2][i];
      const float grad_avg =
          c.lerp ? Lerp(start, gradient, c.weight) : std::fma(c.weight, gradient, start * c.alpha);
      run.state[2][i] = grad_avg;
      variance = std::fma(-grad_avg, grad_avg, square_avg);
    }
    const float average = TakeRoot(variance, run.roots) + c.eps;
    if (!c.has_momentum) {
      StoreMaster(run, i, master - (c.lr * gradient) / average);
      continue;
    }
    const float buffer = run.state[1][i] * c.momentum + gradient / average;
    run.state[1][i] = buffer;
    StoreMaster(run, i, std::fma(-c.lr, buffer, master));
  }
}

}  // namespace offload::kernels::rules

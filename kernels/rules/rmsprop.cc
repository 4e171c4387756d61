#include "kernels/rules/rmsprop.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kAlpha, kEps, kWeightDecay, kMomentum, kCentered, kMaximize, kLerp };

constexpr Parameter kParameters[] = {
    {"lr", 1e-2, Range::kRate},          {"alpha", 0.99, Range::kRate},
    {"eps", 1e-8, Range::kRate},         {"weight_decay", 0, Range::kRate},
    {"momentum", 0, Range::kRate},       {"centered", 0, Range::kFlag},
    {"maximize", 0, Range::kFlag},       {"lerp", 1, Range::kFlag},
    {"unscale", 1, Range::kNotNegative},  // update.cc
};
constexpr StatePlane kPlanes[] = {
    {"square_avg"}, {"momentum_buffer", nullptr, kMomentum}, {"grad_avg", nullptr, kCentered}};

template <class T>
void Prepare(const double* values, int64_t, Coefficients* coefficients) {
  const RmsPropConstants<T> constants = {
      .lr = static_cast<T>(values[kLr]),
      .alpha = static_cast<T>(values[kAlpha]),
      .weight = static_cast<T>(1 - values[kAlpha]),
      .eps = static_cast<T>(values[kEps]),
      .weight_decay = static_cast<T>(values[kWeightDecay]),
      .momentum = static_cast<T>(values[kMomentum]),
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
    .prepare = Prepare<float>,
    .prepare_double = Prepare<double>,
    .takes_library_roots = [](const double*) { return true; }};

template <class T>
void RmsProp::Reference(const RmsPropConstants<T>& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const T master = LoadMaster<T>(run, i);
    T gradient = LoadGradient<T>(run, i, c.maximize);
    if (c.has_weight_decay) gradient = std::fma(c.weight_decay, master, gradient);
    const T square_avg = std::fma(c.weight * gradient, gradient, StateOf<T>(run, 0)[i] * c.alpha);
    StateOf<T>(run, 0)[i] = square_avg;
    T variance = square_avg;
    if (c.centered) {
      const T start = StateOf<T>(run, 2)[i];
      const T grad_avg =
          c.lerp ? Lerp(start, gradient, c.weight) : std::fma(c.weight, gradient, start * c.alpha);
      StateOf<T>(run, 2)[i] = grad_avg;
      variance = std::fma(-grad_avg, grad_avg, square_avg);
    }
    const T average = TakeRoot(variance, run.roots) + c.eps;
    if (!c.has_momentum) {
      StoreMaster<T>(run, i, master - (c.lr * gradient) / average);
      continue;
    }
    const T buffer = StateOf<T>(run, 1)[i] * c.momentum + gradient / average;
    StateOf<T>(run, 1)[i] = buffer;
    StoreMaster<T>(run, i, std::fma(-c.lr, buffer, master));
  }
}

template void RmsProp::Reference(const RmsPropConstants<float>&, const Run&);
template void RmsProp::Reference(const RmsPropConstants<double>&, const Run&);

}  // namespace offload::kernels::rules

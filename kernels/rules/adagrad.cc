#include "kernels/rules/adagrad.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kLrDecay, kWeightDecay, kInitialSum, kEps, kMaximize, kFused, kTensorLr };

constexpr Parameter kParameters[] = {
    {"lr", 1e-2, Range::kRate},          {"lr_decay", 0, Range::kRate},
    {"weight_decay", 0, Range::kRate},   {"initial_accumulator_value", 0, Range::kNotNegative},
    {"eps", 1e-10, Range::kRate},        {"maximize", 0, Range::kFlag},
    {"fused", 1, Range::kFlag},          {"tensor_lr", 0, Range::kFlag},
    {"unscale", 1, Range::kNotNegative},  // update.cc
};
constexpr StatePlane kPlanes[] = {{"sum"}};

template <class T>
void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const auto steps = static_cast<double>(step - 1);
  // The fused kernel is compiled with FMA, which joins the product and the sum.
  const double decay =
      values[kFused] != 0 ? std::fma(steps, values[kLrDecay], 1.0) : 1 + steps * values[kLrDecay];
  const AdagradConstants<T> constants = {
      .lr = values[kTensorLr] != 0 ? T{Float(values[kLr]) / Float(decay)}
                                   : static_cast<T>(values[kLr] / decay),
      .weight_decay = static_cast<T>(values[kWeightDecay]),
      .initial_sum = static_cast<T>(values[kInitialSum]),
      .eps = static_cast<T>(values[kEps]),
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
    .prepare = Prepare<float>,
    .prepare_double = Prepare<double>,
    .takes_library_roots = [](const double* values) { return values[kFused] == 0; }};

template <class T>
void Adagrad::Reference(const AdagradConstants<T>& c, const Run& run) {
  for (size_t i = 0; i < run.count; ++i) {
    const T master = LoadMaster<T>(run, i);
    T gradient = LoadGradient<T>(run, i, c.maximize);
    if (c.has_weight_decay) gradient = std::fma(c.weight_decay, master, gradient);
    const T sum = std::fma(gradient, gradient, c.first ? c.initial_sum : StateOf<T>(run, 0)[i]);
    StateOf<T>(run, 0)[i] = sum;
    StoreMaster<T>(
        run, i,
        master - (c.lr * gradient) / (TakeRoot(sum, c.fused ? nullptr : run.roots) + c.eps));
  }
}

template void Adagrad::Reference(const AdagradConstants<float>&, const Run&);
template void Adagrad::Reference(const AdagradConstants<double>&, const Run&);

}  // namespace offload::kernels::rules

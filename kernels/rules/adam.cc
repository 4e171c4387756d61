#include "kernels/rules/adam.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

// In AdamW's order: its constants are computed from them.
enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kFlavour, kAmsgrad, kMaximize, kTensorLr };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kNotNegative},
    {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.999, Range::kFraction},
    {"eps", 1e-8, Range::kNotNegative},
    {"weight_decay", 0, Range::kNotNegative},
    {"flavour", 0, Range::kFlavour},
    {"amsgrad", 0, Range::kFlag},
    {"maximize", 0, Range::kFlag},
    {"tensor_lr", 0, Range::kFlag},
};
constexpr StatePlane kPlanes[] = {
    {"exp_avg"}, {"exp_avg_sq"}, {"max_exp_avg_sq", nullptr, kAmsgrad}};

void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const AdamL2Constants constants = {.adam = AdamConstantsOf(values, step),
                                     .weight_decay = Float(values[kWeightDecay]),
                                     .has_weight_decay = values[kWeightDecay] != 0};
  Keep(constants, coefficients);
}

}  // namespace

constinit const Optimizer Adam::kRow = {.name = "adam",
                                        .parameters = kParameters,
                                        .planes = kPlanes,
                                        .conflict = nullptr,
                                        .prepare = Prepare,
                                        .takes_library_roots = AdamTakesLibraryRoots};

size_t Adam::TailBegin(const Constants& c, const Run& run) { return AdamW::TailBegin(c.adam, run); }

void Adam::Reference(const Constants& c, const Run& run) {
  const size_t tail_begin = TailBegin(c, run);
  for (size_t i = 0; i < run.count; ++i) {
    const float master = LoadMaster(run, i);
    float gradient = LoadGradient(run, i, c.adam.maximize);
    if (c.has_weight_decay) gradient = std::fma(c.weight_decay, master, gradient);
    StoreMaster(run, i, NextAdamMaster(c.adam, run, i, i >= tail_begin, gradient, master));
  }
}

}  // namespace offload::kernels::rules

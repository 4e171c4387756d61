#include "kernels/rules/adam.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

// In AdamW's order: its constants are computed from them.
enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kFlavour, kAmsgrad, kMaximize, kTensorLr };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kRate},         {"beta1", 0.9, Range::kFraction},
    {"beta2", 0.999, Range::kFraction}, {"eps", 1e-8, Range::kRate},
    {"weight_decay", 0, Range::kRate},  {"flavour", 0, Range::kFlavour},
    {"amsgrad", 0, Range::kFlag},       {"maximize", 0, Range::kFlag},
    {"tensor_lr", 0, Range::kFlag},     {"unscale", 1, Range::kNotNegative},  // update.cc
};
constexpr StatePlane kPlanes[] = {
    {"exp_avg"}, {"exp_avg_sq"}, {"max_exp_avg_sq", nullptr, kAmsgrad}};

template <class T>
void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const AdamL2Constants<T> constants = {.adam = AdamConstantsOf<T>(values, step),
                                        .weight_decay = static_cast<T>(values[kWeightDecay]),
                                        .has_weight_decay = values[kWeightDecay] != 0};
  Keep(constants, coefficients);
}

}  // namespace

constinit const Optimizer Adam::kRow = {.name = "adam",
                                        .parameters = kParameters,
                                        .planes = kPlanes,
                                        .conflict = nullptr,
                                        .prepare = Prepare<float>,
                                        .prepare_double = Prepare<double>,
                                        .takes_library_roots = AdamTakesLibraryRoots};

template <class T>
size_t Adam::TailBegin(const AdamL2Constants<T>& c, const Run& run) {
  return AdamW::TailBegin(c.adam, run);
}

template <class T>
void Adam::Reference(const AdamL2Constants<T>& c, const Run& run) {
  const size_t tail_begin = TailBegin(c, run);
  for (size_t i = 0; i < run.count; ++i) {
    const T master = LoadMaster<T>(run, i);
    T gradient = LoadGradient<T>(run, i, c.adam.maximize);
    if (c.has_weight_decay) gradient = std::fma(c.weight_decay, master, gradient);
    StoreMaster<T>(run, i, NextAdamMaster(c.adam, run, i, i >= tail_begin, gradient, master));
  }
}

template size_t Adam::TailBegin(const AdamL2Constants<float>&, const Run&);
template size_t Adam::TailBegin(const AdamL2Constants<double>&, const Run&);
template void Adam::Reference(const AdamL2Constants<float>&, const Run&);
template void Adam::Reference(const AdamL2Constants<double>&, const Run&);

}  // namespace offload::kernels::rules

#include "kernels/rules/sgd.h"

#include "kernels/rules/scalar_run.h"

namespace offload::kernels::rules {
namespace {

enum { kLr, kMomentum, kDampening, kWeightDecay, kNesterov, kMaximize, kFused };

constexpr Parameter kParameters[] = {
    {"lr", 1e-3, Range::kRate},       {"momentum", 0, Range::kRate},
    {"dampening", 0, Range::kFinite}, {"weight_decay", 0, Range::kRate},
    {"nesterov", 0, Range::kFlag},    {"maximize", 0, Range::kFlag},
    {"fused", 0, Range::kFlag},       {"unscale", 1, Range::kNotNegative},  // update.cc
};
constexpr StatePlane kPlanes[] = {{"momentum_buffer", "exp_avg", kMomentum}};

const char* Conflict(const double* values) {
  if (values[kNesterov] == 0 || (values[kMomentum] > 0 && values[kDampening] == 0)) return nullptr;
  return "nesterov needs momentum and no dampening";
}

template <class T>
void Prepare(const double* values, int64_t step, Coefficients* coefficients) {
  const SgdConstants<T> constants = {
      .lr = static_cast<T>(values[kLr]),
      .momentum = static_cast<T>(values[kMomentum]),
      .weight_decay = static_cast<T>(values[kWeightDecay]),
      .gradient_weight = static_cast<T>(1 - values[kDampening]),
      .has_momentum = values[kMomentum] != 0,
      .has_weight_decay = values[kWeightDecay] != 0,
      .nesterov = values[kNesterov] != 0,
      .maximize = values[kMaximize] != 0,
      .first = step == 1,
      .has_tail = values[kFused] != 0,
  };
  Keep(constants, coefficients);
}

}  // namespace

constinit const Optimizer Sgd::kRow = {.name = "sgd",
                                       .parameters = kParameters,
                                       .planes = kPlanes,
                                       .conflict = Conflict,
                                       .prepare = Prepare<float>,
                                       .prepare_double = Prepare<double>};

template <class T>
size_t Sgd::TailBegin(const SgdConstants<T>& c, const Run& run) {
  return c.has_tail ? CountBeforeTail(run) : run.count;
}

template size_t Sgd::TailBegin(const SgdConstants<float>&, const Run&);
template size_t Sgd::TailBegin(const SgdConstants<double>&, const Run&);

template <class T>
static T NextBuffer(const SgdConstants<T>& c, bool in_tail, T buffer, T direction) {
  if (in_tail) return std::fma(c.momentum, buffer, c.gradient_weight * direction);
  return std::fma(c.gradient_weight, direction, buffer * c.momentum);
}

template <class T>
void Sgd::Reference(const SgdConstants<T>& c, const Run& run) {
  const size_t tail_begin = TailBegin(c, run);
  for (size_t i = 0; i < run.count; ++i) {
    const T master = LoadMaster<T>(run, i);
    T direction = LoadGradient<T>(run, i, c.maximize);
    if (c.has_weight_decay) direction = std::fma(c.weight_decay, master, direction);
    if (c.has_momentum) {
      T& buffer = StateOf<T>(run, 0)[i];
      buffer = c.first ? direction : NextBuffer(c, i >= tail_begin, buffer, direction);
      direction = c.nesterov ? std::fma(c.momentum, buffer, direction) : buffer;
    }
    StoreMaster<T>(run, i, std::fma(-c.lr, direction, master));
  }
}

template void Sgd::Reference(const SgdConstants<float>&, const Run&);
template void Sgd::Reference(const SgdConstants<double>&, const Run&);

}  // namespace offload::kernels::rules

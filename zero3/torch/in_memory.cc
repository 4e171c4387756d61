#include "zero3/torch/in_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <offload/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/error.h"
#include "proto/plane_set.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/rule_update.h"
#include "zero3/torch/sparse_update.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_state.h"
#include "zero3/torch/update_counts.h"

namespace offload::zero3 {
namespace {

using kernels::OptimizerSpec;
using torch::Tensor;

// An update of state.master and state.planes with a gradient of their type; state.step counts it
// already.
using Update = void (*)(const OptimizerSpec&, const Tensor& gradient, InMemoryState&);

bool IsOn(const OptimizerSpec& optimizer, std::string_view flag) {
  return optimizer.Get(flag) != 0;
}

// The gradient that minimizing takes.
Tensor Descent(const OptimizerSpec& optimizer, const Tensor& gradient) {
  return IsOn(optimizer, "maximize") ? gradient.neg() : gradient;
}

// Where the weights are: the kernels of a device read it there.
at::Tensor StepTensor(const InMemoryState& state) {
  return at::full({}, static_cast<double>(state.step), state.master.options().dtype(at::kFloat));
}

// ---- AdamW -------------------------------------------------------------------------------------

// The moments and the root of the second, by the operators of torch's Python loop (lerp) or of its
// C++ class (mul and add), in their order.
void ComposedAdam(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = state.planes;
  const double beta1 = optimizer.Get("beta1"), beta2 = optimizer.Get("beta2");
  const bool is_lerp = optimizer.Get("flavour") == static_cast<double>(AdamWFlavour::kLerp);
  if (is_lerp) {
    exp_avg.lerp_(gradient, 1 - beta1);
  } else {
    exp_avg.mul_(beta1).add_(gradient, 1 - beta1);
  }
  exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  if (IsOn(optimizer, "amsgrad")) max_exp_avg_sq.copy_(at::maximum(max_exp_avg_sq, exp_avg_sq));
  const Tensor& square = IsOn(optimizer, "amsgrad") ? max_exp_avg_sq : exp_avg_sq;
  const double step = static_cast<double>(state.step);
  const double bias_correction1 = 1 - std::pow(beta1, step);
  const double bias_correction2 = 1 - std::pow(beta2, step);
  // Python's ** is pow.
  const double correction = is_lerp ? std::pow(bias_correction2, 0.5) : std::sqrt(bias_correction2);
  const Tensor denominator = square.sqrt().div_(correction).add_(optimizer.Get("eps"));
  state.master.addcdiv_(exp_avg, denominator, -(optimizer.Get("lr") / bias_correction1));
}

std::vector<Tensor> MaximumOf(const OptimizerSpec& optimizer, const InMemoryState& state) {
  return IsOn(optimizer, "amsgrad") ? std::vector{state.planes[2]} : std::vector<Tensor>();
}

void UpdateAdamW(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  const double lr = optimizer.Get("lr"), weight_decay = optimizer.Get("weight_decay");
  if (optimizer.Get("flavour") == static_cast<double>(AdamWFlavour::kFused)) {
    at::_fused_adamw_({state.master}, {gradient}, {state.planes[0]}, {state.planes[1]},
                      MaximumOf(optimizer, state), {StepTensor(state)}, lr, optimizer.Get("beta1"),
                      optimizer.Get("beta2"), weight_decay, optimizer.Get("eps"),
                      IsOn(optimizer, "amsgrad"), IsOn(optimizer, "maximize"));
    return;
  }
  if (weight_decay != 0) state.master.mul_(1 - lr * weight_decay);
  ComposedAdam(optimizer, Descent(optimizer, gradient), state);
}

// ---- SGD ---------------------------------------------------------------------------------------

void UpdateSgd(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  Tensor direction = Descent(optimizer, gradient);
  const double weight_decay = optimizer.Get("weight_decay"), momentum = optimizer.Get("momentum");
  if (weight_decay != 0) direction = direction.add(state.master, weight_decay);
  if (momentum != 0) {
    Tensor& buffer = state.planes[0];
    if (state.step == 1) {
      buffer.copy_(direction);
    } else {
      buffer.mul_(momentum).add_(direction, 1 - optimizer.Get("dampening"));
    }
    direction = IsOn(optimizer, "nesterov") ? direction.add(buffer, momentum) : buffer;
  }
  state.master.add_(direction, -optimizer.Get("lr"));
}

// ---- Adam ---------------------------------------------------------------------------------------

void UpdateAdam(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  const double weight_decay = optimizer.Get("weight_decay");
  if (optimizer.Get("flavour") == static_cast<double>(AdamWFlavour::kFused)) {
    at::_fused_adam_({state.master}, {gradient}, {state.planes[0]}, {state.planes[1]},
                     MaximumOf(optimizer, state), {StepTensor(state)}, optimizer.Get("lr"),
                     optimizer.Get("beta1"), optimizer.Get("beta2"), weight_decay,
                     optimizer.Get("eps"), IsOn(optimizer, "amsgrad"), IsOn(optimizer, "maximize"));
    return;
  }
  Tensor direction = Descent(optimizer, gradient);
  if (weight_decay != 0) direction = direction.add(state.master, weight_decay);
  ComposedAdam(optimizer, direction, state);
}

// ---- Adagrad ------------------------------------------------------------------------------------

void UpdateAdagrad(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  Tensor& sum = state.planes[0];
  if (state.step == 1) sum.fill_(optimizer.Get("initial_accumulator_value"));
  if (!IsOn(optimizer, "fused")) {
    Tensor direction = Descent(optimizer, gradient);
    const double weight_decay = optimizer.Get("weight_decay");
    if (weight_decay != 0) direction = direction.add(state.master, weight_decay);
    const double lr =
        optimizer.Get("lr") / (1 + static_cast<double>(state.step - 1) * optimizer.Get("lr_decay"));
    sum.addcmul_(direction, direction, 1);
    state.master.addcdiv_(direction, sum.sqrt().add_(optimizer.Get("eps")), -lr);
    return;
  }
  at::_fused_adagrad_({state.master}, {gradient}, {state.planes[0]}, {StepTensor(state)},
                      optimizer.Get("lr"), optimizer.Get("lr_decay"), optimizer.Get("weight_decay"),
                      optimizer.Get("eps"), IsOn(optimizer, "maximize"));
}

// ---- RMSprop ------------------------------------------------------------------------------------

// torch.optim.RMSprop's loop over parameters (lerp), or the C++ class's.
void UpdateRmsProp(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  auto& [square_avg, momentum_buffer, grad_avg] = state.planes;
  const double lr = optimizer.Get("lr"), alpha = optimizer.Get("alpha");
  const double weight_decay = optimizer.Get("weight_decay"), momentum = optimizer.Get("momentum");
  Tensor direction = Descent(optimizer, gradient);
  if (weight_decay != 0) direction = direction.add(state.master, weight_decay);
  square_avg.mul_(alpha).addcmul_(direction, direction, 1 - alpha);
  Tensor average;
  if (IsOn(optimizer, "centered")) {
    if (IsOn(optimizer, "lerp")) {
      grad_avg.lerp_(direction, 1 - alpha);
    } else {
      grad_avg.mul_(alpha).add_(direction, 1 - alpha);
    }
    average = square_avg.addcmul(grad_avg, grad_avg, -1).sqrt_();
  } else {
    average = square_avg.sqrt();
  }
  average.add_(optimizer.Get("eps"));
  if (momentum == 0) {
    state.master.addcdiv_(direction, average, -lr);
    return;
  }
  momentum_buffer.mul_(momentum).addcdiv_(direction, average);
  state.master.add_(momentum_buffer, -lr);
}

// ---- The table ---------------------------------------------------------------------------------

// Of optimizers that torch has: its operators. The others follow their rule.
constexpr std::pair<std::string_view, Update> kUpdates[] = {
    {"adamw", UpdateAdamW},     {"sgd", UpdateSgd},         {"adam", UpdateAdam},
    {"adagrad", UpdateAdagrad}, {"rmsprop", UpdateRmsProp},
};

void UpdateInMemory(const OptimizerSpec& optimizer, const Tensor& gradient, InMemoryState& state) {
  for (const auto& [name, update] : kUpdates) {
    if (name == optimizer.name()) return update(optimizer, gradient, state);
  }
  UpdateByRule(optimizer, state.step, gradient, state.master, state.planes);
}

// Offloaded gradients are of their parameter's type, and what is refused there is refused here.
void CheckGradientFits(const Tensor& parameter) {
  const Tensor& gradient = parameter.grad();
  if (gradient.sizes() == parameter.sizes() && gradient.scalar_type() == parameter.scalar_type())
    return;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat("the gradient of a parameter of shape [", absl::StrJoin(parameter.sizes(), ", "),
                   "] is of another shape or type"),
      "Give it the shape and type of its parameter"));
}

}  // namespace

static OptimizerSpec WithAverage(OptimizerSpec optimizer, const Averaging& averaging) {
  optimizer.SetAveraging(averaging);
  return optimizer;
}

InMemoryOptimizer::InMemoryOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                                     NamedOptimizer optimizer, const Averaging& averaging)
    : Optimizer(groups, optimizer.defaults->clone()),
      optimizer_(std::move(optimizer)),
      averaging_(averaging),
      states_(
          std::make_shared<InMemoryStates>(WithAverage(SpecOfAll(optimizer_, groups), averaging))) {
}

Tensor InMemoryOptimizer::step(LossClosure closure) {
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_gradients(true);
    loss = closure();
  }
  const at::NoGradGuard no_gradients;
  TakeBackState(*this, *this);
  CheckEachOnce(param_groups_);
  TakeLastReadMasters(*this);
  for (const auto& group : param_groups_) {  // refused before anything is changed
    const OptimizerSpec optimizer = CheckedSpec(optimizer_, group.options());
    CheckKeeps(states_->kept_, optimizer);
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      if (IsSparseUpdate(optimizer, parameter, "") && averaging_.is_on())
        ThrowStatus(AverageStays(averaging_, "a sparse gradient"));
      CheckGradientFits(parameter);
    }
  }
  // Parts of one vector share a version: all are looked at before one is written.
  ForEachWithGradient([this](Tensor& parameter) { FollowWeight(parameter); });
  for (auto& group : param_groups_) {
    const OptimizerSpec optimizer = CheckedSpec(optimizer_, group.options());
    for (Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) UpdateParameter(optimizer, parameter);
    }
  }
  if (optimizer_.counts_as_write) {
    ForEachWithGradient([](Tensor& parameter) {
      if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
    });
  }
  ForEachWithGradient([this](Tensor& parameter) {
    states_->states_[parameter.unsafeGetTensorImpl()].version =
        static_cast<int64_t>(parameter._version());
  });
  ++states_->steps_;
  ShowAgain(*this, *this, shown_);
  return loss;
}

namespace {

bool IsItsOwnMaster(const Tensor& parameter) {
  return parameter.scalar_type() == MasterType(parameter);
}

// Somebody else wrote the weight since our last update.
bool WasWritten(const Tensor& parameter, const InMemoryState& state) {
  return static_cast<int64_t>(parameter._version()) != state.version ||
         !at::equal(parameter.detach(), state.master.to(parameter.scalar_type()));
}

// A master that is kept, as long as it is the weight's.
Tensor MasterNow(const Tensor& parameter, const InMemoryState* state) {
  const bool has_master = !IsItsOwnMaster(parameter) && state != nullptr &&
                          state->master.defined() && !WasWritten(parameter, *state);
  return (has_master ? state->master : parameter).detach().to(MasterType(parameter));
}

}  // namespace

const InMemoryState* InMemoryStates::StateOf(const Tensor& parameter) const {
  const auto found = states_.find(parameter.unsafeGetTensorImpl());
  return found == states_.end() ? nullptr : &found->second;
}

bool InMemoryStates::AreWithin(const std::unordered_set<const void*>& tensors) const {
  return std::all_of(states_.begin(), states_.end(),
                     [&](const auto& state) { return tensors.contains(state.first); });
}

Tensor InMemoryStates::Gather(const Tensor& parameter, const std::string& plane) const {
  const at::NoGradGuard no_gradients;
  const InMemoryState* const state = StateOf(parameter);
  if (plane == "weight") return parameter.detach().clone();
  if (plane == "master") {
    return MasterNow(parameter, state).clone();
  }
  if (plane == "average" && kept_.averaging().is_on()) {
    const bool has_begun = state != nullptr && state->average.defined();
    return has_begun ? state->average.clone() : Gather(parameter, "master");
  }
  const proto::PlaneSet planes(proto::Dtype::kFloat32, parameter.requires_grad(), kept_);
  const std::optional<proto::Plane> found = planes.Find(plane);
  for (size_t i = 0; found.has_value() && i < proto::kStatePlanes.size(); ++i) {
    if (proto::kStatePlanes[i] != *found) continue;
    if (state == nullptr || !state->planes[i].defined())
      return at::zeros(parameter.sizes(), MasterType(parameter));
    return state->planes[i].clone();
  }
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("the parameter has no plane '", plane, "'"),
                        absl::StrCat("Its planes are ", planes.Names())));
}

void InMemoryOptimizer::ReplaceState(std::span<const KeptState> states) {
  const at::NoGradGuard no_gradients;
  for (const KeptState& given : states) {
    ThrowIfError(CheckFits(given, ""));
    const InMemoryState* const state = StateOf(given.parameter);
    const auto here = static_cast<uint64_t>(state == nullptr ? 0 : state->step);
    if (averaging_.is_on() && given.update_count != here)
      ThrowStatus(AverageHasMovedOtherwise(averaging_, "a parameter", given.update_count, here));
  }
  for (const KeptState& given : states) {
    InMemoryState& state = states_->states_[given.parameter.unsafeGetTensorImpl()];
    const at::TensorOptions type = given.parameter.options().dtype(MasterType(given.parameter));
    state.step = static_cast<int64_t>(given.update_count);
    if (given.master.defined()) {
      Tensor parameter = given.parameter;
      parameter.copy_(given.master);
      state.master = given.master.to(type, /*non_blocking=*/false, /*copy=*/true);
      state.version = static_cast<int64_t>(parameter._version());
    }
    for (size_t i = 0; i < state.planes.size(); ++i) {
      const bool is_kept = states_->kept_.Plane(i) != nullptr && given.planes[i].defined();
      state.planes[i] = is_kept ? given.planes[i].to(type, /*non_blocking=*/false,
                                                     /*copy=*/true)
                                : Tensor();
    }
  }
}

std::vector<KeptState> InMemoryOptimizer::GatherState() const {
  std::vector<KeptState> states;
  for (const auto& group : param_groups_) {
    for (const Tensor& parameter : group.params()) {
      const InMemoryState* const state = StateOf(parameter);
      if (state == nullptr || state->step == 0) continue;
      KeptState& kept = states.emplace_back();
      kept.parameter = parameter;
      kept.update_count = static_cast<uint64_t>(state->step);
      for (size_t i = 0; i < state->planes.size(); ++i) {
        if (state->planes[i].defined()) kept.planes[i] = state->planes[i].clone();
      }
    }
  }
  return states;
}

std::vector<Tensor> InMemoryOptimizer::Masters() const {
  std::vector<Tensor> masters;
  for (const auto& group : param_groups_) {
    for (const Tensor& parameter : group.params()) {
      const InMemoryState* const state = StateOf(parameter);
      const bool is_kept =
          state != nullptr && !IsItsOwnMaster(parameter) && state->master.defined();
      masters.push_back(is_kept ? MasterNow(parameter, state) : Tensor());
    }
  }
  return masters;
}

bool InMemoryOptimizer::TakeReadMasters(bool is_last) {
  bool has_dropped = false;
  if (!HasReadMasters()) return has_dropped;
  for (const auto& group : param_groups_) {
    for (const Tensor& parameter : group.params()) {
      const ReadMaster read = TakeReadMaster(parameter, is_last);
      has_dropped |= read.is_dropped;
      if (!read.master.defined()) continue;
      InMemoryState& state = states_->states_[parameter.unsafeGetTensorImpl()];
      state.master = read.master.to(parameter.device());
      state.version = static_cast<int64_t>(parameter._version());
    }
  }
  return has_dropped;
}

void InMemoryOptimizer::save(torch::serialize::OutputArchive& archive) const {
  auto& self = const_cast<InMemoryOptimizer&>(*this);  // whose shown state is no part of its value
  TakeBackState(self, self);
  SaveState(*this, GatherState(), archive);
  WriteMasters(*this, archive);
  ShowAgain(self, self, self.shown_);
}

void InMemoryOptimizer::load(torch::serialize::InputArchive& archive) {
  TakeBackState(*this, *this);
  LoadState(*this, archive, [this](std::span<const KeptState> states) { ReplaceState(states); });
  ReadMasters(*this, archive);
  TakeReadMasters(/*is_last=*/false);
}

void InMemoryOptimizer::ForEachWithGradient(absl::FunctionRef<void(Tensor& parameter)> work) {
  for (auto& group : param_groups_) {
    for (Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) work(parameter);
    }
  }
}

void InMemoryOptimizer::FollowWeight(const Tensor& parameter) {
  InMemoryState& state = states_->states_[parameter.unsafeGetTensorImpl()];
  if (IsItsOwnMaster(parameter)) {
    // Anew, since its storage may be another one; with a version of its own: whether the step
    // counts as a write is the optimizer's affair.
    state.master = parameter.variable_data();
  } else if (!state.master.defined()) {
    state.master = parameter.detach().to(MasterType(parameter));
  } else if (WasWritten(parameter, state)) {
    state.master.copy_(parameter);
  }
}

void InMemoryOptimizer::UpdateParameter(const OptimizerSpec& optimizer, Tensor& parameter) {
  InMemoryState& state = states_->states_[parameter.unsafeGetTensorImpl()];
  for (size_t i = 0; i < state.planes.size(); ++i) {
    if (states_->kept_.Plane(i) != nullptr && !state.planes[i].defined())
      state.planes[i] = at::zeros_like(state.master, at::MemoryFormat::Preserve);
  }
  if (IsSparseUpdate(optimizer, parameter, "")) {
    KeptState kept{.parameter = parameter,
                   .update_count = static_cast<uint64_t>(state.step),
                   .planes = state.planes};
    AddSparsely(optimizer, parameter.grad(), state.master, kept);
    state.step = static_cast<int64_t>(kept.update_count);
    state.planes = kept.planes;
    return;
  }
  if (IsCounted(WithAverage(optimizer, averaging_))) ++state.step;
  const Tensor& given = parameter.grad();
  const Tensor gradient = given.layout() == at::kStrided ? given : given.to_dense();
  UpdateInMemory(optimizer, gradient.to(MasterType(parameter)), state);
  if (averaging_.is_on()) MoveAverage(state);
  if (!IsItsOwnMaster(parameter)) parameter.variable_data().copy_(state.master);
}

void InMemoryOptimizer::MoveAverage(InMemoryState& state) const {
  const AverageStep step = StepOf(averaging_, state.step);
  switch (step.kind) {
    case AverageStep::Kind::kKeep:
      return;
    case AverageStep::Kind::kTake:
      state.average = state.master.clone();
      return;
    case AverageStep::Kind::kLerp:
      state.average.lerp_(state.master, step.value);
      return;
    case AverageStep::Kind::kMean:
      state.average.add_((state.master - state.average).div_(step.value));
      return;
  }
}

}  // namespace offload::zero3

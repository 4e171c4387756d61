#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <offload/grad_scaler.h>
#include <offload/torch.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "zero3/torch/module_engine.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"
#include "zero3/trainer_state.h"

namespace offload {
namespace {

using at::Tensor;
using torch::optim::Optimizer;
using zero3::LossScale;

[[noreturn]] void Refuse(const std::string& what, const std::string& fix) {
  zero3::ThrowStatus(MakeError(ErrorId::kBadValue, what, fix));
}

enum class Stage { kReady, kUnscaled, kStepped };

// What one iteration has of an optimizer.
struct Iteration {
  Stage stage = Stage::kReady;
  std::vector<Tensor>
      found;  // fp32, 0-dim, of each device with gradients: 1 when one is not finite

  bool AllFinite() const {
    for (const Tensor& of_device : found) {
      if (of_device.item<float>() != 0) return false;
    }
    return true;
  }
};

// What the operator takes, on each device that has gradients.
class Inverses {
 public:
  explicit Inverses(const Tensor& scale)
      : host_(scale.to(at::kDouble).reciprocal().to(at::kFloat)) {}

  void Unscale(const Tensor& gradient) {
    const size_t i = IndexOf(gradient.device());
    at::_amp_foreach_non_finite_check_and_unscale_({gradient}, found_[i], inverse_[i]);
  }
  std::vector<Tensor> found() && { return std::move(found_); }

 private:
  size_t IndexOf(const at::Device& device) {
    for (size_t i = 0; i < inverse_.size(); ++i) {
      if (inverse_[i].device() == device) return i;
    }
    inverse_.push_back(host_.to(device));
    found_.push_back(at::full({}, 0.0, at::TensorOptions(at::kFloat).device(device)));
    return inverse_.size() - 1;
  }

  const Tensor host_;
  std::vector<Tensor> inverse_, found_;
};

// The values of a gradient, which share its memory.
Tensor ValuesOf(const Tensor& parameter) {
  Tensor& gradient = parameter.mutable_grad();
  if (gradient.layout() == at::kStrided) return gradient;
  // Rows that are there twice may overflow when they are added.
  if (gradient.scalar_type() == at::kHalf) gradient = gradient.coalesce();
  return gradient._values();
}

}  // namespace

struct GradScaler::Impl {
  GradScalerOptions options;
  std::weak_ptr<zero3::TensorEngine> engine;  // none in memory, and when it is closed
  size_t index = 0;                           // among the engine's scalers
  Tensor scale, growth_tracker;               // 0-dim, fp32 and int32
  std::unordered_map<const Optimizer*, Iteration> iteration;

  // All finite: 0.
  Tensor Found() const {
    Tensor sum = at::full({}, 0.0, at::kFloat);
    for (const auto& [optimizer, of] : iteration) {
      for (const Tensor& of_device : of.found) sum += of_device.cpu();
    }
    return sum;
  }

  void Advance(Tensor& its_scale, Tensor& its_tracker) const {
    at::_amp_update_scale_(its_scale, its_tracker, Found(), options.growth_factor,
                           options.backoff_factor, options.growth_interval);
  }

  // Where the daemon adds the gradients of ranks, each would have to keep all of them unscaled.
  void CheckUnscales() const {
    const auto open = engine.lock();
    if (open == nullptr || open->attachment()->world_size() == 1) return;
    if (open->attachment()->input().gradients_reduced) return;
    Refuse(
        "a GradScaler unscales gradients in place, which several ranks cannot do with gradients "
        "that the daemon adds up",
        "Reduce them in the trainer and set options.gradients = \"reduced_by_trainer\"");
  }

  // What the next commit takes.
  void HandOver(const Tensor& its_scale, const Tensor& its_tracker) const {
    if (const auto open = engine.lock())
      open->SetLossScale(index, {its_scale.item<float>(), its_tracker.item<int32_t>()});
  }
};

GradScaler::GradScaler(Engine& engine, GradScalerOptions options)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  if (!options.enabled) return;
  if (!(options.growth_factor > 1))
    Refuse("growth_factor of a GradScaler is not above 1", "The usual one is 2");
  if (!(options.backoff_factor < 1))
    Refuse("backoff_factor of a GradScaler is not below 1", "The usual one is 0.5");
  LossScale start = {static_cast<float>(options.init_scale), 0};
  if (const auto* const offloading = dynamic_cast<zero3::ModuleEngine*>(&engine)) {
    impl_->engine = offloading->weak_tensors();
    impl_->index = offloading->tensors().AddLossScale(&start);
  }
  impl_->scale = at::full({}, start.scale, at::kFloat);
  impl_->growth_tracker = at::full({}, start.growth_tracker, at::kInt);
}

GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

Tensor GradScaler::Scale(const Tensor& loss) const {
  return enabled() ? loss * impl_->scale.to(loss.device()) : loss;
}

void GradScaler::Unscale(Optimizer& optimizer) {
  if (!enabled()) return;
  Iteration& iteration = impl_->iteration[&optimizer];
  if (iteration.stage == Stage::kUnscaled)
    Refuse("Unscale() was called for this optimizer since the last Update()",
           "Call it once, after the last backward() of a step");
  impl_->CheckUnscales();
  if (iteration.stage == Stage::kStepped)
    Refuse("Unscale() is called after Step()", "Call Update() at the end of an iteration");
  const at::NoGradGuard no_grad;
  Inverses inverses(impl_->scale);
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) inverses.Unscale(ValuesOf(parameter));
    }
  }
  iteration.found = std::move(inverses).found();
  iteration.stage = Stage::kUnscaled;
}

bool GradScaler::Step(Optimizer& optimizer) {
  if (!enabled()) {
    optimizer.step();
    return true;
  }
  if (impl_->iteration[&optimizer].stage == Stage::kStepped)
    Refuse("Step() was called for this optimizer since the last Update()",
           "Call Update() at the end of an iteration");
  if (impl_->iteration[&optimizer].stage == Stage::kReady) Unscale(optimizer);
  Iteration& iteration = impl_->iteration[&optimizer];
  if (iteration.found.empty())
    Refuse("no parameter of the optimizer has a gradient", "Call backward() before Step()");
  const bool takes = iteration.AllFinite();
  if (takes) {
    Tensor scale = impl_->scale.clone(), growth_tracker = impl_->growth_tracker.clone();
    impl_->Advance(scale, growth_tracker);
    impl_->HandOver(scale, growth_tracker);
    optimizer.step();
  }
  iteration.stage = Stage::kStepped;
  return takes;
}

void GradScaler::Update() {
  if (!enabled()) return;
  bool has_found = false;
  for (const auto& [optimizer, of] : impl_->iteration) has_found |= !of.found.empty();
  if (!has_found)
    Refuse("Update() has nothing to go by: no gradient was unscaled since the last one",
           "Call Step() of all optimizers of the iteration before");
  impl_->Advance(impl_->scale, impl_->growth_tracker);
  impl_->iteration.clear();
  impl_->HandOver(impl_->scale, impl_->growth_tracker);
}

void GradScaler::Update(double new_scale) {
  if (!enabled()) return;
  impl_->scale.fill_(new_scale);
  impl_->iteration.clear();
  impl_->HandOver(impl_->scale, impl_->growth_tracker);
}

double GradScaler::scale() const { return enabled() ? impl_->scale.item<float>() : 1; }

int64_t GradScaler::growth_tracker() const {
  return enabled() ? impl_->growth_tracker.item<int32_t>() : 0;
}

bool GradScaler::enabled() const { return impl_->options.enabled; }

}  // namespace offload

#include "zero3/torch/in_memory.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <offload/torch.h>

#include <cmath>
#include <unordered_set>

#include "base/error.h"

namespace offload {
namespace zero3 {
namespace {

std::vector<torch::Tensor> DistinctParameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> seen;
  std::vector<torch::Tensor> parameters;
  for (const torch::Tensor& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
  }
  return parameters;
}

class InMemoryAdamWOptimizer final : public InMemoryOptimizer {
 public:
  InMemoryAdamWOptimizer(torch::nn::Module& module, const torch::optim::AdamWOptions& options,
                         AdamWFlavour flavour)
      : InMemoryOptimizer(module, std::make_unique<torch::optim::AdamWOptions>(options)),
        flavour_(flavour) {
    if (options.amsgrad()) {
      throw Error(1604, std::string(MakeError(ErrorId::kUnsupportedOptimizer,
                                              "AdamW with amsgrad is not supported",
                                              "Use AdamW without amsgrad")
                                        .message()));
    }
  }

 private:
  void Update(const torch::optim::OptimizerOptions& any_options, const torch::Tensor& gradient,
              InMemoryState& state) override {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(any_options);
    if (!state.exp_avg.defined()) {
      state.exp_avg = at::zeros_like(state.master, at::MemoryFormat::Preserve);
      state.exp_avg_sq = at::zeros_like(state.master, at::MemoryFormat::Preserve);
    }
    if (flavour_ == AdamWFlavour::kFused) {
      Fused(options, gradient, state);
    } else {
      Composed(options, gradient, state);
    }
  }

  static void Fused(const torch::optim::AdamWOptions& options, const torch::Tensor& gradient,
                    InMemoryState& state) {
    const auto& [beta1, beta2] = options.betas();
    const at::Tensor step = at::full({}, static_cast<double>(state.step), at::kFloat);
    at::_fused_adamw_({state.master}, {gradient}, {state.exp_avg}, {state.exp_avg_sq}, {}, {step},
                      options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
                      /*amsgrad=*/false, /*maximize=*/false);
  }

  // The operators of torch's Python loop (lerp) or of its C++ class (mul and add), in their order.
  void Composed(const torch::optim::AdamWOptions& options, const torch::Tensor& gradient,
                InMemoryState& state) const {
    const auto& [beta1, beta2] = options.betas();
    if (options.weight_decay() != 0) state.master.mul_(1 - options.lr() * options.weight_decay());
    if (flavour_ == AdamWFlavour::kLerp) {
      state.exp_avg.lerp_(gradient, 1 - beta1);
    } else {
      state.exp_avg.mul_(beta1).add_(gradient, 1 - beta1);
    }
    state.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
    const double step = static_cast<double>(state.step);
    const double bias_correction1 = 1 - std::pow(beta1, step);
    const double bias_correction2 = 1 - std::pow(beta2, step);
    const at::Tensor denominator =
        state.exp_avg_sq.sqrt().div_(std::sqrt(bias_correction2)).add_(options.eps());
    state.master.addcdiv_(state.exp_avg, denominator, -(options.lr() / bias_correction1));
  }

  const AdamWFlavour flavour_;
};

class InMemorySgdOptimizer final : public InMemoryOptimizer {
 public:
  InMemorySgdOptimizer(torch::nn::Module& module, const torch::optim::SGDOptions& options)
      : InMemoryOptimizer(module, std::make_unique<torch::optim::SGDOptions>(options)) {}

 private:
  void Update(const torch::optim::OptimizerOptions& any_options, const torch::Tensor& gradient,
              InMemoryState& state) override {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(any_options);
    at::Tensor direction = gradient;
    if (options.weight_decay() != 0) {
      direction = direction.add(state.master, options.weight_decay());
    }
    if (options.momentum() != 0) {
      if (!state.exp_avg.defined()) {
        state.exp_avg = direction.clone();
      } else {
        state.exp_avg.mul_(options.momentum()).add_(direction, 1 - options.dampening());
      }
      direction =
          options.nesterov() ? direction.add(state.exp_avg, options.momentum()) : state.exp_avg;
    }
    state.master.add_(direction, -options.lr());
  }
};

}  // namespace

InMemoryOptimizer::InMemoryOptimizer(torch::nn::Module& module,
                                     std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(DistinctParameters(module), std::move(defaults)) {}

torch::Tensor InMemoryOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_gradients(true);
    loss = closure();
  }
  const at::NoGradGuard no_gradients;
  for (auto& group : param_groups_) {
    for (torch::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) UpdateParameter(group.options(), parameter);
    }
  }
  return loss;
}

const InMemoryState* InMemoryOptimizer::StateOf(const torch::Tensor& parameter) const {
  const auto found = states_.find(parameter.unsafeGetTensorImpl());
  return found == states_.end() ? nullptr : &found->second;
}

void InMemoryOptimizer::UpdateParameter(const torch::optim::OptimizerOptions& options,
                                        torch::Tensor& parameter) {
  InMemoryState& state = states_[parameter.unsafeGetTensorImpl()];
  const bool is_its_own_master = parameter.scalar_type() == at::kFloat;
  const bool is_new = !state.master.defined();
  const int64_t version = static_cast<int64_t>(parameter._version());
  if (is_its_own_master) {
    if (is_new) state.master = parameter.detach();
  } else if (is_new) {
    state.master = parameter.detach().to(at::kFloat);
  } else if (version != state.version) {
    state.master.copy_(parameter);
  }
  ++state.step;
  Update(options, parameter.grad().to(at::kFloat), state);
  if (!is_its_own_master) parameter.copy_(state.master);
  state.version = static_cast<int64_t>(parameter._version());
}

}  // namespace zero3

std::unique_ptr<torch::optim::Optimizer> InMemoryAdamW(torch::nn::Module& module,
                                                       torch::optim::AdamWOptions options,
                                                       AdamWFlavour flavour) {
  return std::make_unique<zero3::InMemoryAdamWOptimizer>(module, options, flavour);
}

std::unique_ptr<torch::optim::Optimizer> InMemorySGD(torch::nn::Module& module,
                                                     torch::optim::SGDOptions options) {
  return std::make_unique<zero3::InMemorySgdOptimizer>(module, options);
}

}  // namespace offload

// Programs of the battery that differ in how they train: loops, losses, optimizers, schedules.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <cfenv>
#include <cmath>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

using torch::NoGradGuard;

// What most programs here have: a perceptron, its engine and an optimizer of the engine.
struct Setting {
  explicit Setting(Run& run) : run(run), model(Perceptron(run)), engine(run.Open()) {}
  Setting& AdamW(double lr = 1e-2) {
    optimizer = engine->AdamW(*model, optim::AdamWOptions(lr));
    return *this;
  }
  Setting& Sgd(double lr = 0.05) {
    optimizer = engine->SGD(*model, optim::SGDOptions(lr).momentum(0.9));
    return *this;
  }
  Tensor Loss(uint64_t batch) { return battery::Loss(run, model, batch); }
  // Whose closure computes the loss and its gradients.
  Tensor StepWithClosure(optim::Optimizer& own, uint64_t batch = 0) {
    return own.step([&] {
      own.zero_grad();
      Tensor loss = Loss(batch);
      loss.backward();
      return loss;
    });
  }
  void End() { run.See(*model); }

  Run& run;
  nn::Sequential model;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> optimizer;
};

using Body = std::function<void(Run&, Setting&)>;
Program WithAdamW(std::string name, Body body) {
  return {std::move(name), [=](Run& run) {
            Setting setting(run);
            setting.AdamW();
            body(run, setting);
            setting.End();
          }};
}
Program WithSgd(std::string name, Body body) {
  return {std::move(name), [=](Run& run) {
            Setting setting(run);
            setting.Sgd();
            body(run, setting);
            setting.End();
          }};
}

// Four steps with an optimizer that `make` gets from the engine; the rates of the last two differ.
template <class Make>
Program Optimizer(std::string name, Make make) {
  return {std::move(name), [=](Run& run) {
            Setting setting(run);
            setting.optimizer = make(*setting.engine, *setting.model);
            Train(run, setting.model, *setting.optimizer, 0, 2);
            for (auto& group : setting.optimizer->param_groups())
              group.options().set_lr(group.options().get_lr() * 0.5);
            Train(run, setting.model, *setting.optimizer, 2, 4);
            setting.End();
          }};
}

// The same with an object of torch's, which the trainer has made.
template <class Class, class Options>
Program Attached(std::string name, Options options) {
  return {std::move(name), [=](Run& run) {
            Setting setting(run);
            Class optimizer(setting.model->parameters(), options);
            setting.engine->Attach(*setting.model, optimizer);
            Train(run, setting.model, optimizer, 0, 2);
            for (auto& group : optimizer.param_groups())
              group.options().set_lr(group.options().get_lr() * 0.5);
            Train(run, setting.model, optimizer, 2, 4);
            setting.End();
          }};
}

// A trainer's own.
class SignDescent : public optim::Optimizer {
 public:
  struct Own : optim::OptimizerCloneableOptions<Own> {};
  explicit SignDescent(std::vector<Tensor> parameters)
      : Optimizer({optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<Own>()) {}
  Tensor step(LossClosure closure = nullptr) override {
    const NoGradGuard no_grad;
    Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    for (Tensor& parameter : param_groups()[0].params()) {
      if (!parameter.grad().defined()) continue;
      Tensor& momentum = momenta_[parameter.unsafeGetTensorImpl()];
      if (!momentum.defined()) momentum = torch::zeros_like(parameter);
      momentum.mul_(0.9).add_(parameter.grad(), 0.1);
      parameter.add_(momentum.sign(), -1e-3);
    }
    return loss;
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  std::unordered_map<const void*, Tensor> momenta_;
};

// Keeps the input and computes the module's inside again in backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        nn::SequentialImpl* module, int64_t at) {
    context->save_for_backward({x});
    context->saved_data["module"] = reinterpret_cast<int64_t>(module);
    context->saved_data["at"] = at;
    const NoGradGuard no_grad;
    return module->at<nn::LinearImpl>(at).forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* const module =
        reinterpret_cast<nn::SequentialImpl*>(context->saved_data["module"].toInt());
    const at::AutoGradMode grad(true);
    module->at<nn::LinearImpl>(context->saved_data["at"].toInt()).forward(x).backward(gradients[0]);
    return {x.grad(), Tensor(), Tensor()};
  }
};

std::vector<optim::OptimizerParamGroup> TwoGroups(nn::Sequential& model, double lr) {
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(LinearAt(model, 0).parameters());
  std::vector<Tensor> rest = LinearAt(model, 2).parameters();
  for (const Tensor& parameter : LinearAt(model, 4).parameters()) rest.push_back(parameter);
  groups.emplace_back(rest, std::make_unique<optim::AdamWOptions>(
                                optim::AdamWOptions(lr).weight_decay(0.3).betas({0.5, 0.8})));
  return groups;
}

Programs Loops() {
  return {
      WithAdamW("accumulation",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    s.optimizer->zero_grad();
                    for (int micro = 0; micro < 4; ++micro) {
                      const Tensor loss = s.Loss(step * 4 + micro) / 4;
                      loss.backward();
                      run.See(loss);
                    }
                    s.optimizer->step();
                  }
                  run.SeeGradients(*s.model);
                }),
      WithSgd("closure",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) run.See(s.StepWithClosure(*s.optimizer, step));
              }),
      {"lbfgs",
       [](Run& run) {
         Setting s(run);
         optim::LBFGS optimizer(s.model->parameters(),
                                optim::LBFGSOptions(0.5).max_iter(4).history_size(3));
         s.engine->Attach(*s.model, optimizer);
         for (int step = 0; step < 2; ++step) run.See(s.StepWithClosure(optimizer));
         s.End();
       }},
      {"lbfgs_with_line_search",
       [](Run& run) {
         Setting s(run);
         optim::LBFGS optimizer(s.model->parameters(),
                                optim::LBFGSOptions(1).max_iter(3).line_search_fn("strong_wolfe"));
         s.engine->Attach(*s.model, optimizer);
         for (int step = 0; step < 2; ++step) run.See(s.StepWithClosure(optimizer));
         s.End();
       }},
      WithAdamW("gradient_penalty",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    const Tensor x = run.Noise(step, {4, kWidth}).requires_grad_();
                    const Tensor y = s.model->forward(x);
                    const Tensor gradient =
                        torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
                    const Tensor loss = Mean(y) + (gradient.norm(2, 1) - 1).square().mean();
                    loss.backward();
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                    run.See(loss);
                  }
                }),
      WithAdamW("gradients_of_parameters_by_grad",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    const auto parameters = s.model->parameters();
                    const auto gradients = torch::autograd::grad({s.Loss(step)}, parameters);
                    for (size_t i = 0; i < parameters.size(); ++i) {
                      parameters[i].mutable_grad() = gradients[i] * 0.5;
                      run.See(gradients[i]);
                    }
                    s.optimizer->step();
                  }
                }),
      WithAdamW("second_derivative_of_parameters",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    s.optimizer->zero_grad();
                    const auto parameters = s.model->parameters();
                    const auto gradients = torch::autograd::grad({s.Loss(step)}, parameters, {},
                                                                 true, /*create_graph=*/true);
                    Tensor loss = s.Loss(step);
                    for (const Tensor& gradient : gradients)
                      loss = loss + gradient.to(at::kFloat).square().sum() * 0.1;
                    loss.backward();
                    s.optimizer->step();
                    run.See(loss);
                  }
                }),
      WithAdamW("backward_with_create_graph",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 2; ++step) {
                    s.Loss(step).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
                    Tensor sum = torch::zeros({});
                    for (Tensor& parameter : s.model->parameters()) {
                      sum = sum + parameter.grad().to(at::kFloat).square().sum();
                      parameter.mutable_grad().reset();
                    }
                    sum.backward();
                    run.See(sum);
                    run.SeeGradients(*s.model);
                    s.optimizer->step();
                  }
                }),
      WithSgd("meta_learning_inner_step",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  auto& first = LinearAt(s.model, 0);
                  auto& second = LinearAt(s.model, 2);
                  const auto forward = [&](const Tensor& x, const Tensor& w) {
                    return torch::linear(torch::tanh(torch::linear(x, w, first.bias)),
                                         second.weight, second.bias);
                  };
                  const Tensor x = run.Noise(step, {4, kWidth});
                  const Tensor inner = Mean(forward(x, first.weight) - x);
                  const Tensor gradient =
                      torch::autograd::grad({inner}, {first.weight}, {}, true, true)[0];
                  const Tensor fast = first.weight - 0.1 * gradient;
                  const Tensor loss = Mean(forward(run.Noise(step + 50, {4, kWidth}), fast));
                  loss.backward();
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                  run.See(loss);
                }
              }),
      WithAdamW("two_backwards_of_one_graph",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    const Tensor loss = s.Loss(step);
                    loss.backward({}, /*retain_graph=*/true);
                    (loss * 0.5).backward();
                    run.SeeGradients(*s.model);
                    s.optimizer->step();
                    s.optimizer->zero_grad(/*set_to_none=*/false);
                  }
                }),
      WithAdamW("backward_of_a_vector",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    const Tensor y = s.model->forward(run.Noise(step, {3, kWidth}));
                    y.backward(torch::full_like(y, 0.01));
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                    run.See(y);
                  }
                }),
      WithSgd("several_losses",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  const Tensor hidden =
                      torch::tanh(LinearAt(s.model, 0).forward(run.Noise(step, {4, kWidth})));
                  const Tensor out = LinearAt(s.model, 2).forward(hidden);
                  const Tensor first = hidden.to(at::kFloat).abs().mean(), second = Mean(out);
                  first.backward({}, true);
                  second.backward();
                  s.optimizer->step();
                  s.model->zero_grad();
                  run.See(first + second);
                }
              }),
      WithSgd("truncated_through_time",
              [](Run& run, Setting& s) {
                Tensor state = run.Noise(0, {3, kWidth});
                for (int step = 0; step < 4; ++step) {
                  state = s.model->forward(state.detach()) + run.Noise(step, {3, kWidth});
                  Mean(state).backward();
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
                run.See(state);
              }),
      WithAdamW("recomputation_in_backward",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    const Tensor x = run.Noise(step, {4, kWidth}).requires_grad_();
                    const Tensor hidden = torch::tanh(Checkpoint::apply(x, s.model.get(), 0));
                    const Tensor loss = Mean(Checkpoint::apply(hidden, s.model.get(), 2));
                    loss.backward();
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                    run.See(loss);
                  }
                }),
      WithAdamW("skipped_steps",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 5; ++step) {
                    const Tensor loss = s.Loss(step);
                    loss.backward();
                    if (step % 2 == 0) s.optimizer->step();
                    s.optimizer->zero_grad();
                    run.See(loss);
                  }
                  run.See(static_cast<double>(s.engine->step()));
                }),
      WithAdamW("steps_without_gradient",
                [](Run& run, Setting& s) {
                  s.optimizer->step();
                  Train(run, s.model, *s.optimizer, 0, 2);
                  s.optimizer->step();
                  s.optimizer->step();
                  run.See(static_cast<double>(s.engine->step()));
                  Train(run, s.model, *s.optimizer, 2, 4);
                }),
      WithSgd("step_with_kept_gradient",
              [](Run& run, Setting& s) {
                s.Loss(0).backward();
                for (int step = 0; step < 3; ++step) s.optimizer->step();
                run.SeeGradients(*s.model);
                s.Loss(1).backward();  // onto the old ones
                s.optimizer->step();
                run.SeeGradients(*s.model);
              }),
      WithSgd("zero_grad_of_the_module",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 4; ++step) {
                  s.model->zero_grad(/*set_to_none=*/step % 2 == 0);
                  s.Loss(step).backward();
                  s.optimizer->step();
                  run.See(s.model->parameters()[0].grad());
                }
              }),
      WithSgd("zero_gradients_keep_the_momentum",
              [](Run& run, Setting& s) {
                Train(run, s.model, *s.optimizer, 0, 1);
                s.Loss(1).backward();
                s.optimizer->zero_grad(/*set_to_none=*/false);
                s.optimizer->step();
                run.SeeGradients(*s.model);
                Train(run, s.model, *s.optimizer, 2, 3);
              }),
      WithAdamW("gradients_reset_by_hand",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 4; ++step) {
                    s.Loss(step).backward();
                    s.optimizer->step();
                    for (Tensor& parameter : s.model->parameters()) {
                      if (step % 3 == 0) parameter.mutable_grad().reset();
                      if (step % 3 == 1) parameter.mutable_grad() = Tensor();
                      if (step % 3 == 2) parameter.grad().zero_();
                    }
                  }
                  run.SeeGradients(*s.model);
                }),
      WithAdamW("clipping_the_norm",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 4; ++step) {
                    s.Loss(step).backward();
                    const double norms[] = {2.0, 1.0, INFINITY, 3.0};
                    run.See(nn::utils::clip_grad_norm_(s.model->parameters(), 0.02, norms[step]));
                    run.SeeGradients(*s.model);
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                  }
                }),
      WithSgd("clipping_twice_and_once_for_each",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  run.See(nn::utils::clip_grad_norm_(s.model->parameters(), 0.05));
                  run.See(nn::utils::clip_grad_norm_(s.model->parameters(), 0.01));
                  for (Tensor& parameter : s.model->parameters())
                    run.See(nn::utils::clip_grad_norm_(parameter, 0.005));
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      WithSgd("clipping_values",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  nn::utils::clip_grad_value_(s.model->parameters(), 1e-3);
                  run.SeeGradients(*s.model);
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      WithAdamW("clipping_by_hand",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    s.Loss(step).backward();
                    double sum = 0;
                    for (const Tensor& parameter : s.model->parameters())
                      sum += std::pow(parameter.grad().data().norm().item<double>(), 2);
                    const double factor = 0.01 / (std::sqrt(sum) + 1e-6);
                    if (factor < 1) {
                      for (Tensor& parameter : s.model->parameters())
                        parameter.grad().data().mul_(factor);
                    }
                    run.See(sum);
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                  }
                }),
      WithAdamW("gradients_scaled_noised_and_clamped",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    s.Loss(step).backward();
                    uint64_t seed = step * 100;
                    for (Tensor& parameter : s.model->parameters()) {
                      parameter.grad().mul_(0.3);
                      parameter.grad().div_(1.7);
                      parameter.grad().add_(run.Noise(seed++, parameter.sizes()), 1e-3);
                      parameter.grad().clamp_(-1e-2, 1e-2);
                      parameter.mutable_grad() = parameter.grad() * 2 + 1e-4;
                    }
                    run.SeeGradients(*s.model);
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                  }
                }),
      WithSgd("gradients_through_pointers",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  for (Tensor& parameter : s.model->parameters()) {
                    char* const bytes = static_cast<char*>(parameter.grad().mutable_data_ptr());
                    std::fill(bytes, bytes + 40, 0);
                  }
                  run.See(nn::utils::clip_grad_norm_(s.model->parameters(), 0.05));
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      WithSgd("gradients_exchanged",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  Tensor flat = torch::cat([&] {
                    std::vector<Tensor> all;
                    for (const Tensor& parameter : s.model->parameters())
                      all.push_back(parameter.grad().flatten());
                    return all;
                  }());
                  run.See(flat);
                  flat.mul_(0.5);
                  int64_t begin = 0;
                  for (Tensor& parameter : s.model->parameters()) {
                    parameter.grad().copy_(
                        flat.slice(0, begin, begin + parameter.numel()).view_as(parameter));
                    begin += parameter.numel();
                  }
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      WithSgd("gradient_averages_kept",
              [](Run& run, Setting& s) {
                std::vector<Tensor> sums;
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  const auto parameters = s.model->parameters();
                  for (size_t i = 0; i < parameters.size(); ++i) {
                    if (step == 0) sums.push_back(parameters[i].grad().clone());
                    if (step > 0) sums[i] = sums[i] * 0.9 + parameters[i].grad();
                  }
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
                for (const Tensor& sum : sums) run.See(sum);
              }),
      WithSgd("hooks_on_parameters",
              [](Run& run, Setting& s) {
                int calls = 0;
                for (Tensor& parameter : s.model->parameters())
                  parameter.register_hook([&calls](const Tensor& gradient) {
                    ++calls;
                    return gradient * 0.5;
                  });
                Train(run, s.model, *s.optimizer, 0, 3);
                run.See(calls);
              }),
      WithSgd("hooks_on_activations",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  Tensor hidden = LinearAt(s.model, 0).forward(run.Noise(step, {4, kWidth}));
                  hidden.retain_grad();
                  hidden.register_hook(
                      [](const Tensor& gradient) { return gradient.clamp(-1, 1); });
                  Mean(LinearAt(s.model, 2).forward(hidden)).backward();
                  run.See(hidden.grad());
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      WithAdamW("rate_of_every_step",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 4; ++step) {
                    auto& options =
                        static_cast<optim::AdamWOptions&>(s.optimizer->param_groups()[0].options());
                    options.lr(1e-2 / (step + 1));
                    options.weight_decay(0.01 * step);
                    options.betas({0.9 - 0.1 * step, 0.99});
                    options.eps(1e-8 * (step + 1));
                    TrainStep(run, s.model, *s.optimizer, step);
                  }
                }),
      WithSgd("step_schedule",
              [](Run& run, Setting& s) {
                optim::StepLR schedule(*s.optimizer, 2, 0.5);
                for (int step = 0; step < 5; ++step) {
                  TrainStep(run, s.model, *s.optimizer, step);
                  schedule.step();
                }
              }),
      WithAdamW("plateau_schedule",
                [](Run& run, Setting& s) {
                  optim::ReduceLROnPlateauScheduler schedule(
                      *s.optimizer, optim::ReduceLROnPlateauScheduler::min, 0.5f, 0);
                  for (int step = 0; step < 5; ++step) {
                    const Tensor loss = s.Loss(0);
                    loss.backward();
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                    schedule.step(loss.item<float>() * (step % 2 == 0 ? 1.f : 2.f));
                    run.See(s.optimizer->param_groups()[0].options().get_lr());
                  }
                }),
      WithSgd("own_descent_beside_the_optimizer",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 4; ++step) {
                  s.Loss(step).backward();
                  if (step % 2 == 0) {
                    s.optimizer->step();
                  } else {
                    const NoGradGuard no_grad;
                    for (Tensor& parameter : s.model->parameters())
                      parameter -= 0.01 * parameter.grad();
                  }
                  s.optimizer->zero_grad();
                }
                run.See(s.Loss(9));
              }),
      WithSgd("own_descent_on_data",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  for (Tensor& parameter : s.model->parameters())
                    parameter.data().sub_(parameter.grad().data() * 0.01);
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      {"own_optimizer",
       [](Run& run) {
         Setting s(run);
         SignDescent optimizer(s.model->parameters());
         s.engine->Attach(*s.model, optimizer);
         for (int step = 0; step < 3; ++step) {
           TrainStep(run, s.model, optimizer, step);
           s.engine->CommitStep();
         }
         s.End();
       }},
      {"submodule_registered_twice_is_updated_twice",
       [](Run& run) {
         const auto train = [&run](auto make) {
           nn::Module both;
           nn::Sequential model = Perceptron(run);
           both.register_module("left", model.ptr());
           both.register_module("right", model.ptr());
           auto own = make(both.parameters());  // names each parameter twice
           auto engine = run.Open();
           engine->Attach(both, own);
           Train(run, model, own, 0, 3);
           run.See(static_cast<double>(engine->step()));
           run.See(both);
         };
         train([](auto parameters) { return optim::AdamW(parameters, 1e-2); });
         train([](auto parameters) {
           return optim::SGD(parameters, optim::SGDOptions(0.05).momentum(0.9));
         });
         train([](auto parameters) { return SignDescent(parameters); });
       }},
      {"own_optimizer_that_never_commits",
       [](Run& run) {
         Setting s(run);
         SignDescent optimizer(s.model->parameters());
         s.engine->Attach(*s.model, optimizer);
         Train(run, s.model, optimizer, 0, 3);
         s.End();
       }},
      {"no_optimizer_at_all",
       [](Run& run) {
         Setting s(run);
         SignDescent optimizer(s.model->parameters());
         s.engine->Attach(*s.model, optimizer);
         for (int step = 0; step < 3; ++step) {
           const Tensor loss = s.Loss(step);
           loss.backward();
           const NoGradGuard no_grad;
           for (Tensor& parameter : s.model->parameters()) {
             parameter.sub_(0.05 * parameter.grad());
             parameter.grad().zero_();
           }
           run.See(loss);
         }
         s.End();
       }},
      {"two_groups",
       [](Run& run) {
         Setting s(run);
         s.optimizer =
             s.engine->AdamW(*s.model, TwoGroups(s.model, 3e-3), optim::AdamWOptions(1e-2));
         Train(run, s.model, *s.optimizer, 0, 3);
         s.optimizer->param_groups()[1].options().set_lr(0);
         Train(run, s.model, *s.optimizer, 3, 5);
         s.End();
       }},
      {"group_of_a_part",
       [](Run& run) {
         Setting s(run);
         std::vector<optim::OptimizerParamGroup> groups;
         groups.emplace_back(LinearAt(s.model, 4).parameters());
         s.optimizer = s.engine->SGD(*s.model, groups, optim::SGDOptions(0.1).momentum(0.9));
         Train(run, s.model, *s.optimizer, 0, 3);
         run.SeeGradients(*s.model);
         s.End();
       }},
      {"group_added_later",
       [](Run& run) {
         Setting s(run);
         std::vector<optim::OptimizerParamGroup> groups;
         groups.emplace_back(LinearAt(s.model, 4).parameters());
         s.optimizer = s.engine->SGD(*s.model, groups, optim::SGDOptions(0.1).momentum(0.9));
         Train(run, s.model, *s.optimizer, 0, 2);
         s.optimizer->add_param_group(optim::OptimizerParamGroup(
             LinearAt(s.model, 0).parameters(), std::make_unique<optim::SGDOptions>(0.02)));
         Train(run, s.model, *s.optimizer, 2, 4);
         s.End();
       }},
      WithAdamW("evaluation_in_between",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 4; ++step) {
                    TrainStep(run, s.model, *s.optimizer, step);
                    s.model->eval();
                    if (step % 2 == 0) {
                      const NoGradGuard no_grad;
                      run.See(s.Loss(100));
                    } else {
                      const c10::InferenceMode inference;
                      run.See(s.Loss(101).item<double>());
                    }
                    s.model->train();
                  }
                }),
      WithSgd("evaluation_in_the_middle_of_a_step",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  const Tensor loss = s.Loss(step);
                  {
                    const NoGradGuard no_grad;
                    run.See(s.Loss(50 + step));
                  }
                  loss.backward();
                  run.See(s.Loss(70 + step).item<double>());
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      WithSgd("exception_in_forward",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  try {
                    s.model->forward(run.Noise(0, {3, 5}));
                  } catch (const c10::Error&) {
                  }
                  TrainStep(run, s.model, *s.optimizer, step);
                }
              }),
      WithSgd("exception_in_backward",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  Tensor hidden = LinearAt(s.model, 0).forward(run.Noise(step, {4, kWidth}));
                  hidden.register_hook([](const Tensor&) -> Tensor {
                    throw std::runtime_error("a hook of the trainer");
                  });
                  try {
                    Mean(LinearAt(s.model, 2).forward(hidden)).backward();
                  } catch (const std::exception&) {
                  }
                  run.SeeGradients(*s.model);
                  TrainStep(run, s.model, *s.optimizer, step);
                }
              }),
      WithSgd("exception_in_a_closure",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  try {
                    s.optimizer->step([&]() -> Tensor {
                      s.Loss(step).backward();
                      throw std::runtime_error("in the closure");
                    });
                  } catch (const std::runtime_error&) {
                  }
                  TrainStep(run, s.model, *s.optimizer, step);
                }
              }),
      // What the daemon computes with is found out while it is attached.
      {"attached_while_arithmetic_is_another",
       [](Run& run) {
         Setting s(run);
         {
           struct OtherArithmetic {
             OtherArithmetic() {
               at::globalContext().setFlushDenormal(true);
               std::fesetround(FE_UPWARD);
             }
             ~OtherArithmetic() { std::fesetenv(FE_DFL_ENV); }
           } const other;
           s.AdamW();
         }
         Train(run, s.model, *s.optimizer, 0, 3);
         s.End();
       }},
      WithAdamW("anomaly_detection",
                [](Run& run, Setting& s) {
                  const torch::autograd::DetectAnomalyGuard guard;
                  Train(run, s.model, *s.optimizer, 0, 2);
                }),
      WithAdamW("loss_scaling_by_hand",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    (s.Loss(step) * 1024).backward();
                    Tensor found = torch::zeros({1}), inverse = torch::full({1}, 1.0 / 1024);
                    std::vector<Tensor> gradients;
                    for (const Tensor& parameter : s.model->parameters())
                      gradients.push_back(parameter.grad());
                    torch::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
                    run.See(found);
                    if (found.item<float>() == 0) s.optimizer->step();
                    s.optimizer->zero_grad();
                  }
                }),
      WithSgd("non_finite_gradients_are_skipped",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 4; ++step) {
                  (s.Loss(step) * (step == 1 ? INFINITY : 1.0)).backward();
                  bool finite = true;
                  for (const Tensor& parameter : s.model->parameters())
                    finite = finite && parameter.grad().isfinite().all().item<bool>();
                  if (finite) s.optimizer->step();
                  s.optimizer->zero_grad();
                  run.See(finite);
                }
              }),
      {"non_finite_gradients_are_stepped",
       [](Run& run) {
         Setting s(run);
         s.Sgd();
         (s.Loss(0) * INFINITY).backward();
         s.optimizer->step();
         s.End();
       },
       1701},
      WithAdamW("dropout_follows_the_generator",
                [](Run& run, Setting& s) {
                  torch::manual_seed(77);
                  for (int step = 0; step < 3; ++step) {
                    const Tensor x = torch::dropout(run.Noise(step, {4, kWidth}), 0.5, true);
                    Mean(torch::dropout(s.model->forward(x), 0.3, true)).backward();
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                    run.See(torch::rand({2}));
                  }
                }),
      WithSgd("regularisation_by_hand",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  Tensor loss = s.Loss(step);
                  for (const auto& item : s.model->named_parameters()) {
                    if (item.key().find("bias") == std::string::npos)
                      loss = loss + 1e-4 * item.value().to(at::kFloat).abs().sum() +
                             1e-4 * item.value().to(at::kFloat).pow(2).sum();
                  }
                  loss.backward();
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                  run.See(loss);
                }
              }),
      WithAdamW("loss_on_weights_alone",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    const Tensor& w = LinearAt(s.model, 2).weight;
                    const Tensor loss =
                        Mean(w.mm(w.t()) - torch::eye(kWidth, w.options().requires_grad(false)));
                    loss.backward();
                    s.optimizer->step();
                    s.optimizer->zero_grad();
                    run.See(loss);
                  }
                }),
      // Another backward over other weights, from a hook of an activation.
      WithSgd("backward_in_a_hook",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 3; ++step) {
                  const Tensor inner = LinearAt(s.model, 0).forward(run.Noise(step, {4, kWidth}));
                  inner.register_hook([&](const Tensor& gradient) {
                    const at::AutoGradMode grad(true);
                    Mean(LinearAt(s.model, 2).forward(gradient.detach() * 100)).backward();
                    Mean(LinearAt(s.model, 0).forward(run.Noise(step + 7, {2, kWidth}))).backward();
                  });
                  const Tensor y = LinearAt(s.model, 2).forward(torch::relu(inner));
                  Mean(LinearAt(s.model, 4).forward(y) - 1).backward();
                  run.SeeGradients(*s.model);
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      // Gradients of copies of the model, which threads have computed, are put in and added to.
      WithAdamW("replicas_in_threads",
                [](Run& run, Setting& s) {
                  for (int step = 0; step < 3; ++step) {
                    std::vector<std::shared_ptr<nn::Module>> replicas;
                    std::vector<std::thread> threads;
                    for (int i = 0; i < 2; ++i) replicas.push_back(s.model->clone());
                    for (int i = 0; i < 2; ++i) {
                      threads.emplace_back([&, i] {
                        at::set_num_threads(1);
                        nn::Sequential replica(
                            std::dynamic_pointer_cast<nn::SequentialImpl>(replicas[i]));
                        battery::Loss(run, replica, 10 * step + i).backward();
                      });
                    }
                    for (std::thread& thread : threads) thread.join();
                    s.optimizer->zero_grad();
                    const std::vector<Tensor> own = s.model->parameters();
                    for (size_t i = 0; i < own.size(); ++i) {
                      own[i].mutable_grad() = replicas[0]->parameters()[i].grad();
                      own[i].grad().add_(replicas[1]->parameters()[i].grad());
                    }
                    if (step == 1) s.Loss(step + 50).backward();
                    s.optimizer->step();
                    run.SeeGradients(*s.model);
                  }
                }),
      WithSgd("alternating_parts",
              [](Run& run, Setting& s) {
                for (int step = 0; step < 4; ++step) {
                  LinearAt(s.model, 0).weight.set_requires_grad(step % 2 == 0);
                  LinearAt(s.model, 2).weight.set_requires_grad(step % 2 == 1);
                  TrainStep(run, s.model, *s.optimizer, step);
                }
              }),
      WithSgd("graph_over_two_steps",
              [](Run& run, Setting& s) {
                Tensor kept;
                for (int step = 0; step < 3; ++step) {
                  const Tensor x = run.Noise(step, {3, kWidth});
                  const Tensor hidden = LinearAt(s.model, 0).forward(x);
                  if (kept.defined()) run.See(Mean(kept));
                  kept = hidden;
                  Mean(hidden).backward({}, true);
                  s.optimizer->step();
                  s.optimizer->zero_grad();
                }
              }),
      {"backward_after_the_step_changed_weights",
       [](Run& run) {
         Setting s(run);
         s.Sgd();
         const Tensor loss = s.Loss(0);
         loss.backward({}, true);
         s.optimizer->step();
         loss.backward();  // as torch's SGD in C++ has it; that of the others is an error
         run.SeeGradients(*s.model);
         s.optimizer->step();
         s.End();
       }},
      WithAdamW("backward_after_a_step_that_is_an_error",
                [](Run& run, Setting& s) {
                  for (int i = 0; i < 2; ++i) {
                    const Tensor late = s.Loss(9);
                    s.Loss(i).backward();
                    s.optimizer->step();
                    try {
                      late.backward();
                    } catch (const c10::Error&) {  // it would see the new weights
                      s.optimizer->zero_grad();
                      continue;
                    }
                    throw std::logic_error("a graph from before the step goes backward");
                  }
                }),
  };
}

Programs Optimizers() {
  return {
      Optimizer("adamw", [](Engine& e, auto& m) { return e.AdamW(m, optim::AdamWOptions(1e-2)); }),
      Optimizer("adamw_amsgrad",
                [](Engine& e, auto& m) {
                  return e.AdamW(m, optim::AdamWOptions(1e-2).amsgrad(true).weight_decay(0.1));
                }),
      Optimizer("adamw_as_libtorch",
                [](Engine& e, auto& m) {
                  return e.AdamW(m, optim::AdamWOptions(1e-2), AdamWFlavour::kMulAdd);
                }),
      Optimizer("adamw_as_python",
                [](Engine& e, auto& m) {
                  return e.AdamW(m, optim::AdamWOptions(1e-2).amsgrad(true), AdamWFlavour::kLerp);
                }),
      Optimizer("adam",
                [](Engine& e, auto& m) {
                  return e.Adam(m, optim::AdamOptions(1e-2).weight_decay(0.1).betas({0.8, 0.95}));
                }),
      Optimizer("adam_amsgrad",
                [](Engine& e, auto& m) {
                  return e.Adam(m, optim::AdamOptions(1e-2).amsgrad(true).eps(1e-6));
                }),
      Optimizer("sgd_plain", [](Engine& e, auto& m) { return e.SGD(m, optim::SGDOptions(0.1)); }),
      Optimizer("sgd_nesterov",
                [](Engine& e, auto& m) {
                  return e.SGD(
                      m, optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(1e-2));
                }),
      Optimizer("sgd_dampened",
                [](Engine& e, auto& m) {
                  return e.SGD(m, optim::SGDOptions(0.1).momentum(0.8).dampening(0.3));
                }),
      Optimizer("adagrad",
                [](Engine& e, auto& m) {
                  return e.Adagrad(m, optim::AdagradOptions(1e-2).lr_decay(0.1).weight_decay(0.1));
                }),
      Optimizer("adagrad_with_initial_sum",
                [](Engine& e, auto& m) {
                  return e.Adagrad(
                      m, optim::AdagradOptions(1e-2).initial_accumulator_value(0.1).eps(1e-5));
                }),
      Optimizer("rmsprop",
                [](Engine& e, auto& m) { return e.RMSprop(m, optim::RMSpropOptions(1e-3)); }),
      Optimizer("rmsprop_centered",
                [](Engine& e, auto& m) {
                  return e.RMSprop(
                      m,
                      optim::RMSpropOptions(1e-3).centered(true).momentum(0.9).weight_decay(0.1));
                }),
      Optimizer("lion", [](Engine& e, auto& m) { return e.Lion(m, LionOptions(1e-3)); }),
      Optimizer("lamb", [](Engine& e, auto& m) { return e.LAMB(m, LAMBOptions(1e-2)); }),
      Attached<optim::AdamW>("own_adamw", optim::AdamWOptions(1e-2).weight_decay(0.1)),
      Attached<optim::AdamW>("own_adamw_amsgrad", optim::AdamWOptions(1e-2).amsgrad(true)),
      Attached<optim::Adam>("own_adam", optim::AdamOptions(1e-2)),
      Attached<optim::Adam>("own_adam_amsgrad", optim::AdamOptions(1e-2).amsgrad(true)),
      Attached<optim::SGD>("own_sgd", optim::SGDOptions(0.1)),
      Attached<optim::SGD>("own_sgd_nesterov", optim::SGDOptions(0.1).momentum(0.9).nesterov(true)),
      Attached<optim::Adagrad>("own_adagrad", optim::AdagradOptions(1e-2).lr_decay(0.1)),
      Attached<optim::RMSprop>("own_rmsprop", optim::RMSpropOptions(1e-3)),
      Attached<optim::RMSprop>("own_rmsprop_centered",
                               optim::RMSpropOptions(1e-3).centered(true).momentum(0.5)),
  };
}

// An optimizer of torch's that the trainer keeps, and what is done to the object between steps.
using EditOwn = std::function<void(Setting&, std::unique_ptr<optim::Adam>&, int step)>;
Program OwnEdited(std::string name, EditOwn edit) {
  return {std::move(name), [=](Run& run) {
            Setting s(run);
            auto own = std::make_unique<optim::Adam>(
                std::vector{LinearAt(s.model, 0).weight, LinearAt(s.model, 2).weight},
                optim::AdamOptions(1e-2));
            s.engine->Attach(*s.model, *own);
            for (int step = 0; step < 5; ++step) {
              edit(s, own, step);
              const Tensor loss = s.Loss(step);
              loss.backward();
              own->step();
              s.model->zero_grad();
              run.See(loss);
            }
            std::stringstream file;
            torch::save(*own, file);
            s.End();
          }};
}

// Torch's fused kernel over all parameters at once.
class FusedByHand : public optim::Optimizer {
 public:
  struct Own : optim::OptimizerCloneableOptions<Own> {};
  explicit FusedByHand(std::vector<Tensor> parameters)
      : Optimizer({optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<Own>()) {
    for (const Tensor& parameter : param_groups()[0].params()) {
      exp_avgs_.push_back(torch::zeros_like(parameter));
      exp_avg_sqs_.push_back(torch::zeros_like(parameter));
      steps_.push_back(torch::zeros({}));
    }
  }
  Tensor step(LossClosure = nullptr) override {
    const NoGradGuard no_grad;
    const std::vector<Tensor>& parameters = param_groups()[0].params();
    std::vector<Tensor> gradients;
    for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    for (Tensor& step : steps_) step.add_(1);
    at::_fused_adamw_(parameters, gradients, exp_avgs_, exp_avg_sqs_, {}, steps_, 1e-2, 0.9, 0.99,
                      0.1, 1e-8, false, false);
    return Tensor();
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  std::vector<Tensor> exp_avgs_, exp_avg_sqs_, steps_;
};

// A group is added with parameters that a living optimizer has.
Program TakesWhatAnotherHas() {
  Program program = {
      "own_optimizer_takes_what_another_has", [](Run& run) {
        Setting s(run);
        const std::vector<Tensor> all = s.model->parameters();
        optim::Adam left({all[0], all[1]}, optim::AdamOptions(1e-2));
        optim::Adam right({all[2], all[3], all[4], all[5]}, optim::AdamOptions(1e-2));
        s.engine->Attach(*s.model, left);
        s.engine->Attach(*s.model, right);
        for (int step = 0; step < 3; ++step) {
          s.Loss(step).backward();
          left.step();
          right.step();
          s.model->zero_grad();
        }
        left.add_param_group(optim::OptimizerParamGroup({all[2]}));
        Train(run, s.model, left, 3, 5);
        s.End();
      }};
  program.refused = 1002;
  return program;
}

Programs OwnOptimizers() {
  return {
      OwnEdited("own_optimizer_loses_a_parameter",
                [](Setting&, auto& own, int step) {
                  if (step == 2) own->param_groups()[0].params().pop_back();
                }),
      OwnEdited("own_optimizer_loses_a_parameter_for_a_while",
                [](Setting& s, auto& own, int step) {
                  if (step == 1) own->param_groups()[0].params().pop_back();
                  if (step == 3) own->add_parameters({LinearAt(s.model, 2).weight});
                }),
      OwnEdited("own_optimizer_gets_parameters",
                [](Setting& s, auto& own, int step) {
                  if (step == 1) own->add_parameters(LinearAt(s.model, 4).parameters());
                  if (step == 3)
                    own->add_param_group(optim::OptimizerParamGroup(
                        {LinearAt(s.model, 0).bias},
                        std::make_unique<optim::AdamOptions>(optim::AdamOptions(0.1))));
                }),
      OwnEdited("own_optimizer_is_moved",
                [](Setting&, auto& own, int step) {
                  if (step > 0) own = std::make_unique<optim::Adam>(std::move(*own));
                }),
      OwnEdited("own_optimizer_state_cleared",
                [](Setting&, auto& own, int step) {
                  if (step == 3) own->state().clear();
                }),
      // The job has no tensor of it, in memory an optimizer counts its updates.
      {"own_optimizer_keeps_a_state_of_an_empty_parameter",
       [](Run& run) {
         torch::manual_seed(3);
         auto model = run.Cast(nn::Linear(kWidth, 8));
         const Tensor empty = model->register_parameter("empty", torch::zeros({0, 8}, run.dtype()));
         auto engine = run.Open();
         optim::AdamW own(model->parameters(), optim::AdamWOptions(1e-2));
         engine->Attach(*model, own);
         const auto train = [&](int step) {
           Mean(torch::cat({model->forward(run.Noise(step, {4, kWidth})), empty})).backward();
           own.step();
           own.zero_grad();
           const auto& state = own.state().at(empty.unsafeGetTensorImpl());
           run.See(static_cast<double>(static_cast<optim::AdamWParamState&>(*state).step()));
           run.See(static_cast<optim::AdamWParamState&>(*state).exp_avg());
         };
         train(0);
         std::stringstream file;
         torch::save(own, file);
         train(1);
         train(2);
         torch::load(own, file);
         train(3);
         own.state().clear();
         train(4);
         run.See(*model);
       }},
      {"own_optimizer_made_anew",
       [](Run& run) {
         Setting s(run);
         std::unique_ptr<optim::Adam> own;
         for (int phase = 0; phase < 3; ++phase) {
           own = std::make_unique<optim::Adam>(s.model->parameters(),
                                               optim::AdamOptions(1e-2 / (phase + 1)));
           s.engine->Attach(*s.model, *own);
           Train(run, s.model, *own, 2 * phase, 2 * phase + 2);
         }
         run.See(s.engine->Gather(LinearAt(s.model, 2).weight, "exp_avg"));
         s.End();
       }},
      {"own_optimizer_made_anew_in_a_block",
       [](Run& run) {
         Setting s(run);
         for (int phase = 0; phase < 3; ++phase) {
           optim::SGD own(s.model->parameters(), optim::SGDOptions(0.05).momentum(0.9));
           s.engine->Attach(*s.model, own);
           Train(run, s.model, own, 2 * phase, 2 * phase + 2);
         }
         s.End();
       }},
      // One for all, one for each of two parts, and one for all.
      {"own_optimizers_divide_and_unite",
       [](Run& run) {
         Setting s(run);
         const std::vector<Tensor> all = s.model->parameters();
         auto first = std::make_unique<optim::AdamW>(all, optim::AdamWOptions(1e-2));
         s.engine->Attach(*s.model, *first);
         Train(run, s.model, *first, 0, 2);
         first.reset();
         std::stringstream file;
         {
           optim::AdamW left({all[0], all[1], all[2]}, optim::AdamWOptions(3e-3));
           optim::AdamW right({all[3], all[4], all[5]}, optim::AdamWOptions(1e-3));
           s.engine->Attach(*s.model, left);
           s.engine->Attach(*s.model, right);
           for (int step = 0; step < 3; ++step) {
             s.Loss(step).backward();
             left.step();
             if (step > 0) right.step();
             s.model->zero_grad();
           }
           torch::save(right, file);
         }
         optim::AdamW last(all, optim::AdamWOptions(1e-2));
         s.engine->Attach(*s.model, last);
         Train(run, s.model, last, 5, 7);
         s.End();
       }},
      // The store gets room for what the second keeps while the first one's gradients, which are
      // not zeroed, fill the window that both have at the floor, and a little above it.
      {"own_optimizers_share_a_weight",
       [](Run& run) {
         nn::Sequential left = Perceptron(run), right = Perceptron(run);
         nn::Module both;
         both.register_module("left", left.ptr());
         both.register_module("right", right.ptr());
         const Tensor& shared = LinearAt(left, 0).weight;
         std::vector<Tensor> rights = right->parameters();
         rights.push_back(shared);
         optim::Adam first(left->parameters(), optim::AdamOptions(1e-2));
         optim::Adam second(rights, optim::AdamOptions(3e-3));
         auto engine = run.Open([](Options& options) {
           if (options.ram.ends_with("iB")) return;
           options.ram = std::to_string(std::stoull(options.ram) + (64 << 10));
         });
         engine->Attach(both, first);
         engine->Attach(both, second);
         for (int step = 0; step < 3; ++step) {
           battery::Loss(run, left, step).backward();
           first.step();
           const Tensor hidden = torch::linear(run.Noise(step, {4, kWidth}), shared);
           const Tensor loss = Mean(right->forward(hidden.slice(1, 0, kWidth)));
           second.zero_grad();
           loss.backward();
           second.step();
           run.See(loss);
           run.SeeGradients(both);
           first.zero_grad();
         }
         run.See(both);
       }},
      // The second is made between backward and step, and goes on with what the first has kept.
      {"own_optimizer_replaced_by_its_file",
       [](Run& run) {
         Setting s(run);
         auto own = std::make_unique<optim::Adam>(s.model->parameters(), optim::AdamOptions(1e-2));
         s.engine->Attach(*s.model, *own);
         Train(run, s.model, *own, 0, 3);
         s.Loss(3).backward();
         std::stringstream file;
         torch::save(*own, file);
         own = std::make_unique<optim::Adam>(s.model->parameters(), optim::AdamOptions(1));
         torch::load(*own, file);
         s.engine->Attach(*s.model, *own);
         own->step();
         own->zero_grad();
         Train(run, s.model, *own, 4, 6);
         s.End();
       }},
      // One that has read a file and never stepped is followed by one that begins anew.
      {"own_optimizer_that_only_read_a_file",
       [](Run& run) {
         Setting s(run);
         std::stringstream file;
         {
           optim::Adam own(s.model->parameters(), optim::AdamOptions(1e-2));
           s.engine->Attach(*s.model, own);
           Train(run, s.model, own, 0, 3);
           torch::save(own, file);
         }
         {
           optim::Adam reads(s.model->parameters(), optim::AdamOptions(1e-2));
           s.engine->Attach(*s.model, reads);
           torch::load(reads, file);
         }
         optim::Adam last(s.model->parameters(), optim::AdamOptions(1e-2));
         s.engine->Attach(*s.model, last);
         Train(run, s.model, last, 3, 6);
         s.End();
       }},
      // Those of the engine follow nobody: refused, in memory, too.
      {"own_optimizer_before_one_of_the_engines",
       [](Run& run) {
         Setting s(run);
         {
           optim::Adam own(s.model->parameters(), optim::AdamOptions(1e-2));
           s.engine->Attach(*s.model, own);
           Train(run, s.model, own, 0, 3);
         }
         try {
           const auto other = s.engine->Adam(*s.model, optim::AdamOptions(1e-2));
           Train(run, s.model, *other, 3, 6);
         } catch (const Error& error) {
           run.See(error.id());
         }
         s.End();
       }},
      TakesWhatAnotherHas(),
      {"own_optimizer_names_a_parameter_twice_later",
       [](Run& run) {
         Setting s(run);
         optim::Adam own(s.model->parameters(), optim::AdamOptions(1e-2));
         s.engine->Attach(*s.model, own);
         Train(run, s.model, own, 0, 2);
         own.param_groups()[0].params().push_back(LinearAt(s.model, 2).weight);
         Train(run, s.model, own, 2, 3);
       },
       1002},
      // Refused when they are stepped, in memory, too; nothing has changed.
      {"own_optimizer_needs_what_is_not_kept",
       [](Run& run) {
         Setting s(run);
         optim::SGD own(s.model->parameters(), optim::SGDOptions(0.05));
         s.engine->Attach(*s.model, own);
         Train(run, s.model, own, 0, 2);
         auto& options = static_cast<optim::SGDOptions&>(own.param_groups()[0].options());
         options.momentum(0.9);
         try {
           Train(run, s.model, own, 2, 3);
         } catch (const Error& error) {
           run.See(error.id());
         }
         options.momentum(0);
         own.zero_grad();
         Train(run, s.model, own, 3, 5);
         s.End();
       }},
      {"gradient_of_another_type",
       [](Run& run) {
         Setting s(run);
         optim::SGD own(s.model->parameters(), optim::SGDOptions(0.05));
         s.engine->Attach(*s.model, own);
         for (const at::ScalarType type : {run.dtype(), at::kDouble}) {
           s.Loss(0).backward();
           for (Tensor& parameter : s.model->parameters())
             parameter.mutable_grad() = parameter.grad().to(type);
           try {
             own.step();
           } catch (const Error& error) {
             run.See(error.id());
           }
           own.zero_grad();
         }
         s.End();
       },
       0, true},
      {"lbfgs_after_adam",
       [](Run& run) {
         Setting s(run);
         optim::Adam first(s.model->parameters(), optim::AdamOptions(1e-2));
         s.engine->Attach(*s.model, first);
         Train(run, s.model, first, 0, 2);
         for (int phase = 0; phase < 2; ++phase) {
           optim::LBFGS second(s.model->parameters(), optim::LBFGSOptions(0.5).max_iter(3));
           s.engine->Attach(*s.model, second);
           run.See(s.StepWithClosure(second));
         }
         Train(run, s.model, first, 3, 5);
         s.End();
       }},
      {"adam_after_lbfgs_that_is_destroyed",
       [](Run& run) {
         Setting s(run);
         {
           optim::LBFGS first(s.model->parameters(), optim::LBFGSOptions(0.5).max_iter(3));
           s.engine->Attach(*s.model, first);
           run.See(s.StepWithClosure(first));
         }
         {
           optim::Adam second(s.model->parameters(), optim::AdamOptions(1e-2));
           s.engine->Attach(*s.model, second);
           Train(run, s.model, second, 1, 3);
         }
         optim::SGD third(s.model->parameters(), optim::SGDOptions(0.05).momentum(0.9));
         s.engine->Attach(*s.model, third);
         Train(run, s.model, third, 3, 5);
         s.End();
       }},
      {"own_optimizer_goes_on_in_memory",
       [](Run& run) {
         auto model = Perceptron(run);
         optim::Adam own(model->parameters(), optim::AdamOptions(1e-2));
         for (int job = 0; job < 2; ++job) {
           auto engine = run.Open([](Options& o) { o.weights_at_close = "memory"; });
           engine->Attach(*model, own);
           Train(run, model, own, 3 * job, 3 * job + 2);
           engine.reset();
           // bf16 steps of torch's own are other arithmetic, but of the same state.
           if (run.dtype() == at::kFloat) Train(run, model, own, 3 * job + 2, 3 * job + 3);
         }
         std::stringstream file;
         torch::save(own, file);
         run.See(*model);
       }},
      {"own_optimizer_has_more_than_the_module",
       [](Run& run) {
         auto model = Perceptron(run);
         std::vector<Tensor> parameters = model->parameters();
         parameters.push_back(torch::ones({1}, run.dtype()).requires_grad_());
         auto engine = run.Open();
         optim::Adam own(parameters, optim::AdamOptions(1e-2));
         engine->Attach(*model, own);
       },
       1601},
      {"fused_kernel_by_hand",
       [](Run& run) {
         Setting s(run);
         FusedByHand optimizer(s.model->parameters());
         s.engine->Attach(*s.model, optimizer);
         Train(run, s.model, optimizer, 0, 3);
         s.End();
       },
       0, true},
  };
}

Program Refused(Program program) {
  program.refused = 1601;
  return program;
}

// Gradients that are the trainer's own memory, and pointers to them that it keeps.
Programs Gradients() {
  return {
      WithSgd("gradients_are_views_of_a_flat_buffer",
              [](Run& run, Setting& s) {
                std::vector<Tensor> parameters = s.model->parameters();
                int64_t count = 0;
                for (const Tensor& parameter : parameters) count += parameter.numel();
                Tensor flat = torch::zeros({count}, run.dtype());
                int64_t begin = 0;
                for (Tensor& parameter : parameters) {
                  parameter.mutable_grad() =
                      flat.slice(0, begin, begin + parameter.numel()).view_as(parameter);
                  begin += parameter.numel();
                }
                for (int step = 0; step < 3; ++step) {
                  s.Loss(step).backward();
                  s.Loss(step + 10).backward();
                  run.See(flat);
                  flat.mul_(0.5);
                  s.optimizer->step();
                  run.SeeGradients(*s.model);
                  flat.zero_();
                }
              }),
      WithAdamW("gradient_given_and_kept",
                [](Run& run, Setting& s) {
                  Tensor& weight = LinearAt(s.model, 2).weight;
                  Tensor kept = torch::zeros_like(weight);
                  weight.mutable_grad() = kept;
                  for (int step = 0; step < 3; ++step) {
                    s.Loss(step).backward();
                    run.See(kept);
                    s.optimizer->step();
                    s.optimizer->zero_grad(/*set_to_none=*/step == 1);
                    run.See(kept);
                  }
                }),
      // torch sums what lies otherwise in another order: the norms, by which it is clipped, show
      // it.
      WithAdamW("gradient_lies_otherwise_than_its_weight",
                [](Run& run, Setting& s) {
                  Tensor& weight = LinearAt(s.model, 2).weight;
                  for (int step = 0; step < 4; ++step) {
                    if (step != 2) {
                      weight.mutable_grad() = run.Noise(step, weight.t().sizes()).t().detach();
                    }
                    s.Loss(step).backward();
                    run.See(nn::utils::clip_grad_norm_(s.model->parameters(), 0.7));
                    s.optimizer->step();
                    s.optimizer->zero_grad(/*set_to_none=*/false);
                  }
                }),
      WithAdamW("gradient_that_is_a_weight",
                [](Run& run, Setting& s) {
                  nn::LinearImpl &middle = LinearAt(s.model, 2), &last = LinearAt(s.model, 4);
                  for (int step = 0; step < 4; ++step) {
                    s.Loss(step).backward();
                    middle.bias.mutable_grad() = last.bias.detach();
                    s.optimizer->step();
                    run.See(last.bias);
                    run.See(s.Loss(step));
                    s.optimizer->zero_grad();
                  }
                }),
      Refused(WithAdamW("gradient_that_is_its_own_parameter",
                        [](Run&, Setting& s) {
                          Tensor& bias = LinearAt(s.model, 4).bias;
                          s.Loss(0).backward();
                          bias.mutable_grad() = bias.detach();
                          s.optimizer->step();
                        })),
      Refused(WithSgd("gradient_that_is_a_row_of_an_earlier_weight",
                      [](Run&, Setting& s) {
                        s.Loss(0).backward();
                        LinearAt(s.model, 4).bias.mutable_grad() =
                            LinearAt(s.model, 2).weight.detach().select(1, 3);
                        s.optimizer->step();
                      })),
      {"weight_transposed_in_place",
       [](Run& run) {
         Setting s(run);
         s.Sgd();
         for (int step = 0; step < 2; ++step) {
           s.Loss(step).backward();
           s.optimizer->step();
           s.optimizer->zero_grad();
           const NoGradGuard no_grad;
           LinearAt(s.model, 4).weight.t_();
         }
       },
       1601},
      {"gradient_pointers_kept",
       [](Run& run) {
         Setting s(run);
         s.Sgd();
         std::vector<float*> pointers;
         const std::vector<Tensor> parameters = s.model->parameters();
         for (int step = 0; step < 4; ++step) {
           s.Loss(step).backward();
           for (size_t i = 0; i < parameters.size(); ++i) {
             if (step == 0) pointers.push_back(parameters[i].grad().data_ptr<float>());
             for (int64_t at = 0; at < parameters[i].numel(); at += 9) pointers[i][at] *= 0.5f;
           }
           run.See(nn::utils::clip_grad_norm_(parameters, 0.02));
           for (size_t i = 0; i < parameters.size(); ++i) pointers[i][1] += pointers[i][0];
           s.optimizer->step();
           if (step == 1) s.optimizer->zero_grad(/*set_to_none=*/false);
           for (size_t i = 0; i < parameters.size(); ++i) {
             run.See(pointers[i][1]);
             std::fill(pointers[i], pointers[i] + parameters[i].numel(), 1e-4f);
           }
           run.SeeGradients(*s.model);
         }
         s.End();
       },
       0, true},
  };
}

}  // namespace

Programs LoopPrograms() {
  Programs programs = Loops();
  for (Program& program : Optimizers()) {
    program.name = "optimizer_" + program.name;
    programs.push_back(std::move(program));
  }
  for (const Programs& more : {OwnOptimizers(), Gradients()})
    programs.insert(programs.end(), more.begin(), more.end());
  return programs;
}

}  // namespace offload::battery

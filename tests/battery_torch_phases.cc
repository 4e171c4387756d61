#include "tests/battery_torch_phases.h"

#include <torch/optim.h>
#include <torch/serialize.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace offload::battery {
namespace {

using Maker = std::unique_ptr<optim::Optimizer> (*)(std::vector<Tensor>);

template <class Class, class Options>
std::unique_ptr<optim::Optimizer> Make(std::vector<Tensor> parameters, Options options) {
  return std::make_unique<Class>(std::move(parameters), options);
}
std::unique_ptr<optim::Optimizer> Adam(std::vector<Tensor> parameters) {
  return Make<optim::Adam>(std::move(parameters), optim::AdamOptions(1e-2));
}
std::unique_ptr<optim::Optimizer> SlowAdam(std::vector<Tensor> parameters) {
  return Make<optim::Adam>(std::move(parameters), optim::AdamOptions(1e-3).betas({0.8, 0.9}));
}
std::unique_ptr<optim::Optimizer> AdamW(std::vector<Tensor> parameters) {
  return Make<optim::AdamW>(std::move(parameters), optim::AdamWOptions(1e-2).weight_decay(0.1));
}
std::unique_ptr<optim::Optimizer> AmsGrad(std::vector<Tensor> parameters) {
  return Make<optim::AdamW>(std::move(parameters), optim::AdamWOptions(1e-3).amsgrad(true));
}
std::unique_ptr<optim::Optimizer> Momentum(std::vector<Tensor> parameters) {
  return Make<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<optim::Optimizer> RmsProp(std::vector<Tensor> parameters) {
  return Make<optim::RMSprop>(std::move(parameters), optim::RMSpropOptions(1e-3).momentum(0.9));
}
std::unique_ptr<optim::Optimizer> Sgd(std::vector<Tensor> parameters) {
  return Make<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05));
}

std::unique_ptr<optim::Optimizer> Lbfgs(std::vector<Tensor> parameters) {
  return Make<optim::LBFGS>(std::move(parameters),
                            optim::LBFGSOptions(0.1).max_iter(3).history_size(4));
}

// Two steps with each, which is destroyed before the next is made.
Program InTurn(std::string name, std::vector<Maker> makers) {
  return {std::move(name), [makers](Run& run) {
            auto model = Perceptron(run);
            auto engine = run.Open();
            uint64_t batch = 0;
            for (const Maker make : makers) {
              auto own = make(model->parameters());
              engine->Attach(*model, *own);
              Train(run, model, *own, batch, batch + 2);
              batch += 2;
              run.See(static_cast<double>(own->state().size() > 0));
            }
            run.See(static_cast<double>(engine->step()));
            run.See(*model);
          }};
}

void SetTrained(nn::Sequential& model, size_t at, bool trained) {
  for (Tensor& parameter : LinearAt(model, at).parameters()) parameter.set_requires_grad(trained);
}

// A run that ends where its first phase does, and one that ends within the second. Each makes all
// optimizers again, in their order. `ram`: of the job, which may have to hold more than the first
// phase needs; empty: as little as that is.
void ResumeBetweenPhases(Run& run, Maker first, Maker second, const std::string& ram = "") {
  const bool in_memory = IsInMemory();
  std::string job;
  const auto open = [&](Options& options) {
    if (job.empty()) job = options.job;
    options.job = job;
    if (!ram.empty()) options.ram = ram;
  };
  nn::Sequential model(nullptr);
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> own;
  const auto follow = [&](Maker make) {
    own.reset();
    own = make(model->parameters());
    engine->Attach(*model, *own);
  };
  const auto begin = [&](bool is_first) {
    if (in_memory && !is_first) return;
    own.reset();
    engine.reset();
    model = Perceptron(run);
    engine = run.Open(open);
    follow(first);
  };
  begin(/*is_first=*/true);
  Train(run, model, *own, 0, 3);
  begin(/*is_first=*/false);
  follow(second);
  Train(run, model, *own, 3, 5);
  if (!in_memory) {
    begin(/*is_first=*/false);
    follow(second);
  }
  Train(run, model, *own, 5, 7);
  run.See(*model);
}

// Of two optimizers one steps before a run ends, the other behind that; then both give way to one
// of all parameters.
void ResumeBeforeOneOfBoth(Run& run) {
  nn::Sequential model(nullptr);
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> first, second;
  const auto begin = [&](bool is_first) {
    if (IsInMemory() && !is_first) return;
    first.reset();
    second.reset();
    engine.reset();
    model = Perceptron(run);
    engine = is_first ? run.Open() : run.Reopen();
    std::vector<Tensor> others;
    for (const size_t at : {2, 4}) {
      for (const Tensor& parameter : LinearAt(model, at).parameters()) others.push_back(parameter);
    }
    first = Adam(LinearAt(model, 0).parameters());
    second = Adam(others);
    engine->Attach(*model, *first);
    engine->Attach(*model, *second);
  };
  const auto train = [&](optim::Optimizer& own, uint64_t batch, uint64_t end) {
    for (; batch < end; ++batch) {
      const Tensor loss = Loss(run, model, batch);
      loss.backward();
      own.step();
      model->zero_grad();
      run.See(loss);
    }
  };
  begin(/*is_first=*/true);
  train(*first, 0, 2);
  train(*second, 2, 3);
  begin(/*is_first=*/false);
  train(*second, 3, 5);
  first.reset();
  second.reset();
  const auto both = SlowAdam(model->parameters());
  engine->Attach(*model, *both);
  train(*both, 5, 7);
  run.See(*model);
}

// Each epoch, of two steps, has an optimizer of its own. Runs end between two epochs and within
// one, and make all optimizers again, in their order.
void OneForEachEpoch(Run& run, const std::vector<Maker>& makers) {
  constexpr int64_t kOfEpoch = 2;
  const auto all = static_cast<int64_t>(makers.size()) * kOfEpoch;
  const std::vector<int64_t> ends =
      IsInMemory() ? std::vector{all} : std::vector<int64_t>{kOfEpoch, all - kOfEpoch - 1, all};
  std::string job;
  for (const int64_t end : ends) {
    auto model = Perceptron(run);
    auto engine = run.Open([&](Options& options) {
      if (job.empty()) job = options.job;
      options.job = job;
      options.ram = "128MiB";
    });
    for (int64_t step = engine->step(), epoch = 0; step < end; ++epoch) {
      const auto own = makers.at(epoch)(model->parameters());
      engine->Attach(*model, *own);
      for (; step < std::min(end, (epoch + 1) * kOfEpoch); ++step) {
        run.See(own->step([&] {
          own->zero_grad();
          Tensor loss = Loss(run, model, step);
          loss.backward();
          return loss;
        }));
      }
    }
    if (end == all) run.See(*model);
  }
}

}  // namespace

Programs PhasePrograms() {
  return {
      InTurn("phases_of_two_kinds", {AdamW, Momentum, AdamW}),
      InTurn("phases_that_keep_more", {Sgd, AmsGrad}),
      InTurn("phases_that_keep_less", {AmsGrad, AdamW}),
      InTurn("phases_with_and_without_momentum", {Momentum, Sgd, Momentum}),
      // torch refuses it of a new optimizer only.
      {"options_that_become_negative",
       [](Run& run) {
         for (const Maker make : {Adam, AdamW, Momentum, Sgd, RmsProp}) {
           auto model = Perceptron(run);
           auto engine = run.Open();
           auto own = make(model->parameters());
           engine->Attach(*model, *own);
           TrainStep(run, model, *own, 0);
           optim::OptimizerOptions& options = own->param_groups()[0].options();
           options.set_lr(-options.get_lr());
           TrainStep(run, model, *own, 1);
           if (auto* const sgd = dynamic_cast<optim::SGDOptions*>(&options)) {
             sgd->weight_decay(-0.1);
             if (sgd->momentum() != 0) sgd->momentum(-0.5);
           }
           Train(run, model, *own, 2, 4);
           run.See(*model);
         }
       }},
      {"options_that_no_new_optimizer_may_have",
       [](Run& run) {
         using Change = std::function<void(optim::OptimizerOptions&)>;
         const auto betas = [](double first, double second) -> Change {
           return [=](optim::OptimizerOptions& options) {
             if (auto* const adam = dynamic_cast<optim::AdamOptions*>(&options))
               adam->betas({first, second});
             if (auto* const adamw = dynamic_cast<optim::AdamWOptions*>(&options))
               adamw->betas({first, second});
           };
         };
         const auto nesterov = [](double momentum, double dampening) -> Change {
           return [=](optim::OptimizerOptions& options) {
             dynamic_cast<optim::SGDOptions&>(options).momentum(momentum).dampening(dampening);
             dynamic_cast<optim::SGDOptions&>(options).nesterov(true);
           };
         };
         const std::vector<std::tuple<Maker, Change, Change>> cases = {
             {Adam, betas(-0.2, 0.999), betas(1.1, 0.99)},
             {AdamW, betas(1.2, 0.999), betas(0, 0)},
             {Momentum, nesterov(0.9, 0.3), nesterov(-0.5, 0)},
             {Sgd, nesterov(0, 0), nesterov(0, 0.5)}};
         for (const auto& [make, first, second] : cases) {
           auto model = Perceptron(run);
           auto engine = run.Open();
           auto own = make(model->parameters());
           engine->Attach(*model, *own);
           Train(run, model, *own, 0, 2);
           first(own->param_groups()[0].options());
           Train(run, model, *own, 2, 4);
           second(own->param_groups()[0].options());
           Train(run, model, *own, 4, 6);
           run.See(*model);
         }
       }},
      {"two_kinds_side_by_side",
       [](Run& run) {
         auto model = Perceptron(run);
         std::vector<Tensor> weights, biases;
         for (const Tensor& parameter : model->parameters())
           (parameter.dim() > 1 ? weights : biases).push_back(parameter);
         auto of_weights = AdamW(weights), of_biases = Momentum(biases);
         auto engine = run.Open();
         engine->Attach(*model, *of_weights);
         engine->Attach(*model, *of_biases);
         for (int step = 0; step < 3; ++step) {
           const Tensor loss = Loss(run, model, step);
           loss.backward();
           of_weights->step();
           of_biases->step();
           of_weights->zero_grad();
           of_biases->zero_grad();
           run.See(loss);
         }
         for (const Tensor& weight : weights) run.See(engine->Gather(weight, "exp_avg"));
         for (const Tensor& bias : biases) run.See(engine->Gather(bias, "momentum_buffer"));
         for (const Tensor& parameter : model->parameters())
           run.See(engine->Gather(parameter, "master"));
         run.See(*model);
       }},
      // A group's parameters that were frozen stand before those that were not.
      {"thawed_for_the_next_optimizer",
       [](Run& run) {
         auto model = Perceptron(run);
         SetTrained(model, 0, false);
         auto engine = run.Open();
         auto own = Adam(model->parameters());
         engine->Attach(*model, *own);
         Train(run, model, *own, 0, 2);
         SetTrained(model, 0, true);
         own.reset();
         own = SlowAdam(model->parameters());
         engine->Attach(*model, *own);
         Train(run, model, *own, 2, 4);
         run.See(*model);
       }},
      {"thawed_after_a_file",
       [](Run& run) {
         auto model = Perceptron(run);
         SetTrained(model, 2, false);
         auto engine = run.Open();
         auto own = Adam(model->parameters());
         engine->Attach(*model, *own);
         Train(run, model, *own, 0, 2);
         std::stringstream file;
         torch::save(*own, file);
         Train(run, model, *own, 2, 3);
         torch::load(*own, file);
         SetTrained(model, 2, true);
         Train(run, model, *own, 3, 5);
         run.See(*model);
       }},
      {"resumed_within_a_phase_of_another_kind",
       [](Run& run) { ResumeBetweenPhases(run, Adam, RmsProp, "128MiB"); }},
      {"resumed_between_phases", [](Run& run) { ResumeBetweenPhases(run, Adam, SlowAdam); }},
      {"resumed_before_one_of_both", ResumeBeforeOneOfBoth},
      {"lbfgs_for_each_epoch",
       [](Run& run) {
         OneForEachEpoch(run, {Lbfgs, Lbfgs, Lbfgs, Lbfgs});
       }},
      {"another_kind_for_each_epoch",
       [](Run& run) {
         OneForEachEpoch(run, {Adam, Momentum, Momentum, Momentum});
       }},
      // Of 16-bit weights it has masters.
      {"resumed_within_a_phase_that_keeps_nothing",
       [](Run& run) { ResumeBetweenPhases(run, Adam, Sgd, "128MiB"); }},
  };
}

}  // namespace offload::battery

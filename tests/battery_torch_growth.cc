#include "tests/battery_torch_growth.h"

#include <torch/optim.h>

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

namespace offload::battery {
namespace {

std::unique_ptr<optim::Optimizer> Adam(std::vector<Tensor> parameters) {
  return std::make_unique<optim::Adam>(std::move(parameters), optim::AdamOptions(1e-2));
}

// A layer and a normalisation with buffers, whose values a seed tells.
void Append(const Run& run, nn::Sequential& model, uint64_t seed) {
  torch::manual_seed(seed);
  model->push_back(run.Cast(nn::Linear(kWidth, kWidth)));
  model->push_back(run.Cast(nn::BatchNorm1d(kWidth)));
}

std::vector<Tensor> LastTwo(const nn::Sequential& model) {
  std::vector<Tensor> parameters;
  for (size_t at = model->size() - 2; at < model->size(); ++at) {
    for (const Tensor& parameter : model->ptr(at)->parameters()) parameters.push_back(parameter);
  }
  return parameters;
}

// The optimizer gets what Append() makes.
void Grow(const Run& run, nn::Sequential& model, optim::Optimizer& own, uint64_t seed) {
  Append(run, model, seed);
  own.add_param_group(optim::OptimizerParamGroup(LastTwo(model)));
}

// Another head with the same name, of another width.
struct Classifier : nn::Module {
  explicit Classifier(const Run& run) {
    torch::manual_seed(5);
    body = register_module("body", run.Cast(nn::Linear(kWidth, kInner)));
    head = register_module("head", run.Cast(nn::Linear(kInner, 4)));
  }
  void Widen(const Run& run) {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(6);
    nn::Linear wider = run.Cast(nn::Linear(kInner, 7));
    wider->weight.slice(0, 0, 4).copy_(head->weight);
    wider->bias.slice(0, 0, 4).copy_(head->bias);
    head = replace_module("head", wider);
  }
  Tensor forward(const Tensor& x) { return head(torch::tanh(body(x))); }
  nn::Linear body{nullptr}, head{nullptr};
};

void TrainClassifier(Run& run, Classifier& model, optim::Optimizer& own, uint64_t begin,
                     uint64_t end) {
  for (uint64_t batch = begin; batch < end; ++batch) {
    const Tensor loss = Mean(model.forward(run.Noise(batch, {6, kWidth})));
    loss.backward();
    own.step();
    own.zero_grad();
    run.See(loss);
  }
}

// Points that are pruned and split while they are trained: other tensors take the places of all
// parameters, in the module and in their groups, and each begins with the rows of the optimizer's
// state that are its.
struct Points : nn::Module {
  explicit Points(const Run& run) {
    register_parameter("place", run.Noise(5, {kInner, 16}));
    register_parameter("colour", run.Noise(6, {kInner, kWidth}));
  }
  Tensor forward(const Tensor& x) {
    const Tensor near = torch::softmax(x.mm(parameters_["place"].t()), 1);
    return near.mm(parameters_["colour"]);
  }
  void Replace(optim::Optimizer& own, const Tensor& rows, size_t kept) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor old = parameters_.values()[i];
      const Tensor made = old.index_select(0, rows).requires_grad_(true);
      auto& states = own.state();
      const auto& state =
          static_cast<const optim::AdamParamState&>(*states.at(old.unsafeGetTensorImpl()));
      const auto select = [&](const Tensor& values) {
        const Tensor selected = values.index_select(0, rows);
        selected.slice(0, static_cast<int64_t>(kept)).zero_();
        return selected;
      };
      auto next = std::make_unique<optim::AdamParamState>();
      next->step(state.step());
      next->exp_avg(select(state.exp_avg()));
      next->exp_avg_sq(select(state.exp_avg_sq()));
      states.erase(old.unsafeGetTensorImpl());
      states[made.unsafeGetTensorImpl()] = std::move(next);
      own.param_groups()[i].params() = {made};
      parameters_[parameters_.keys()[i]] = made;
    }
  }
};

void ReplacePointsWithTheirState(Run& run) {
  auto model = std::make_shared<Points>(run);
  std::vector<optim::OptimizerParamGroup> groups;
  for (const Tensor& parameter : model->parameters())
    groups.emplace_back(std::vector<Tensor>{parameter});
  optim::Adam own(groups, optim::AdamOptions(1e-2));
  auto engine = run.Open();
  engine->Attach(*model, own);
  for (uint64_t batch = 0; batch < 4; ++batch) {
    const Tensor loss = Mean(model->forward(run.Noise(batch, {6, 16})) - 1);
    loss.backward();
    own.step();
    own.zero_grad();
    run.See(loss);
    if (batch == 1) {
      const Tensor kept = torch::arange(3, 500);
      model->Replace(own, torch::cat({kept, torch::arange(40)}), 497);
    }
  }
  run.See(*model);
}

void AddAWiderHead(Run& run) {
  auto model = std::make_shared<Classifier>(run);
  auto own = Adam(model->parameters());
  auto engine = run.Open();
  engine->Attach(*model, *own);
  TrainClassifier(run, *model, *own, 0, 2);
  model->Widen(run);
  own->add_param_group(optim::OptimizerParamGroup(model->head->parameters()));
  TrainClassifier(run, *model, *own, 2, 5);
  run.See(*model);
  run.See(static_cast<double>(engine->step()));
}

// Nothing has touched the first head when another takes its name: of a new job, and of one that
// goes on.
void ReplaceTheHeadAtOnce(Run& run, bool goes_on) {
  std::shared_ptr<Classifier> model;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> own;
  const auto attach = [&] {
    own.reset();
    own = Adam(model->parameters());
    engine->Attach(*model, *own);
  };
  const auto begin = [&](bool is_first) {
    own.reset();
    engine.reset();
    model = std::make_shared<Classifier>(run);
    engine = is_first ? run.Open() : run.Reopen();
    attach();
  };
  begin(/*is_first=*/true);
  if (goes_on) TrainClassifier(run, *model, *own, 0, 2);
  if (goes_on && !IsInMemory()) begin(/*is_first=*/false);
  torch::manual_seed(7);
  model->head = model->replace_module("head", run.Cast(nn::Linear(kInner, 6)));
  attach();
  TrainClassifier(run, *model, *own, 2, 4);
  run.See(*model);
}

// What SaveWeights() writes into a module is seen.
void SeeSaved(Run& run, Engine& engine, nn::Module& into) {
  const std::filesystem::path folder =
      std::filesystem::path(run.options().nvme_path) / "saved_as_it_is_now";
  engine.SaveWeights(folder.string());
  LoadWeights(into, folder.string());
  std::filesystem::remove_all(folder);
  run.See(into);
}

// With a frozen one that no optimizer has, and after one of the first two has come back.
void SaveWithOtherHeads(Run& run) {
  auto model = std::make_shared<Classifier>(run);
  const nn::Linear first = model->head;
  const nn::Linear second = run.Cast(nn::Linear(kInner, 4));
  model->register_module("other", second);
  auto own = Adam(model->parameters());
  auto engine = run.Open();
  engine->Attach(*model, *own);
  TrainClassifier(run, *model, *own, 0, 2);
  model->head = model->replace_module("head", second);
  model->replace_module("other", first);
  TrainClassifier(run, *model, *own, 2, 4);
  torch::manual_seed(7);
  nn::Linear frozen = model->register_module("frozen", run.Cast(nn::Linear(4, 4)));
  for (Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  Classifier another(run);
  another.register_module("other", run.Cast(nn::Linear(kInner, 4)));
  another.register_module("frozen", run.Cast(nn::Linear(4, 4)));
  SeeSaved(run, *engine, another);
  TrainClassifier(run, *model, *own, 4, 5);
  model->head = model->replace_module("head", first);
  model->replace_module("other", second);
  SeeSaved(run, *engine, another);
  run.See(*model);
}

// A run that ends behind the growth, or before its first step, and one that goes on.
void ResumeGrown(Run& run, bool with_a_step) {
  nn::Sequential model(nullptr);
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> own;
  const auto begin = [&](bool is_first, bool grown) {
    if (IsInMemory() && !is_first) return;
    own.reset();
    engine.reset();
    model = Perceptron(run);
    if (grown) Append(run, model, 21);
    engine = is_first ? run.Open() : run.Reopen();
    own = Adam(model->parameters());
    engine->Attach(*model, *own);
  };
  begin(/*is_first=*/true, /*grown=*/false);
  Train(run, model, *own, 0, 2);
  if (with_a_step || IsInMemory()) Grow(run, model, *own, 21);
  if (with_a_step) Train(run, model, *own, 2, 4);
  if (!with_a_step && !IsInMemory()) {
    nn::Linear beside = run.Cast(nn::Linear(4, 4));  // which has no step before the run ends
    auto others = Adam(beside->parameters());
    engine->Attach(*beside, *others);
    others.reset();
  }
  begin(/*is_first=*/false, /*grown=*/with_a_step);
  if (!with_a_step && !IsInMemory()) Grow(run, model, *own, 21);
  Train(run, model, *own, with_a_step ? 4 : 2, 6);
  run.See(*model);
}

}  // namespace

Programs GrowthPrograms() {
  return {
      {"grown_by_a_group",
       [](Run& run) {
         auto model = Perceptron(run);
         auto own = Adam(model->parameters());
         auto engine = run.Open();
         engine->Attach(*model, *own);
         Train(run, model, *own, 0, 2);
         for (const uint64_t seed : {21, 22}) {
           Grow(run, model, *own, seed);
           Train(run, model, *own, seed, seed + 2);
         }
         run.See(*model);
         for (const Tensor& parameter : model->parameters())
           run.See(engine->Gather(parameter, "exp_avg"));
       }},
      {"grown_for_another_optimizer",
       [](Run& run) {
         auto model = Perceptron(run);
         auto own = Adam(model->parameters());
         auto engine = run.Open();
         engine->Attach(*model, *own);
         Train(run, model, *own, 0, 2);
         own.reset();
         Append(run, model, 21);
         own = Adam(model->parameters());
         engine->Attach(*model, *own);
         Train(run, model, *own, 2, 4);
         run.See(*model);
       }},
      {"another_module_comes",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto own = engine->AdamW(*model, optim::AdamWOptions(1e-2));
         Train(run, model, *own, 0, 2);
         torch::manual_seed(21);
         nn::Linear behind = run.Cast(nn::Linear(kWidth, kWidth));
         auto others = engine->AdamW(*behind, optim::AdamWOptions(1e-2));
         for (uint64_t batch = 2; batch < 4; ++batch) {
           const Tensor loss = Mean(behind(model->forward(run.Noise(batch, {6, kWidth}))));
           loss.backward();
           own->step();
           others->step();
           own->zero_grad();
           others->zero_grad();
           run.See(loss);
         }
         run.See(*model);
         run.See(*behind);
       }},
      {"a_head_with_the_name_of_another", AddAWiderHead},
      {"points_replaced_with_their_state", ReplacePointsWithTheirState},
      {"a_head_replaced_before_its_first_use",
       [](Run& run) { ReplaceTheHeadAtOnce(run, /*goes_on=*/false); }},
      {"a_head_replaced_where_a_job_goes_on",
       [](Run& run) { ReplaceTheHeadAtOnce(run, /*goes_on=*/true); }},
      {"grown_and_resumed", [](Run& run) { ResumeGrown(run, /*with_a_step=*/true); }},
      {"resumed_before_the_first_step_with_more",
       [](Run& run) { ResumeGrown(run, /*with_a_step=*/false); }},
      {"grown_and_saved",
       [](Run& run) {
         auto model = Perceptron(run);
         auto own = Adam(model->parameters());
         auto engine = run.Open();
         engine->Attach(*model, *own);
         Train(run, model, *own, 0, 2);
         Grow(run, model, *own, 21);
         Train(run, model, *own, 2, 3);
         const std::filesystem::path folder =
             std::filesystem::path(run.options().nvme_path) / "grown_and_saved";
         engine->SaveWeights(folder.string());
         auto another = Perceptron(run);
         Append(run, another, 22);
         LoadWeights(*another, folder.string());
         std::filesystem::remove_all(folder);
         run.See(*another);
         run.See(*model);
       }},
      {"saved_after_modules_have_changed_places", SaveWithOtherHeads},
      {"grown_beside_a_module_held_by_value",
       [](Run& run) {
         auto model = Perceptron(run);
         nn::LinearImpl by_value(4, 4);
         by_value.to(run.dtype());
         auto engine = run.Open();
         auto own = Adam(model->parameters()), others = Adam(by_value.parameters());
         engine->Attach(*model, *own);
         engine->Attach(by_value, *others);
         Train(run, model, *own, 0, 2);
         Grow(run, model, *own, 21);
         Train(run, model, *own, 2, 4);
         Mean(by_value.forward(run.Noise(7, {2, 4}))).backward();
         others->step();
         run.See(*model);
         run.See(by_value);
       }},
      {.name = "grown_where_nobody_finds_it",
       .run =
           [](Run& run) {
             nn::LinearImpl model(kWidth, kWidth);
             model.to(run.dtype());
             auto engine = run.Open();
             auto own = Adam(model.parameters());
             engine->Attach(model, *own);
             Mean(model.forward(run.Noise(1, {2, kWidth}))).backward();
             own->step();
             own->zero_grad();
             Tensor scale = run.Noise(2, {kWidth}).set_requires_grad(true);
             own->add_param_group(optim::OptimizerParamGroup({scale}));
             Mean(model.forward(run.Noise(1, {2, kWidth})) * scale).backward();
             own->step();
           },
       .refused = 1601,
       .fp32_only = true},
  };
}

}  // namespace offload::battery

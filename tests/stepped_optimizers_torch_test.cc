// Optimizers that have stepped in memory before their model is attached, and files of optimizers:
// what torch has kept goes into the job, and training goes on as if nothing had happened. fp32 is
// compared with plain torch, bf16 with the same in memory (OFFLOADD_DISABLE=1), bit by bit.

#include <gtest/gtest.h>
#include <offload/torch.h>
#include <torch/nn/modules.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using at::Tensor;
using Optimizer = std::shared_ptr<optim::Optimizer>;
using Make = std::function<Optimizer(std::vector<Tensor>)>;

constexpr int64_t kBefore = 3, kAfter = 3;  // steps, around the attach

// A weight of two extents, small ones that are bundled, and a layer that takes no part at first.
struct Model : nn::Module {
  explicit Model(at::ScalarType dtype) {
    torch::manual_seed(7);
    first = register_module("first", nn::Linear(300, 900));
    last = register_module("last", nn::Linear(900, 10));
    late = register_module("late", nn::Linear(300, 10));
    to(dtype);
  }
  // Of one step's batch.
  Tensor Loss(int64_t step) {
    torch::manual_seed(1000 + step);
    const Tensor x = torch::randn({4, 300}).to(first->weight.scalar_type());
    Tensor y = last(torch::tanh(first(x)));
    if (step > 0) y = y + late(x);
    return y.square().mean();
  }
  nn::Linear first{nullptr}, last{nullptr}, late{nullptr};
};

// Losses, then weights.
using Log = std::vector<Tensor>;

void Train(Model& model, optim::Optimizer& optimizer, int64_t from, int64_t to, Log* log) {
  for (int64_t step = from; step < to; ++step) {
    optimizer.zero_grad();
    const Tensor loss = model.Loss(step);
    loss.backward();
    optimizer.step();
    log->push_back(loss.detach().clone());
  }
}

void AddWeights(const Model& model, Log* log) {
  const torch::NoGradGuard no_grad;
  for (const Tensor& parameter : model.parameters()) log->push_back(parameter * 1);
}

void ExpectSame(const Log& expected, const Log& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(expected[i], actual[i]))
        << "entry " << i << " of " << expected.size() << " differs in "
        << (expected[i] != actual[i]).sum().item<int64_t>() << " of " << expected[i].numel();
  }
}

// A trainer in memory that nothing happens to.
Log Uninterrupted(const Make& make) {
  Model model(at::kFloat);
  const Optimizer optimizer = make(model.parameters());
  Log log;
  Train(model, *optimizer, 0, kBefore + kAfter, &log);
  AddWeights(model, &log);
  return log;
}

std::string FloorOf(const Make& make, at::ScalarType dtype, const std::string& job) {
  SetOffloading(true);
  Model model(dtype);
  const Optimizer optimizer = make(model.parameters());
  auto engine = Engine::Open(PoolOptions(job + "_floor", "1GiB"));
  engine->Attach(model, *optimizer);
  return std::to_string(engine->plan().floor_bytes);
}

Log AttachedInTheMiddle(const Make& make, at::ScalarType dtype, bool offloading,
                        const Options& options) {
  SetOffloading(offloading);
  Model model(dtype);
  const Optimizer optimizer = make(model.parameters());
  Log log;
  Train(model, *optimizer, 0, kBefore, &log);
  const size_t kept = optimizer->state().size();
  auto engine = Engine::Open(options);
  engine->Attach(model, *optimizer);
  EXPECT_EQ(optimizer->state().size(), kept + 1) << "and a mark";
  Train(model, *optimizer, kBefore, kBefore + kAfter, &log);
  EXPECT_EQ(engine->step(), kAfter);
  AddWeights(model, &log);
  return log;
}

// The job is closed after a step; another process would begin as this does, with steps of its own.
Log ResumedAfterAStep(const Make& make, const Options& options) {
  SetOffloading(true);
  Log log;
  {
    Model model(at::kFloat);
    const Optimizer optimizer = make(model.parameters());
    Train(model, *optimizer, 0, kBefore, &log);
    auto engine = Engine::Open(options);
    engine->Attach(model, *optimizer);
    Train(model, *optimizer, kBefore, kBefore + 1, &log);
  }
  Model model(at::kFloat);
  const Optimizer optimizer = make(model.parameters());
  Log again;
  Train(model, *optimizer, 0, 2, &again);
  auto engine = Engine::Open(options);
  engine->Attach(model, *optimizer);
  EXPECT_EQ(engine->step(), 1);
  Train(model, *optimizer, kBefore + 1, kBefore + kAfter, &log);
  AddWeights(model, &log);
  return log;
}

struct Case {
  const char* name;
  Make make;
};

template <class Class, class ClassOptions>
Make Maker(ClassOptions options) {
  return [options](std::vector<Tensor> parameters) {
    return std::make_shared<Class>(std::move(parameters), options);
  };
}

const Case kCases[] = {
    {"adamw", Maker<optim::AdamW>(optim::AdamWOptions(1e-2))},
    {"adamw_amsgrad", Maker<optim::AdamW>(optim::AdamWOptions(1e-2).amsgrad(true))},
    {"adam", Maker<optim::Adam>(optim::AdamOptions(1e-2).weight_decay(0.1))},
    {"sgd", Maker<optim::SGD>(optim::SGDOptions(1e-2).momentum(0.9).dampening(0.1))},
    {"plain_sgd", Maker<optim::SGD>(optim::SGDOptions(1e-2))},
    {"adagrad", Maker<optim::Adagrad>(
                    optim::AdagradOptions(1e-2).initial_accumulator_value(0.5).lr_decay(0.1))},
    {"rmsprop", Maker<optim::RMSprop>(optim::RMSpropOptions(1e-3).centered(true).momentum(0.9))},
};

class SteppedOptimizerTest : public testing::TestWithParam<Case> {};

TEST_P(SteppedOptimizerTest, GoesOnAsIfItHadNeverBeenAttached) {
  const Make& make = GetParam().make;
  const std::string job = GetParam().name;
  const Log expected = Uninterrupted(make);
  ExpectSame(expected, AttachedInTheMiddle(make, at::kFloat, false, PoolOptions(job, "1GiB")));
  ExpectSame(expected, AttachedInTheMiddle(make, at::kFloat, true, PoolOptions(job, "1GiB")));
  const std::string floor = FloorOf(make, at::kFloat, job);
  ExpectSame(expected,
             AttachedInTheMiddle(make, at::kFloat, true, PoolOptions(job + "_tight", floor)));
  ExpectSame(expected, ResumedAfterAStep(make, PoolOptions(job + "_resumed", floor)));
}

TEST_P(SteppedOptimizerTest, BFloat16GoesOnAsInMemoryOnMastersFromThere) {
  const Make& make = GetParam().make;
  const std::string job = std::string(GetParam().name) + "_bf16";
  const Log expected = AttachedInTheMiddle(make, at::kBFloat16, false, PoolOptions(job, "1GiB"));
  const std::string floor = FloorOf(make, at::kBFloat16, job);
  ExpectSame(expected, AttachedInTheMiddle(make, at::kBFloat16, true, PoolOptions(job, "1GiB")));
  ExpectSame(expected,
             AttachedInTheMiddle(make, at::kBFloat16, true, PoolOptions(job + "_tight", floor)));
}

// Of a trainer in memory after its first steps.
struct Files {
  std::string module, optimizer;
};

Files SavedInMemory(const Make& make, int64_t steps) {
  Model model(at::kFloat);
  const Optimizer optimizer = make(model.parameters());
  Log log;
  Train(model, *optimizer, 0, steps, &log);
  std::ostringstream module, kept;
  torch::serialize::OutputArchive archive;
  model.save(archive);
  archive.save_to(module);
  torch::save(*optimizer, kept);
  return {module.str(), kept.str()};
}

void Load(const Files& files, Model& model, optim::Optimizer& optimizer) {
  std::istringstream module(files.module), kept(files.optimizer);
  torch::serialize::InputArchive archive;
  archive.load_from(module);
  model.load(archive);
  torch::load(optimizer, kept);
}

TEST_P(SteppedOptimizerTest, AFileOfMemoryIsLoadedIntoAJob) {
  const Make& make = GetParam().make;
  const Files files = SavedInMemory(make, kBefore);
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    Model model(at::kFloat);
    const Optimizer optimizer = make(model.parameters());
    auto engine = Engine::Open(PoolOptions(std::string(GetParam().name) + "_loaded", "256MiB"));
    engine->Attach(model, *optimizer);
    Log log;
    Train(model, *optimizer, 40, 42, &log);  // which is forgotten
    Load(files, model, *optimizer);
    log.assign(kBefore, Tensor());
    Train(model, *optimizer, kBefore, kBefore + kAfter, &log);
    AddWeights(model, &log);
    Log expected = Uninterrupted(make);
    for (int64_t i = 0; i < kBefore; ++i) log[i] = expected[i];
    ExpectSame(expected, log);
  }
}

TEST_P(SteppedOptimizerTest, AFileOfAJobIsLoadedInMemory) {
  const Make& make = GetParam().make;
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    std::stringstream kept;
    Log log;
    Model other(at::kFloat);
    {
      Model model(at::kFloat);
      const Optimizer optimizer = make(model.parameters());
      auto engine = Engine::Open(PoolOptions(std::string(GetParam().name) + "_saved", "256MiB"));
      engine->Attach(model, *optimizer);
      Train(model, *optimizer, 0, kBefore, &log);
      torch::save(*optimizer, kept);
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < model.parameters().size(); ++i)
        other.parameters()[i].copy_(model.parameters()[i]);
    }
    const Optimizer optimizer = make(other.parameters());
    torch::load(*optimizer, kept);
    Train(other, *optimizer, kBefore, kBefore + kAfter, &log);
    AddWeights(other, &log);
    ExpectSame(Uninterrupted(make), log);
  }
}

// ---- What the trainer sees and changes of a state -----------------------------------------------

enum class Where { kPlain, kInMemory, kOffloaded };

// `edit` comes between the steps, and again before the last one.
Log EditedBetweenSteps(const Make& make, Where where, const std::string& job,
                       const std::function<void(Model&, optim::Optimizer&)>& edit) {
  SetOffloading(where == Where::kOffloaded);
  Model model(at::kFloat);
  const Optimizer optimizer = make(model.parameters());
  std::shared_ptr<Engine> engine;
  if (where != Where::kPlain) {
    engine = Engine::Open(PoolOptions(job, "256MiB"));
    engine->Attach(model, *optimizer);
  }
  Log log;
  Train(model, *optimizer, 0, kBefore, &log);
  edit(model, *optimizer);
  Train(model, *optimizer, kBefore, kBefore + kAfter, &log);
  edit(model, *optimizer);
  Train(model, *optimizer, kBefore + kAfter, kBefore + kAfter + 1, &log);
  AddWeights(model, &log);
  return log;
}

void ExpectSameEverywhere(const std::function<Log(Where)>& train) {
  const Log expected = train(Where::kPlain);
  ExpectSame(expected, train(Where::kInMemory));
  ExpectSame(expected, train(Where::kOffloaded));
}
void ExpectSameEverywhere(const Make& make, const std::string& job,
                          const std::function<void(Model&, optim::Optimizer&)>& edit) {
  ExpectSameEverywhere([&](Where where) { return EditedBetweenSteps(make, where, job, edit); });
}

// A model and its Adam, attached to a job unless it is plain.
struct AdamRun {
  AdamRun(Where where, const std::string& job) {
    SetOffloading(where == Where::kOffloaded);
    if (where == Where::kPlain) return;
    engine = Engine::Open(PoolOptions(job, "256MiB"));
    engine->Attach(model, optimizer);
  }

  Model model{at::kFloat};
  optim::Adam optimizer{model.parameters(), optim::AdamOptions(1e-2)};
  std::shared_ptr<Engine> engine;
};

TEST_P(SteppedOptimizerTest, WhatIsErasedOfItsStateBeginsAnew) {
  const std::string name = GetParam().name;
  const bool keeps = name != "plain_sgd";
  const bool may_lose = name != "adagrad";  // whose step() needs a state of every parameter
  ExpectSameEverywhere(GetParam().make, name + "_erased", [&](Model& model, auto& optimizer) {
    auto& state = optimizer.state();
    const auto found = state.find(model.first->weight.unsafeGetTensorImpl());
    ASSERT_EQ(found != state.end(), keeps);
    if (keeps && may_lose) state.erase(found);
  });
}

INSTANTIATE_TEST_SUITE_P(Optimizers, SteppedOptimizerTest, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST(OptimizerStateTest, MomentsAreSeenAndEditsOfThemCount) {
  Log seen[2];
  for (const Where where : {Where::kPlain, Where::kInMemory, Where::kOffloaded}) {
    Log& log = seen[where == Where::kPlain ? 0 : 1];
    log = EditedBetweenSteps(
        Maker<optim::Adam>(optim::AdamOptions(1e-2)), where, "moments",
        [](Model& model, optim::Optimizer& optimizer) {
          const auto of = [&](const Tensor& parameter) -> optim::AdamParamState& {
            return static_cast<optim::AdamParamState&>(
                *optimizer.state().at(parameter.unsafeGetTensorImpl()));
          };
          for (const Tensor& parameter : model.parameters()) {
            EXPECT_EQ(of(parameter).exp_avg().sizes(), parameter.sizes());
            of(parameter).exp_avg().mul_(of(parameter).exp_avg_sq().mean() + 0.5);
          }
          of(model.last->weight).exp_avg_sq().data_ptr<float>()[3] = 0.25f;
          of(model.last->bias).step(of(model.last->bias).step() + 7);
          for (auto& [key, state] : optimizer.state())
            static_cast<optim::AdamParamState&>(*state).exp_avg_sq().mul_(2);
        });
    if (where != Where::kPlain) ExpectSame(seen[0], log);
  }
}

// References to the map and to an object of it, and a tensor, which are kept over steps and a file.
TEST(OptimizerStateTest, WhatIsHeldOfAStateFollowsTheSteps) {
  const auto train = [](Where where) {
    AdamRun run(where, "held");
    Model& model = run.model;
    optim::Adam& optimizer = run.optimizer;
    Log log;
    Train(model, optimizer, 0, 1, &log);
    const auto& all = optimizer.state();
    auto& state =
        static_cast<optim::AdamParamState&>(*all.at(model.first->weight.unsafeGetTensorImpl()));
    const Tensor held = state.exp_avg();
    for (int64_t step = 1; step < 5; ++step) {
      Train(model, optimizer, step, step + 1, &log);
      log.push_back(held.clone());
      log.push_back(state.exp_avg_sq().clone());
      log.push_back(at::full({1}, static_cast<double>(state.step())));
      log.push_back(
          static_cast<const optim::AdamParamState&>(*all.at(model.last->bias.unsafeGetTensorImpl()))
              .exp_avg()
              .clone());
      std::ostringstream file;
      torch::save(optimizer, file);
      held.mul_(0.5);
      state.exp_avg_sq().mul_(2);
    }
    AddWeights(model, &log);
    return log;
  };
  ExpectSameEverywhere(train);
}

// The options that a closure leaves count, and what it sees is of the step before.
TEST(OptimizerStateTest, AClosureSeesTheStateAndSetsOptions) {
  const auto train = [](Where where) {
    AdamRun run(where, "closure");
    Model& model = run.model;
    optim::Adam& optimizer = run.optimizer;
    Log log;
    const auto see = [&] {
      for (const Tensor& parameter : model.parameters()) {
        const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (found == optimizer.state().end()) continue;
        log.push_back(static_cast<optim::AdamParamState&>(*found->second).exp_avg().clone());
      }
    };
    for (int64_t step = 0; step < 4; ++step) {
      log.push_back(optimizer.step([&] {
        optimizer.zero_grad();
        Tensor loss = model.Loss(step);
        loss.backward();
        see();
        optimizer.param_groups()[0].options().set_lr(step == 2 ? 3e-3 : 1e-2);
        return loss;
      }));
      see();
    }
    AddWeights(model, &log);
    return log;
  };
  ExpectSameEverywhere(train);
}

TEST(OptimizerStateTest, ARunThatGoesOnShowsTheStateOfTheJobBeforeItsFirstStep) {
  SetOffloading(true);
  Log log, kept;
  for (int run = 0; run < 3; ++run) {
    Model model(at::kFloat);
    auto engine = Engine::Open(PoolOptions("shown", "256MiB"));
    std::shared_ptr<optim::Optimizer> optimizer;
    if (run == 2) {  // the engine's own
      optimizer = engine->AdamW(model, optim::AdamWOptions(1e-2));
    } else {
      optimizer = std::make_shared<optim::AdamW>(model.parameters(), optim::AdamWOptions(1e-2));
      engine->Attach(model, *optimizer);
    }
    if (run == 0) Train(model, *optimizer, 0, kBefore, &log);
    Log shown;
    for (const Tensor& parameter : model.parameters()) {
      const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
      ASSERT_NE(found, optimizer->state().end());
      const auto& state = static_cast<const optim::AdamWParamState&>(*found->second);
      shown.push_back(state.exp_avg_sq().clone());
      shown.push_back(torch::tensor(state.step()));
      EXPECT_TRUE(torch::equal(state.exp_avg(), engine->Gather(parameter, "exp_avg")));
    }
    if (run == 0) kept = shown;
    ExpectSame(kept, shown);
  }
}

TEST(OptimizerStateTest, EditsOfWhatTheEnginesOwnOptimizerShowsCount) {
  const auto train = [](Where where) {
    SetOffloading(where == Where::kOffloaded);
    Model model(at::kFloat);
    std::shared_ptr<optim::Optimizer> optimizer;
    std::shared_ptr<Engine> engine;
    if (where == Where::kPlain) {
      optimizer =
          std::make_shared<optim::SGD>(model.parameters(), optim::SGDOptions(1e-2).momentum(0.9));
    } else {
      engine = Engine::Open(PoolOptions("own_shown", "256MiB"));
      optimizer = engine->SGD(model, optim::SGDOptions(1e-2).momentum(0.9));
      EXPECT_TRUE(optimizer->state().empty());
    }
    Log log;
    for (int64_t step = 0; step < 4; ++step) {
      Train(model, *optimizer, step, step + 1, &log);
      auto& state = optimizer->state();
      for (const Tensor& parameter : model.parameters()) {
        const auto found = state.find(parameter.unsafeGetTensorImpl());
        if (found == state.end()) continue;
        auto& buffer = static_cast<optim::SGDParamState&>(*found->second).momentum_buffer();
        log.push_back(buffer.clone());
        if (step == 1) buffer.mul_(0.5);
        if (step == 2 && parameter.dim() == 2) state.erase(found);
      }
    }
    AddWeights(model, &log);
    return log;
  };
  ExpectSameEverywhere(train);
}

// ---- Sparse gradients ---------------------------------------------------------------------------

struct SparseModel : nn::Module {
  SparseModel() {
    torch::manual_seed(7);
    words = register_module("words", nn::Embedding(nn::EmbeddingOptions(3000, 100).sparse(true)));
    bags = register_module(
        "bags", nn::EmbeddingBag(nn::EmbeddingBagOptions(500, 100).sparse(true).mode(torch::kSum)));
    last = register_module("last", nn::Linear(100, 7));
  }
  // Of indices that occur often, so that most rows are added more than once.
  Tensor Loss(int64_t step) {
    torch::manual_seed(1000 + step);
    const Tensor x =
        words(torch::randint(40, {64})) + bags(torch::randint(step % 2 == 0 ? 30 : 500, {64, 3}));
    return last(x).square().mean();
  }
  nn::Embedding words{nullptr};
  nn::EmbeddingBag bags{nullptr};
  nn::Linear last{nullptr};
};

Log TrainSparse(const Make& make, Where where, const std::string& job, const std::string& ram) {
  SetOffloading(where == Where::kOffloaded);
  SparseModel model;
  const Optimizer optimizer = make(model.parameters());
  std::shared_ptr<Engine> engine;
  if (where != Where::kPlain) {
    engine = Engine::Open(PoolOptions(job, ram));
    engine->Attach(model, *optimizer);
  }
  Log log;
  for (int64_t step = 0; step < 5; ++step) {
    for (int64_t micro_batch = 0; micro_batch <= step % 2; ++micro_batch) {
      const Tensor loss = model.Loss(2 * step + micro_batch);
      loss.backward();
      log.push_back(loss.detach().clone());
    }
    if (step == 3) {
      for (auto& group : optimizer->param_groups()) group.options().set_lr(0.3);
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  for (const Tensor& parameter : model.parameters()) log.push_back(parameter.detach().clone());
  return log;
}

TEST(SparseGradientsTest, AreTakenAsTorchTakesThem) {
  const std::pair<const char*, Make> makes[] = {
      {"sparse_sgd", Maker<optim::SGD>(optim::SGDOptions(0.5))},
      {"sparse_momentum", Maker<optim::SGD>(optim::SGDOptions(0.5).momentum(0.9).nesterov(true))},
      {"sparse_adagrad", Maker<optim::Adagrad>(optim::AdagradOptions(0.1))},
      {"sparse_adagrad_with_sum",
       Maker<optim::Adagrad>(
           optim::AdagradOptions(0.1).initial_accumulator_value(0.3).lr_decay(0.1).eps(1e-6))}};
  for (const auto& [name, make] : makes) {
    SCOPED_TRACE(name);
    const Log expected = TrainSparse(make, Where::kPlain, name, "");
    ExpectSame(expected, TrainSparse(make, Where::kInMemory, name, "256MiB"));
    ExpectSame(expected, TrainSparse(make, Where::kOffloaded, name, "256MiB"));
  }
}

TEST(SparseGradientsTest, AreRefusedWhereTorchTakesNone) {
  const std::pair<const char*, Make> makes[] = {
      {"sparse_decayed_sgd", Maker<optim::SGD>(optim::SGDOptions(0.5).weight_decay(0.1))},
      {"sparse_decayed_adagrad",
       Maker<optim::Adagrad>(optim::AdagradOptions(0.1).weight_decay(0.1))}};
  for (const auto& [name, make] : makes) {
    for (const Where where : {Where::kInMemory, Where::kOffloaded}) {
      ExpectError(1604, "with weight_decay takes no sparse gradient",
                  [&] { TrainSparse(make, where, name, "256MiB"); });
    }
  }
}

// As torch's class, in the trainer's process; killed in between, it goes on with its sparse
// buffers.
TEST(SparseGradientsTest, MomentumOfAnOptimizerOfTheEngineIsThatOfTorch) {
  const auto options = optim::SGDOptions(0.5).momentum(0.9);
  const auto train = [&](Where where, std::vector<int64_t> parts) {
    SetOffloading(where == Where::kOffloaded);
    Log log;
    std::shared_ptr<SparseModel> model;
    Optimizer optimizer;
    std::shared_ptr<Engine> engine;
    int64_t step = 0;
    for (const int64_t end : parts) {
      optimizer.reset();
      engine.reset();
      model = std::make_shared<SparseModel>();
      if (where == Where::kPlain) {
        optimizer = std::make_shared<optim::SGD>(model->parameters(), options);
      } else {
        engine = Engine::Open(PoolOptions("sparse_given", "256MiB"));
        optimizer = engine->SGD(*model, options);
        EXPECT_EQ(engine->step(), step);
      }
      for (; step < end; ++step) {
        const Tensor loss = model->Loss(step);
        loss.backward();
        optimizer->step();
        optimizer->zero_grad();
        log.push_back(loss.detach().clone());
      }
    }
    for (const Tensor& parameter : model->parameters()) log.push_back(parameter.detach().clone());
    return log;
  };
  const Log expected = train(Where::kPlain, {5});
  ExpectSame(expected, train(Where::kInMemory, {5}));
  ExpectSame(expected, train(Where::kOffloaded, {2, 5}));
}

TEST(SparseGradientsTest, AreRefusedWhereNothingSaysThatMomentumWouldBeSparse) {
  struct Table : nn::Module {
    Table() { rows = register_parameter("rows", torch::ones({500, 100})); }
    Tensor rows;
  };
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    Table table;
    const auto engine = Engine::Open(PoolOptions("sparse_unsaid", "256MiB"));
    const auto optimizer = engine->SGD(table, optim::SGDOptions(0.5).momentum(0.9));
    const Tensor found = torch::embedding(table.rows, torch::randint(500, {64}),
                                          /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                                          /*sparse=*/true);
    found.square().mean().backward();
    ExpectError(1604, "let a torch::nn::Embedding or EmbeddingBag of the attached module",
                [&] { optimizer->step(); });
  }
}

// torch's buffer begins with the first step that has momentum, whatever went before it.
TEST(OptimizerStateTest, MomentumThatIsSwitchedOnLaterBeginsWithItsFirstStep) {
  const Make make = [](const std::vector<Tensor>& parameters) -> Optimizer {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>(parameters.begin(), parameters.begin() + 2),
                        std::make_unique<optim::SGDOptions>(0.05));
    groups.emplace_back(
        std::vector<Tensor>(parameters.begin() + 2, parameters.end()),
        std::make_unique<optim::SGDOptions>(optim::SGDOptions(0.05).momentum(0.9).dampening(0.1)));
    return std::make_shared<optim::SGD>(std::move(groups), optim::SGDOptions(0.05));
  };
  ExpectSameEverywhere(make, "momentum_later", [](Model&, optim::Optimizer& optimizer) {
    static_cast<optim::SGDOptions&>(optimizer.param_groups()[0].options())
        .momentum(0.8)
        .dampening(0.4);
  });
}

// All sums begin with the value of the defaults, also of what has its first gradient later.
TEST(OptimizerStateTest, SumsOfAdagradBeginAsTheDefaultsSay) {
  const Make make = [](const std::vector<Tensor>& parameters) -> Optimizer {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>(parameters.begin(), parameters.begin() + 2));
    groups.emplace_back(
        std::vector<Tensor>(parameters.begin() + 2, parameters.end()),
        std::make_unique<optim::AdagradOptions>(optim::AdagradOptions(0.05).lr_decay(0.1)));
    return std::make_shared<optim::Adagrad>(
        std::move(groups), optim::AdagradOptions(0.02).initial_accumulator_value(0.25));
  };
  ExpectSameEverywhere(make, "adagrad_groups", [](Model&, optim::Optimizer& optimizer) {
    static_cast<optim::AdagradOptions&>(optimizer.param_groups()[0].options())
        .initial_accumulator_value(0.75);
  });
}

// ---- Files of the engine's own optimizers -------------------------------------------------------

using Give = std::function<Optimizer(Engine&, nn::Module&)>;

struct Given {
  const char* name;
  Give give;
};

const Given kGiven[] = {
    {"adamw",
     [](Engine& engine, nn::Module& module) {
       return engine.AdamW(module, optim::AdamWOptions(1e-2).amsgrad(true));
     }},
    {"adam", [](Engine& engine,
                nn::Module& module) { return engine.Adam(module, optim::AdamOptions(1e-2)); }},
    {"sgd",
     [](Engine& engine, nn::Module& module) {
       return engine.SGD(module, optim::SGDOptions(1e-2).momentum(0.9));
     }},
    {"adagrad",
     [](Engine& engine, nn::Module& module) {
       return engine.Adagrad(module, optim::AdagradOptions(1e-2));
     }},
    {"rmsprop",
     [](Engine& engine, nn::Module& module) {
       return engine.RMSprop(module, optim::RMSpropOptions(1e-3).centered(true));
     }},
    {"lion",
     [](Engine& engine, nn::Module& module) {
       return engine.Lion(module, LionOptions(1e-3).weight_decay(0.1));
     }},
    {"lamb", [](Engine& engine, nn::Module& module) {
       return engine.LAMB(module, LAMBOptions(1e-3).eps(1e-5));
     }}};

class GivenOptimizerTest : public testing::TestWithParam<Given> {
 protected:
  // With a learning rate that only the file tells.
  static void SetRate(optim::Optimizer& optimizer, double rate) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
  }
};

// From a job or memory to another job or memory, all the same.
TEST_P(GivenOptimizerTest, AFileGoesOnInAnotherJob) {
  Log expected;
  for (const bool saves_offloaded : {false, true}) {
    SetOffloading(saves_offloaded);
    const std::string job = std::string(GetParam().name) + "_given";
    std::string module_file, kept_file;
    Log before;
    {
      Model model(at::kFloat);
      auto engine = Engine::Open(PoolOptions(job, "256MiB"));
      const Optimizer optimizer = GetParam().give(*engine, model);
      SetRate(*optimizer, 3e-3);
      Train(model, *optimizer, 0, kBefore, &before);
      std::ostringstream module, kept;
      torch::serialize::OutputArchive archive;
      model.save(archive);
      archive.save_to(module);
      torch::save(*optimizer, kept);
      EXPECT_EQ(optimizer->state().size(), model.parameters().size());
      module_file = module.str(), kept_file = kept.str();
      if (!saves_offloaded) {
        expected = before;
        Train(model, *optimizer, kBefore, kBefore + kAfter, &expected);
        AddWeights(model, &expected);
      }
    }
    for (const bool loads_offloaded : {false, true}) {
      SetOffloading(loads_offloaded);
      Model model(at::kFloat);
      auto engine =
          Engine::Open(PoolOptions(job + "_" + std::to_string(saves_offloaded), "256MiB"));
      const Optimizer optimizer = GetParam().give(*engine, model);
      Load({module_file, kept_file}, model, *optimizer);
      Log log = before;
      Train(model, *optimizer, kBefore, kBefore + kAfter, &log);
      AddWeights(model, &log);
      ExpectSame(expected, log);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, GivenOptimizerTest, testing::ValuesIn(kGiven),
                         [](const auto& info) { return info.param.name; });

TEST(GivenOptimizerFilesTest, AreThoseOfLibtorch) {
  Log log;
  std::stringstream kept;
  Model other(at::kFloat);
  SetOffloading(true);
  {
    Model model(at::kFloat);
    auto engine = Engine::Open(PoolOptions("given_libtorch", "256MiB"));
    const Optimizer optimizer = engine->AdamW(model, optim::AdamWOptions(1e-2));
    Train(model, *optimizer, 0, kBefore, &log);
    torch::save(*optimizer, kept);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < model.parameters().size(); ++i)
      other.parameters()[i].copy_(model.parameters()[i]);
  }
  optim::AdamW optimizer(other.parameters(), optim::AdamWOptions(1));
  torch::load(optimizer, kept);
  Train(other, optimizer, kBefore, kBefore + kAfter, &log);
  AddWeights(other, &log);
  ExpectSame(Uninterrupted(kCases[0].make), log);
}

// ---- What becomes of it, and what is refused ----------------------------------------------------

class KeptStateTest : public testing::Test {
 protected:
  KeptStateTest() { SetOffloading(true); }
  static Make AdamW() { return kCases[0].make; }
};

TEST_F(KeptStateTest, ALoadedStateIsDurableWithTheNextStepOnly) {
  const Files files = SavedInMemory(AdamW(), 2);
  Log log;
  Tensor before;
  for (const bool steps : {false, true}) {
    Model model(at::kFloat);
    const Optimizer optimizer = AdamW()(model.parameters());
    auto engine = Engine::Open(PoolOptions("durable", "256MiB"));
    engine->Attach(model, *optimizer);
    if (!steps) Train(model, *optimizer, 10, 11, &log);
    if (!before.defined()) before = engine->Gather(model.first->weight, "exp_avg");
    EXPECT_TRUE(torch::equal(engine->Gather(model.first->weight, "exp_avg"), before));
    Load(files, model, *optimizer);
    EXPECT_FALSE(torch::equal(engine->Gather(model.first->weight, "exp_avg"), before));
    if (steps) Train(model, *optimizer, 2, 3, &log);
  }
  Model model(at::kFloat), plain(at::kFloat);
  const Optimizer optimizer = AdamW()(model.parameters()), other = AdamW()(plain.parameters());
  auto engine = Engine::Open(PoolOptions("durable", "256MiB"));
  engine->Attach(model, *optimizer);
  Train(plain, *other, 0, 3, &log);
  const auto& kept = static_cast<const optim::AdamWParamState&>(
      *other->state().at(plain.first->weight.unsafeGetTensorImpl()));
  EXPECT_TRUE(torch::equal(engine->Gather(model.first->weight, "exp_avg"), kept.exp_avg()));
  EXPECT_TRUE(torch::equal(engine->Gather(model.first->weight, "exp_avg_sq"), kept.exp_avg_sq()));
}

TEST_F(KeptStateTest, WhatIsFrozenWithAStateGoesOnWithItWhenItIsThawed) {
  const auto train = [](bool offloading) {
    Log log;
    Model model(at::kFloat);
    const Optimizer optimizer = AdamW()(model.parameters());
    Train(model, *optimizer, 0, kBefore, &log);
    for (Tensor& parameter : model.first->parameters()) parameter.requires_grad_(false);
    std::shared_ptr<Engine> engine;
    if (offloading) {
      engine = Engine::Open(PoolOptions("frozen_state", "256MiB"));
      engine->Attach(model, *optimizer);
    }
    Train(model, *optimizer, kBefore, kBefore + 1, &log);
    for (Tensor& parameter : model.first->parameters()) parameter.requires_grad_(true);
    Train(model, *optimizer, kBefore + 1, kBefore + kAfter, &log);
    AddWeights(model, &log);
    return log;
  };
  ExpectSame(train(false), train(true));
}

TEST_F(KeptStateTest, WeightsAreNotLoadedBetweenAStateAndItsStep) {
  Model model(at::kFloat);
  const Optimizer optimizer = AdamW()(model.parameters());
  auto engine = Engine::Open(PoolOptions("between", "256MiB"));
  engine->Attach(model, *optimizer);
  const std::string folder = Pool() + "/between_weights";
  engine->SaveWeights(folder);
  Load(SavedInMemory(AdamW(), 2), model, *optimizer);
  ExpectError(1002, "take a step before", [&] { engine->LoadWeights(folder); });
  Log log;
  Train(model, *optimizer, 2, 3, &log);
  engine->LoadWeights(folder);
}

TEST_F(KeptStateTest, AStateOfAnotherShapeIsRefusedBeforeAnythingChanges) {
  Model model(at::kFloat);
  const Optimizer optimizer = AdamW()(model.parameters());
  auto engine = Engine::Open(PoolOptions("shape", "256MiB"));
  engine->Attach(model, *optimizer);
  Log log;
  Train(model, *optimizer, 0, 1, &log);
  const Tensor before = engine->Gather(model.first->weight, "exp_avg");
  struct Transposed : nn::Module {
    Transposed() {
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{900, 300}, {10, 900}, {10, 300}})
        layers.push_back(
            register_module(std::to_string(in) + std::to_string(out), nn::Linear(in, out)));
    }
    std::vector<nn::Linear> layers;
  } other;
  const Optimizer foreign = AdamW()(other.parameters());
  for (nn::Linear& layer : other.layers)
    layer->forward(torch::ones({1, layer->options.in_features()})).sum().backward();
  foreign->step();
  std::stringstream file;
  torch::save(*foreign, file);
  ExpectError(1002, "'first.weight' of shape [900, 300] is CPUFloatType [300, 900]",
              [&] { torch::load(*optimizer, file); });
  EXPECT_TRUE(torch::equal(engine->Gather(model.first->weight, "exp_avg"), before));
}

TEST_F(KeptStateTest, AFileOfALargeStateIsPaged) {
  struct Large : nn::Module {
    Large() {
      for (int i = 0; i < 4; ++i)
        register_parameter("weight" + std::to_string(i), torch::zeros({1 << 20}));
    }
  } model;
  const Optimizer optimizer = AdamW()(model.parameters());
  setenv("OFFLOADD_BESIDE_RAM", "1MiB", 1);
  auto engine = Engine::Open(PoolOptions("large", "128MiB"));
  unsetenv("OFFLOADD_BESIDE_RAM");
  engine->Attach(model, *optimizer);
  for (Tensor& parameter : model.parameters()) parameter.mutable_grad() = torch::ones({1 << 20});
  optimizer->step();
  std::stringstream file;
  torch::save(*optimizer, file);
  const Optimizer other = AdamW()(model.parameters());
  torch::load(*other, file);
  for (const Tensor& parameter : model.parameters()) {
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(
        *other->state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_TRUE(torch::equal(state.exp_avg(), engine->Gather(parameter, "exp_avg")));
    EXPECT_TRUE(torch::equal(state.exp_avg_sq(), engine->Gather(parameter, "exp_avg_sq")));
  }
}

}  // namespace
}  // namespace offload

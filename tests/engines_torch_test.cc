// Several of everything in one process: modules of one job with an optimizer each (as in a GAN),
// engines side by side, threads that run one model backward. What is computed is compared bit by
// bit with the same program in memory (OFFLOADD_DISABLE=1), or with sums that are exact.

#include <ATen/ops/_fused_sgd.h>
#include <gtest/gtest.h>
#include <offload/torch.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/node_daemon.h"
#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;

Options OptionsFor(const std::string& job, const std::string& ram = "64MiB") {
  return PoolOptions(job, ram);
}

// Weights that every thread makes for itself, without torch's own generator.
void Fill(nn::Module& module, int64_t seed) {
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : module.parameters()) {
    const Tensor numbers = at::arange(parameter.numel(), at::kDouble) * 12.9898 + double(seed);
    parameter.copy_((at::frac(at::sin(numbers) * 43758.5453) * 0.05).view(parameter.sizes()));
    ++seed;
  }
}

Tensor Numbers(int64_t seed, at::IntArrayRef sizes) {
  const int64_t count = c10::multiply_integers(sizes);
  const Tensor numbers = at::arange(count, at::kDouble) * 78.233 + static_cast<double>(seed);
  return at::frac(at::sin(numbers) * 43758.5453).to(at::kFloat).view(sizes);
}

struct Generator : nn::Module {
  Generator() {
    first = register_module("first", nn::Linear(32, 512));
    second = register_module("second", nn::Linear(512, 384));
  }
  Tensor forward(const Tensor& noise) { return second(torch::relu(first(noise))); }
  nn::Linear first{nullptr}, second{nullptr};
};

struct Discriminator : nn::Module {
  Discriminator() {
    first = register_module("first", nn::Linear(384, 512));
    second = register_module("second", nn::Linear(512, 1));
  }
  Tensor forward(const Tensor& sample) { return second(torch::tanh(first(sample))); }
  nn::Linear first{nullptr}, second{nullptr};
};

// ---- Two modules of one job --------------------------------------------------------------------

// A GAN's trainer: one job, whose steps are in turn the discriminator's and the generator's.
struct Gan {
  explicit Gan(const Options& options) : engine(Engine::Open(options)) {
    Fill(*generator, 1);
    Fill(*discriminator, 100);
    generator_optimizer = engine->AdamW(*generator, torch::optim::AdamWOptions(1e-3));
    discriminator_optimizer =
        engine->AdamW(*discriminator, torch::optim::AdamWOptions(2e-3).weight_decay(0.1));
  }

  // The step that comes after engine->step() steps; its loss.
  double Step() {
    const int64_t number = engine->step();
    const Tensor fake = generator->forward(Numbers(number, {4, 32}));
    if (number % 2 == 0) {
      discriminator_optimizer->zero_grad();
      const Tensor real = Numbers(1000 + number, {4, 384});
      const Tensor loss = (discriminator->forward(fake.detach()) - 1).square().mean() +
                          discriminator->forward(real).square().mean();
      loss.backward();
      discriminator_optimizer->step();
      return loss.item<double>();
    }
    generator_optimizer->zero_grad();
    const Tensor loss = discriminator->forward(fake).square().mean();
    loss.backward();  // the discriminator's gradients, too, which its next step drops
    generator_optimizer->step();
    return loss.item<double>();
  }

  std::vector<Tensor> State() const {
    std::vector<Tensor> state;
    for (const auto* module : {static_cast<nn::Module*>(generator.get()),
                               static_cast<nn::Module*>(discriminator.get())}) {
      for (const Tensor& parameter : module->parameters()) {
        for (const char* plane : {"weight", "exp_avg", "exp_avg_sq"})
          state.push_back(engine->Gather(parameter, plane));
      }
    }
    return state;
  }

  std::shared_ptr<Generator> generator = std::make_shared<Generator>();
  std::shared_ptr<Discriminator> discriminator = std::make_shared<Discriminator>();
  std::shared_ptr<Engine> engine;
  std::unique_ptr<torch::optim::Optimizer> generator_optimizer, discriminator_optimizer;
};

struct GanRun {
  std::vector<double> losses;
  std::vector<Tensor> state;
};

GanRun RunGan(const Options& options, int64_t steps) {
  Gan gan(options);
  GanRun run;
  while (gan.engine->step() < steps) run.losses.push_back(gan.Step());
  run.state = gan.State();
  return run;
}

void ExpectSameState(const std::vector<Tensor>& expected, const std::vector<Tensor>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(expected[i], actual[i])) << "plane " << i;
}

TEST(SeveralModulesTest, GanIsBitEqualToTheOneInMemory) {
  SetOffloading(false);
  const GanRun reference = RunGan(OptionsFor("gan"), 8);
  ASSERT_EQ(reference.losses.size(), 8u) << "each optimizer's step is one of the job";
  SetOffloading(true);
  const GanRun offloaded = RunGan(OptionsFor("gan"), 8);
  EXPECT_EQ(reference.losses, offloaded.losses);
  ExpectSameState(reference.state, offloaded.state);
}

// Runs `body` in a process of its own and returns how that ended.
int StatusOfChild(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      body();
    } catch (const std::exception& error) {
      fprintf(stderr, "%s\n", error.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(SeveralModulesTest, GanKilledBetweenItsTwoStepsContinuesWithTheSecond) {
  SetOffloading(false);
  const GanRun reference = RunGan(OptionsFor("killed_gan"), 6);
  SetOffloading(true);
  const int status = StatusOfChild([] {
    Gan gan(OptionsFor("killed_gan"));
    while (gan.engine->step() < 3) gan.Step();  // the third is the discriminator's
    gan.engine->WaitDurable();
    kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  const GanRun resumed = RunGan(OptionsFor("killed_gan"), 6);
  ASSERT_EQ(resumed.losses.size(), 3u);
  EXPECT_EQ(std::vector(reference.losses.begin() + 3, reference.losses.end()), resumed.losses);
  ExpectSameState(reference.state, resumed.state);
}

TEST(CheckpointTest, WhatIsAskedForInsideAnIntervalIsDurable) {
  SetOffloading(false);
  const GanRun reference = RunGan(OptionsFor("checkpointed_gan"), 6);
  SetOffloading(true);
  const int status = StatusOfChild([] {
    Options options = OptionsFor("checkpointed_gan");
    options.durability = "checkpoint:1000";
    Gan gan(options);
    while (gan.engine->step() < 3) gan.Step();
    if (gan.engine->statistics().durable_step != 0 || gan.engine->Checkpoint() != 3) return;
    gan.engine->WaitDurable();
    if (gan.engine->statistics().durable_step != 3) return;
    kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  const GanRun resumed = RunGan(OptionsFor("checkpointed_gan"), 6);
  ASSERT_EQ(resumed.losses.size(), 3u);
  EXPECT_EQ(std::vector(reference.losses.begin() + 3, reference.losses.end()), resumed.losses);
  ExpectSameState(reference.state, resumed.state);
}

TEST(CheckpointTest, AnEngineWithoutAModelHasNothingToWaitFor) {
  SetOffloading(true);
  const std::shared_ptr<Engine> engine = Engine::Open(OptionsFor("no_model"));
  engine->WaitDurable();
  EXPECT_EQ(engine->Checkpoint(), 0);
}

TEST(SeveralModulesTest, SavedWeightsOfTheSecondModuleHaveItsNumber) {
  const std::string root = Pool() + "/numbered";
  std::filesystem::remove_all(root);
  std::filesystem::create_directories(root);
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    Gan gan(OptionsFor("numbered"));
    const std::string folder = root + (offloading ? "/on" : "/off");
    gan.engine->SaveWeights(folder);
    gan.Step();
    gan.engine->LoadWeights(folder);
    gan.Step();
    gan.engine->SaveWeights(folder + "-stepped");
  }
  const auto bytes = [&](const std::string& folder) {
    std::ifstream file(root + folder + "/model.safetensors", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_NE(bytes("/on").find("\"first.weight\""), std::string::npos);
  EXPECT_NE(bytes("/on").find("\"1/first.weight\""), std::string::npos);
  EXPECT_TRUE(bytes("/on") == bytes("/off"));
  EXPECT_TRUE(bytes("/on-stepped") == bytes("/off-stepped"));
}

// Two heads on one trunk; the trunk belongs to the optimizer that has it first.
TEST(SeveralModulesTest, SharedParametersAreOneTensorOfTheFirstOptimizer) {
  const auto train = [](bool offloading) {
    SetOffloading(offloading);
    nn::Linear trunk(256, 320), left(320, 200), right(320, 100);
    Fill(*trunk, 1), Fill(*left, 10), Fill(*right, 20);
    nn::Sequential one(trunk, left), two(trunk, right);
    auto engine = Engine::Open(OptionsFor("shared"));
    auto first = engine->SGD(*one, torch::optim::SGDOptions(0.1).momentum(0.9));
    auto second = engine->SGD(*two, torch::optim::SGDOptions(0.1).momentum(0.9));
    EXPECT_EQ(first->param_groups()[0].params().size(), 4u);
    EXPECT_EQ(second->param_groups()[0].params().size(), 2u);
    for (int64_t step = 0; step < 4; ++step) {
      first->zero_grad(), second->zero_grad();
      (one->forward(Numbers(step, {3, 256})).square().mean() +
       two->forward(Numbers(step, {3, 256})).square().mean())
          .backward();
      first->step();
      second->step();
    }
    EXPECT_EQ(engine->step(), 8);
    std::vector<Tensor> weights;
    for (const nn::Linear& part : {trunk, left, right})
      weights.push_back(engine->Gather(part->weight, "weight"));
    return weights;
  };
  ExpectSameState(train(false), train(true));
}

// Objects of torch::optim that both have the trunk, as an actor's and a critic's have their
// encoder: each keeps its own of it, and its steps are those of plain torch.
std::vector<Tensor> TrainOneTrunk(at::ScalarType dtype, bool attaches, const std::string& home,
                                  int64_t first_step = 0, int64_t end_step = 6,
                                  const std::string& job = "one_trunk_") {
  nn::Linear trunk(256, 320), left(320, 200), right(320, 100);
  Fill(*trunk, 1), Fill(*left, 10), Fill(*right, 20);
  nn::Sequential one(trunk, left), two(trunk, right);
  one->to(dtype), two->to(dtype);
  torch::optim::Adam first(one->parameters(), torch::optim::AdamOptions(1e-2));
  torch::optim::SGD second(two->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::shared_ptr<Engine> engine;
  if (attaches) {
    Options options = OptionsFor(job + home + toString(dtype));
    options.weights_home = options.state_home = home;
    engine = Engine::Open(options);
    engine->Attach(*one, first);
    engine->Attach(*two, second);
    ExpectError(1002, "another one has it", [&] { engine->Attach(*one, first); });
  }
  const auto loss = [&](nn::Sequential& model, int64_t number) {
    return model->forward(Numbers(number, {3, 256}).to(dtype)).to(at::kFloat).square().mean();
  };
  for (int64_t step = first_step; step < end_step; ++step) {
    second.zero_grad();
    loss(two, 2 * step).backward();
    second.step();
    if (step != 3) first.zero_grad();  // once on what is left of the other's
    loss(one, 2 * step + 1).backward();
    first.step();
  }
  if (attaches && first_step == 0) {
    EXPECT_EQ(engine->step(), 2 * end_step);
  }
  std::vector<Tensor> weights;
  for (const nn::Linear& part : {trunk, left, right})
    weights.push_back(part->weight.detach().clone());
  return weights;
}

TEST(SeveralModulesTest, ObjectsThatShareParametersStepThemAsInMemory) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    SetOffloading(false);
    const std::vector<Tensor> expected = TrainOneTrunk(dtype, /*attaches=*/true, "memory");
    if (dtype == at::kFloat)
      ExpectSameState(TrainOneTrunk(dtype, /*attaches=*/false, ""), expected);
    SetOffloading(true);
    for (const char* const home : {"ram", "nvme"})
      ExpectSameState(expected, TrainOneTrunk(dtype, /*attaches=*/true, home));
  }
}

TEST(SeveralModulesTest, ObjectsThatShareParametersGoOn) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    SetOffloading(false);
    const std::vector<Tensor> expected =
        TrainOneTrunk(dtype, /*attaches=*/true, "memory", /*first_step=*/0, /*end_step=*/9);
    SetOffloading(true);
    TrainOneTrunk(dtype, /*attaches=*/true, "nvme", /*first_step=*/0, /*end_step=*/5, "goes_on_");
    ExpectSameState(expected, TrainOneTrunk(dtype, /*attaches=*/true, "nvme", /*first_step=*/5,
                                            /*end_step=*/9, "goes_on_"));
  }
}

TEST(SeveralModulesTest, TheLeastRamOfTheFirstSaysThatMoreNeedsMore) {
  SetOffloading(true);
  Options options = OptionsFor("more_modules");
  options.ram = "9MiB";
  const std::shared_ptr<Engine> engine = Engine::Open(options);
  nn::Linear module(1024, 1024);
  ExpectError(1301, "what is attached after this needs more",
              [&] { engine->AdamW(*module, torch::optim::AdamWOptions(1e-3)); });
}

TEST(SeveralModulesTest, ParameterGivenToTwoOptimizersIsRefused) {
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    nn::Linear layer(64, 64);
    auto engine = Engine::Open(OptionsFor("claimed"));
    auto optimizer = engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
    ExpectError(1604, "has an optimizer already",
                [&] { engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3)); });
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{layer->weight});
    ExpectError(1002, "another one has it", [&] {
      engine->AdamW(*layer, std::move(groups), torch::optim::AdamWOptions(1e-3));
    });
  }
}

TEST(SeveralModulesTest, OptimizersOverPartsOfOneModuleStepTheirOwn) {
  const auto train = [](bool offloading) {
    SetOffloading(offloading);
    nn::Sequential model(nn::Linear(200, 300), nn::Linear(300, 100));
    Fill(*model, 5);
    auto engine = Engine::Open(OptionsFor("parts"));
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(model[0]->parameters());
    auto first = engine->AdamW(*model, std::move(groups), torch::optim::AdamWOptions(1e-2));
    auto second = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
    EXPECT_EQ(second->param_groups()[0].params().size(), 2u);
    for (int64_t step = 0; step < 3; ++step) {
      model->forward(Numbers(step, {3, 200})).square().mean().backward();
      first->step();
      second->step();
      first->zero_grad(), second->zero_grad();
    }
    std::vector<Tensor> weights;
    for (const Tensor& parameter : model->parameters())
      weights.push_back(engine->Gather(parameter, "weight"));
    return weights;
  };
  ExpectSameState(train(false), train(true));
}

// Between a forward and its backward pass, with a gradient of an earlier one.
TEST(SeveralModulesTest, ModuleAfterTheFirstUseJoinsTheJob) {
  const auto train = [](bool offloading) {
    SetOffloading(offloading);
    torch::manual_seed(3);
    nn::Linear early(128, 640), late(640, 128);
    auto engine = Engine::Open(OptionsFor("late"));
    auto optimizer = engine->AdamW(*early, torch::optim::AdamWOptions(1e-3));
    early->forward(Numbers(1, {2, 128})).sum().backward();
    const Tensor between = torch::tanh(early->forward(Numbers(2, {2, 128})));
    auto others = engine->AdamW(*late, torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < 3; ++step) {
      const Tensor x =
          step == 0 ? between : torch::tanh(early->forward(Numbers(step + 2, {2, 128})));
      late->forward(x).square().sum().backward();
      optimizer->step();
      others->step();
      optimizer->zero_grad();
      others->zero_grad();
    }
    EXPECT_EQ(engine->step(), 6);
    std::vector<Tensor> weights;
    for (const nn::Linear& module : {early, late}) {
      for (const Tensor& parameter : module->parameters())
        weights.push_back(engine->Gather(parameter, "weight"));
    }
    return weights;
  };
  ExpectSameState(train(false), train(true));
}

TEST(SeveralModulesTest, OptimizersOfOtherKindsAreRefused) {
  SetOffloading(true);
  nn::Linear one(128, 128), two(128, 128);
  auto engine = Engine::Open(OptionsFor("kinds"));
  auto optimizer = engine->AdamW(*one, torch::optim::AdamWOptions(1e-3));
  ExpectError(1604, "one kind", [&] { engine->SGD(*two, torch::optim::SGDOptions(0.1)); });
  one->forward(Numbers(1, {2, 128})).sum().backward();
  optimizer->step();
}

TEST(SeveralModulesTest, EngineThatWasNeverUsedGivesTheModuleBack) {
  SetOffloading(true);
  nn::Linear layer(128, 128);
  Fill(*layer, 3);
  const Tensor before = layer->weight.detach().clone();
  {
    auto engine = Engine::Open(OptionsFor("unused"));
    auto optimizer = engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
  }
  EXPECT_NE(layer->weight.data_ptr<float>(), nullptr);
  EXPECT_TRUE(torch::equal(layer->weight, before));
}

TEST(SeveralModulesTest, TwoModelsBuiltUnderGuardsKeepTheirValues) {
  SetOffloading(true);
  auto engine = Engine::Open(OptionsFor("guards"));
  std::shared_ptr<Generator> generator;
  std::shared_ptr<Discriminator> discriminator;
  {
    const InitGuard guard(engine);
    generator = std::make_shared<Generator>();
    Fill(*generator, 1);
  }
  {
    const InitGuard guard(engine);
    discriminator = std::make_shared<Discriminator>();
    Fill(*discriminator, 100);
  }
  auto one = engine->AdamW(*generator, torch::optim::AdamWOptions(1e-3));
  auto two = engine->AdamW(*discriminator, torch::optim::AdamWOptions(1e-3));
  SetOffloading(false);
  const Gan plain(OptionsFor("plain"));
  EXPECT_TRUE(
      torch::equal(engine->Gather(generator->second->weight), plain.generator->second->weight));
  EXPECT_TRUE(torch::equal(engine->Gather(discriminator->first->weight),
                           plain.discriminator->first->weight));
}

// ---- Several engines ---------------------------------------------------------------------------

// Losses of a small model that one engine trains.
std::vector<double> TrainAlone(const std::string& job, int64_t seed, int64_t steps) {
  nn::Sequential model(nn::Linear(256, 600), nn::Tanh(), nn::Linear(600, 256));
  Fill(*model, seed);
  auto engine = Engine::Open(OptionsFor(job));
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    const Tensor loss = model->forward(Numbers(seed + step, {4, 256})).square().mean();
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

TEST(SeveralEnginesTest, TwoEnginesOnTwoThreadsTrainAsEachAlone) {
  SetOffloading(false);
  const std::vector<double> one = TrainAlone("one", 1, 10), two = TrainAlone("two", 2, 10);
  SetOffloading(true);
  std::vector<double> offloaded_one, offloaded_two;
  std::thread first([&] { offloaded_one = TrainAlone("one", 1, 10); });
  std::thread second([&] { offloaded_two = TrainAlone("two", 2, 10); });
  first.join();
  second.join();
  EXPECT_EQ(one, offloaded_one);
  EXPECT_EQ(two, offloaded_two);
}

TEST(SeveralEnginesTest, WeightsAreCopiedBetweenModelsOfTwoEngines) {
  SetOffloading(true);
  nn::Linear source(300, 300), target(300, 300);
  Fill(*source, 1), Fill(*target, 2);
  auto one = Engine::Open(OptionsFor("source")), two = Engine::Open(OptionsFor("target"));
  auto first = one->AdamW(*source, torch::optim::AdamWOptions(1e-3));
  auto second = two->AdamW(*target, torch::optim::AdamWOptions(1e-3));
  {
    const torch::NoGradGuard no_grad;
    target->weight.copy_(source->weight);
    target->bias.lerp_(source->bias, 0.5);
  }
  EXPECT_TRUE(torch::equal(one->Gather(source->weight), two->Gather(target->weight)));
  first.reset(), one.reset();
  EXPECT_EQ(target->forward(Numbers(1, {2, 300})).sizes(), at::IntArrayRef({2, 300}));
  ExpectError(1802, "parameter", [&] { source->forward(Numbers(1, {2, 300})); });
}

TEST(SeveralEnginesTest, EngineOpenedAfterAnotherTakesTheSameModuleUp) {
  SetOffloading(false);
  const std::vector<double> whole = TrainAlone("again", 7, 2);
  SetOffloading(true);
  nn::Sequential model(nn::Linear(256, 600), nn::Tanh(), nn::Linear(600, 256));
  Fill(*model, 7);
  for (int64_t step = 0; step < 2; ++step) {
    auto engine = Engine::Open(OptionsFor("again"));
    EXPECT_EQ(engine->step(), step);
    auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
    const Tensor loss = model->forward(Numbers(7 + step, {4, 256})).square().mean();
    loss.backward();
    EXPECT_EQ(loss.item<double>(), whole[step]);
    optimizer->step();
    optimizer->zero_grad();
  }
  auto other = Engine::Open(OptionsFor("new_job"));
  ExpectError(1601, "engine that is closed",
              [&] { other->AdamW(*model, torch::optim::AdamWOptions(1e-3)); });
}

TEST(SeveralEnginesTest, ModuleOfAnotherLivingEngineIsRefused) {
  SetOffloading(true);
  nn::Linear layer(128, 128);
  auto one = Engine::Open(OptionsFor("owner")), two = Engine::Open(OptionsFor("thief"));
  auto optimizer = one->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
  ExpectError(1601, "another engine",
              [&] { two->AdamW(*layer, torch::optim::AdamWOptions(1e-3)); });
  layer->forward(Numbers(1, {2, 128})).sum().backward();
  optimizer->step();
}

TEST(SeveralEnginesTest, SecondEngineOfTheSameJobIsRefused) {
  SetOffloading(true);
  nn::Linear one(128, 128), two(128, 128);
  auto engine = Engine::Open(OptionsFor("same"));
  auto optimizer = engine->AdamW(*one, torch::optim::AdamWOptions(1e-3));
  one->forward(Numbers(1, {2, 128})).sum().backward();
  optimizer->step();
  // At once, though the store's lock would be waited for.
  ExpectError(1205, "job same is open in this process already", [&] {
    auto second = Engine::Open(OptionsFor("same"));
    second->AdamW(*two, torch::optim::AdamWOptions(1e-3))->step();
  });
  EXPECT_EQ(engine->step(), 1);
}

// A closed descriptor ends neither a wait for it nor the session at the daemon.
TEST(SeveralEnginesTest, ProgramThatClosesTheDescriptorsIsTold) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto close_and_step = [] {
    SetOffloading(true);
    nn::Linear layer(128, 128);
    auto engine = Engine::Open(OptionsFor("closed"));
    auto optimizer = engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
    try {
      for (int step = 0; step < 4; ++step) {
        layer->forward(Numbers(step, {2, 128})).sum().backward();
        optimizer->step();
        if (step == 1) ::closefrom(3);
      }
    } catch (const Error& error) {
      std::cerr << error.what() << '\n';
      ::_exit(3);
    }
    ::_exit(0);
  };
  EXPECT_EXIT(close_and_step(), testing::ExitedWithCode(3),
              "OFD-1802 the program has closed the session's file descriptors");
}

// ---- Threads on one model ----------------------------------------------------------------------

// Small whole numbers: sums of their products are exact in any order.
void FillWithWholeNumbers(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int64_t shift = 0;
  for (Tensor& parameter : module.parameters())
    parameter.copy_((at::arange(parameter.numel()) + ++shift).remainder(3).view(parameter.sizes()) -
                    1);
}

nn::Sequential WholeNumberModel() {
  nn::Sequential model(nn::Linear(64, 300), nn::Linear(300, 400), nn::Linear(400, 16));
  FillWithWholeNumbers(*model);
  return model;
}

Tensor WholeNumberLoss(nn::Sequential& model, int64_t number) {
  const Tensor input = (at::arange(2 * 64) + number).remainder(2).to(at::kFloat).view({2, 64});
  return model->forward(input).sum();
}

// The smallest budget that a module trains in.
std::string FloorOf(nn::Sequential& model, bool spilled) {
  Options options = OptionsFor("floor" + std::to_string(spilled), "1GiB");
  options.spill_gradients = spilled;
  auto engine = Engine::Open(options);
  auto optimizer = engine->SGD(*model, torch::optim::SGDOptions(0.0));
  const PlanSummary plan = engine->plan();
  return std::to_string(spilled ? plan.floor_bytes : plan.floor_without_spilling_bytes);
}

class BackwardThreadsTest : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(BackwardThreadsTest, BackwardOfManyGraphsAtOnceGivesTheirSum) {
  const auto [thread_count, spilled] = GetParam();
  constexpr int kRounds = 25;
  nn::Sequential plain = WholeNumberModel();
  for (int64_t thread = 0; thread < thread_count; ++thread)
    WholeNumberLoss(plain, thread).backward();

  SetOffloading(true);
  // A window for weights and, when they are spilled, one for gradients that holds few of them.
  nn::Sequential measured = WholeNumberModel(), model = WholeNumberModel();
  const std::string job = "threads_" + std::to_string(thread_count) + (spilled ? "_s" : "");
  Options options = OptionsFor(job, FloorOf(measured, spilled));
  options.spill_gradients = spilled;
  auto engine = Engine::Open(options);
  auto optimizer = engine->SGD(*model, torch::optim::SGDOptions(0.0));
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> threads;
    for (int64_t thread = 0; thread < thread_count; ++thread)
      threads.emplace_back([&, thread] { WholeNumberLoss(model, thread).backward(); });
    for (std::thread& thread : threads) thread.join();
    if (round % 3 == 1) optimizer->step();  // changes nothing: its rate is zero
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      ASSERT_TRUE(torch::equal(plain->parameters()[i].grad(), model->parameters()[i].grad() * 1))
          << "round " << round << ", parameter " << i;
    }
    optimizer->zero_grad(/*set_to_none=*/round % 2 == 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Counts, BackwardThreadsTest,
                         testing::Combine(testing::Values(2, 4, 8), testing::Bool()),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_spilled" : "");
                         });

// Three of these fit into the staging buffer.
class WritersTest : public testing::Test {
 protected:
  static constexpr int64_t kRows = 640, kColumns = 1000;  // 2.4 of 8 MiB

  void Open(const std::string& job) {
    SetOffloading(true);
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i)
      model_->push_back(nn::Linear(nn::LinearOptions(kColumns, kRows).bias(false)));
    for (const Tensor& parameter : model_->parameters()) before_.push_back(parameter.detach() * 1);
    engine_ = Engine::Open(OptionsFor(job, "120MiB"));
    optimizer_ = engine_->SGD(*model_, torch::optim::SGDOptions(0.1));
    for (const Tensor& parameter : model_->parameters()) weights_.push_back(parameter.detach());
  }
  static void Write(const std::vector<Tensor>& weights, size_t first) {
    at::_fused_sgd_({weights[first]}, {at::ones({kRows, kColumns})}, {weights[first + 1]},
                    /*weight_decay=*/0, /*momentum=*/0.5, /*lr=*/0.1, /*dampening=*/0,
                    /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/false);
  }
  void ExpectWeights(const std::vector<Tensor>& expected) const {
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(weights_[i], expected[i])) << i;
  }

  nn::Sequential model_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Tensor> weights_, before_;
};

// Each operation writes two parameters: nobody waits for ever for another's second.
TEST_F(WritersTest, WritersOfSeveralParametersNeverWaitForEachOtherForEver) {
  Open("writers");
  Write(weights_, 0);
  constexpr int kRounds = 40;
  std::vector<std::thread> threads;
  for (const size_t first : {0, 2}) {
    threads.emplace_back([&, first] {
      const torch::NoGradGuard no_grad;
      for (int round = 0; round < kRounds; ++round) Write(weights_, first);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int round = 0; round < kRounds; ++round) Write(before_, 2);
  for (int round = 0; round < kRounds + 1; ++round) Write(before_, 0);
  ExpectWeights(before_);
}

TEST_F(WritersTest, AnOperationWritesMoreThanTheStagingBufferHolds) {
  Open("writer_of_all");
  const auto write = [](std::vector<Tensor>& weights) {
    at::_fused_adam_({weights[0]}, {at::ones({kRows, kColumns})}, {weights[1]}, {weights[2]},
                     {weights[3]}, {torch::tensor(1.0F)}, /*lr=*/0.1, /*beta1=*/0.9, /*beta2=*/0.99,
                     /*weight_decay=*/0, /*eps=*/1e-3, /*amsgrad=*/true, /*maximize=*/false);
  };
  for (std::vector<Tensor>* const weights : {&weights_, &before_}) {
    for (Tensor& weight : *weights) weight.abs_();  // roots are taken
    for (int round = 0; round < 3; ++round) write(*weights);
  }
  ExpectWeights(before_);
  optimizer_->step();
  ExpectWeights(before_);
}

}  // namespace
}  // namespace offload

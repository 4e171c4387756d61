// Models that are larger than their device's memory: they are built on the host, or outside of any
// memory, and attached with Options::device. What they compute is what the same model computes in
// the memory of a device that has room, bit by bit.

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <offload/torch.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/lbfgs.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "gmock/gmock.h"
#include "tests/standin_torch.h"
#include "tests/standin_torch_fixture.h"
#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using accelerator::HostAccelerator;
using accelerator::Pace;
using at::Tensor;

constexpr int64_t kLayers = 20, kWidth = 192, kVocabulary = 200, kLength = 8;
// Of the device, in all: three quarters of what the weights have.
constexpr uint64_t kSmallBytes = uint64_t{kLayers} * kWidth * kWidth * 3;

// With all that a module may have beside ordinary weights.
struct Net : nn::Module {
  explicit Net(at::ScalarType dtype) {
    embedding = register_module("embedding", nn::Embedding(kVocabulary, kWidth));
    for (int64_t i = 0; i < kLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(kWidth, kWidth)));
    norm = register_module("norm", nn::BatchNorm1d(kWidth));
    frozen = register_parameter("frozen", torch::randn({kWidth, kWidth}), false);
    to(dtype);
    tied = register_parameter("tied", embedding->weight);
    shared = register_parameter("shared", embedding->weight.detach(), false);
    order = register_parameter("order", torch::randperm(kWidth), false);
    nothing = register_parameter("nothing", torch::empty({0, kWidth}));
    scale = register_buffer("scale", torch::full({kWidth}, 1.25, dtype));
  }

  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding->forward(tokens.reshape({-1}));
    for (auto& layer : layers) x = x + layer->forward(x).relu();
    x = norm->forward(x) * scale + nothing.sum();
    x = x.matmul(frozen).index_select(1, order) * 0.1;
    return at::linear(x, tied) + shared.sum() * 0.01;
  }

  nn::Embedding embedding{nullptr};
  std::vector<nn::Linear> layers;
  nn::BatchNorm1d norm{nullptr};
  Tensor frozen, tied, shared, order, nothing, scale;
};

enum class Built {
  kThere,   // on the device
  kOnHost,  // and attached with Options::device
  kBorn,    // the same, outside of memory
};

struct Recipe {
  std::string name;
  Built built = Built::kOnHost;
  at::ScalarType dtype = at::kFloat;
  std::string weights_home = "auto";
  bool slab_is_registered = true;
  Pace pace = Pace::kRandom;
  bool resumes = false;  // after every step, with a model made anew
};

uint64_t WeightBytes(const nn::Module& model) {
  uint64_t size_bytes = 0;
  for (const Tensor& parameter : model.parameters())
    if (at::isFloatingType(parameter.scalar_type())) size_bytes += parameter.nbytes();
  return size_bytes;
}

Options OptionsFor(const Recipe& recipe) {
  Options options = PoolOptions(recipe.name, "128MiB");
  options.weights_home = recipe.weights_home;
  if (recipe.built != Built::kThere) options.device = StandinDevice().str();
  return options;
}

class Training {
 public:
  Training(const Recipe& recipe, uint64_t memory_bytes)
      : recipe_(recipe),
        device_({.seed = 5,
                 .pace = recipe.pace,
                 .registers_read_only = recipe.slab_is_registered,
                 .memory_bytes = memory_bytes}) {
    UseStandin(device_);
    Begin(/*seed=*/11);
  }
  ~Training() {
    End();
    seen.clear();
    ExpectClean(device_);
  }

  void Begin(uint64_t seed) {
    torch::manual_seed(seed);
    engine_ = Engine::Open(OptionsFor(recipe_));
    if (recipe_.built == Built::kBorn) {
      const InitGuard guard(engine_);
      model_ = std::make_shared<Net>(recipe_.dtype);
    } else {
      model_ = std::make_shared<Net>(recipe_.dtype);
    }
    if (recipe_.built == Built::kThere) {
      model_->to(StandinDevice());
      model_->shared.set_data(model_->embedding->weight.detach());  // to() takes it apart
    }
    const std::vector<Tensor> before = model_->parameters();
    optimizer_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(before[i].device(), StandinDevice()) << i;
      EXPECT_TRUE(before[i].is_same(model_->parameters()[i])) << i;
    }
    for (const Tensor& buffer : model_->buffers()) EXPECT_EQ(buffer.device(), StandinDevice());
  }
  void End() {
    optimizer_.reset();
    engine_.reset();
    model_.reset();
  }

  Tensor Loss(int64_t number) {
    const Tensor tokens = TokensOnStandin(number, kVocabulary, /*sequences=*/1, kLength);
    return nn::functional::cross_entropy(model_->forward(tokens).to(at::kFloat),
                                         tokens.reshape({-1}));
  }

  void Step(int64_t step) {
    for (int64_t i = 0; i < 2; ++i) {
      const Tensor loss = Loss(step * 2 + i) / 2;
      loss.backward();
      See(seen, "loss", loss);
    }
    See(seen, "norm",
        torch::tensor(nn::utils::clip_grad_norm_(model_->parameters(), step == 0 ? 0.1 : 1e6)));
    optimizer_->step();
    optimizer_->zero_grad();
    if (!recipe_.resumes) return;
    End();
    Begin(/*seed=*/1000 + step);  // other weights: those of the job count
    EXPECT_EQ(engine_->step(), step + 1);
  }

  void SeeState() {
    const at::NoGradGuard no_grad;
    for (const auto& item : model_->named_parameters()) {
      See(seen, item.key(), item.value() * 1);
      if (!item.value().requires_grad() || item.value().numel() == 0) continue;
      for (const char* plane : {"master", "exp_avg", "exp_avg_sq"})
        See(seen, item.key() + " " + plane, engine_->Gather(item.value(), plane));
    }
    for (const auto& item : model_->named_buffers()) See(seen, item.key(), item.value());
  }

  Net& model() { return *model_; }
  Engine& engine() { return *engine_; }
  HostAccelerator& device() { return device_; }

  Seen seen;

 private:
  const Recipe recipe_;
  HostAccelerator device_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Net> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

Seen Train(const Recipe& recipe, uint64_t memory_bytes) {
  Training run(recipe, memory_bytes);
  for (int64_t step = 0; step < 3; ++step) run.Step(step);
  run.SeeState();
  return std::exchange(run.seen, {});
}

Seen TrainInItsMemory(const Recipe& recipe) {
  SetOffloading(false);
  const Recipe there{.name = recipe.name, .built = Built::kThere, .dtype = recipe.dtype};
  return Train(there, uint64_t{1} << 30);
}

class DeviceFromHostTest : public testing::TestWithParam<Recipe> {};

TEST_P(DeviceFromHostTest, TrainsAsInTheMemoryOfADeviceThatHasRoom) {
  const Seen expected = TrainInItsMemory(GetParam());
  const uint64_t memory_bytes =
      kSmallBytes / 4 * at::elementSize(GetParam().dtype);  // and of the same part for bf16
  ASSERT_GT(WeightBytes(Net(GetParam().dtype)), memory_bytes);
  SetOffloading(true);
  ExpectEqual(expected, Train(GetParam(), memory_bytes));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, DeviceFromHostTest,
    testing::Values(Recipe{.name = "host"}, Recipe{.name = "host_bf16", .dtype = at::kBFloat16},
                    Recipe{.name = "host_late", .weights_home = "nvme", .pace = Pace::kLate},
                    Recipe{.name = "host_staged", .slab_is_registered = false},
                    Recipe{.name = "host_resumed", .resumes = true},
                    Recipe{.name = "born", .built = Built::kBorn},
                    Recipe{.name = "born_bf16_resumed",
                           .built = Built::kBorn,
                           .dtype = at::kBFloat16,
                           .resumes = true}),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

// The model that the cases above train cannot be there as a whole.
TEST(DeviceFromHostTest, TheModelIsLargerThanTheDevice) {
  HostAccelerator device({.memory_bytes = kSmallBytes});
  UseStandin(device);
  Net model(at::kFloat);
  try {
    model.to(StandinDevice());
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("the stand-in has"));
  }
}

// With OFFLOADD_DISABLE=1 the same program trains in the device's memory.
TEST(DeviceFromHostTest, InMemoryTheModuleIsMovedThere) {
  const Seen expected = TrainInItsMemory({.name = "moved"});
  ExpectEqual(expected, Train({.name = "moved", .built = Built::kOnHost}, uint64_t{1} << 30));
}

struct Small {
  explicit Small(uint64_t memory_bytes = uint64_t{1} << 26)
      : device({.memory_bytes = memory_bytes}) {
    UseStandin(device);
    SetOffloading(true);
    torch::manual_seed(3);
    weight = model.register_parameter("weight", torch::randn({64, 64}));
    other = model.register_parameter("other", torch::randn({64, 64}));
    buffer = model.register_buffer("buffer", torch::randn({64}));
  }
  void Attach(Options options) {
    options.device = StandinDevice().str();
    engine = Engine::Open(options);
    optimizer = engine->SGD(model, torch::optim::SGDOptions(0.5));
  }
  ~Small() {
    optimizer.reset();
    engine.reset();
  }

  HostAccelerator device;
  nn::Module model;
  Tensor weight, other, buffer;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

// What a backward on the host has left, and hooks, are the parameter's as before.
TEST(DeviceFromHostTest, GradientsAndHooksGoAlong) {
  Small run;
  int calls = 0;
  run.weight.register_hook([&](const Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  run.weight.sum().backward();
  const Tensor expected = run.weight.detach() - 0.5 * (2 + 6);
  run.Attach(PoolOptions("gradients", "64MiB"));
  EXPECT_EQ(run.weight.grad().device(), StandinDevice());
  (run.weight * 3).sum().backward();
  EXPECT_EQ(calls, 2);
  run.optimizer->step();
  EXPECT_TRUE(torch::equal(run.engine->Gather(run.weight), expected));
}

// Others go on with the memory of the host, as beside module.to(): what they write there, also
// before the store is made, is not the parameter's.
TEST(DeviceFromHostTest, WhatOthersHaveOfTheMemoryIsTheirs) {
  Small run;
  Tensor seen = run.weight.detach();
  const Tensor before = seen.clone();
  run.Attach(PoolOptions("others", "64MiB"));
  seen.zero_();
  EXPECT_TRUE(torch::equal((run.weight * 1).detach().cpu(), before));
  EXPECT_EQ(seen.sum().item<float>(), 0);
}

// Nothing was made of it: the module is what it was, on the host.
TEST(DeviceFromHostTest, AnAttachThatFailsLeavesTheModuleWhereItWas) {
  Small run(/*memory_bytes=*/40960);
  const std::vector<Tensor> before = {run.weight.detach().clone(), run.other.detach().clone(),
                                      run.buffer.clone()};
  run.weight.sum().backward();
  Options options = PoolOptions("fails", "64MiB");
  options.gpu_ram = "1MiB";
  run.Attach(options);
  ExpectError(2003, "the stand-in has", [&] { run.engine->Seal(); });
  run.optimizer.reset();
  run.engine.reset();
  const std::vector<Tensor> after = {run.weight, run.other, run.buffer};
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(after[i].device().is_cpu());
    EXPECT_TRUE(torch::equal(after[i], before[i])) << i;
  }
  EXPECT_TRUE(run.weight.grad().device().is_cpu());
  run.device.SetMemoryBytes(uint64_t{1} << 26);
  options.job = "goes_on";
  run.Attach(options);
  (run.weight * run.buffer).sum().backward();
  run.optimizer->step();
  EXPECT_EQ(run.engine->step(), 1);
}

// What is attached, or given back, under InferenceMode stays ordinary: it is trained outside of it.
TEST(DeviceFromHostTest, UnderInferenceModeTensorsStayOrdinary) {
  const auto expect_ordinary = [](Small& run) {
    for (const Tensor& tensor : {run.weight, run.other, run.buffer})
      EXPECT_FALSE(tensor.is_inference());
    if (run.weight.grad().defined()) {
      EXPECT_FALSE(run.weight.grad().is_inference());
    }
  };
  for (const bool offloads : {true, false}) {
    Small run;
    SetOffloading(offloads);
    run.weight.sum().backward();
    {
      const c10::InferenceMode inference;
      run.Attach(PoolOptions(offloads ? "under_inference" : "memory", "64MiB"));
    }
    EXPECT_EQ(run.buffer.device(), StandinDevice());
    expect_ordinary(run);
    (run.weight * run.buffer).sum().backward();
    run.optimizer->step();
    EXPECT_EQ(run.engine->step(), 1);
  }
  Small run;  // closed before there was a store
  run.weight.sum().backward();
  run.Attach(PoolOptions("given_back", "64MiB"));
  {
    const c10::InferenceMode inference;
    run.optimizer.reset();
    run.engine.reset();
  }
  EXPECT_TRUE(run.weight.device().is_cpu());
  expect_ordinary(run);
  (run.weight * run.buffer).sum().backward();
}

// Weights after steps of an optimizer that runs in this process, on the device.
std::vector<Tensor> TrainByLbfgs(at::ScalarType dtype, bool offloads) {
  Small run;
  SetOffloading(offloads);
  run.model.to(dtype);
  Options options = PoolOptions(offloads ? toString(dtype) : "memory", "64MiB");
  options.device = StandinDevice().str();
  run.engine = Engine::Open(options);
  torch::optim::LBFGS optimizer(run.model.parameters(),
                                torch::optim::LBFGSOptions(0.1).max_iter(5));
  run.engine->Attach(run.model, optimizer);
  for (int step = 0; step < 3; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const Tensor loss = (run.weight.matmul(run.other) * run.buffer).square().mean();
      loss.backward();
      return loss;
    });
  }
  EXPECT_EQ(run.engine->step(), 3);
  EXPECT_THAT(run.device.Violations(), testing::IsEmpty());
  return {run.engine->Gather(run.weight).cpu(), run.engine->Gather(run.other).cpu()};
}

TEST(DeviceFromHostTest, AnOptimizerOfTheTrainersOwnRunsThere) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const std::vector<Tensor> expected = TrainByLbfgs(dtype, /*offloads=*/false);
    const std::vector<Tensor> actual = TrainByLbfgs(dtype, /*offloads=*/true);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(expected[i], actual[i])) << toString(dtype) << ", " << i;
  }
}

TEST(DeviceFromHostTest, WhatCannotBeTrainedThereIsRefusedBeforeAnythingMoves) {
  Small run;
  const auto attach = [&](const std::string& device) {
    Options options = PoolOptions("refused", "64MiB");
    options.device = device;
    run.engine = Engine::Open(options);
    run.optimizer = run.engine->SGD(run.model, torch::optim::SGDOptions(0.5));
  };
  ExpectError(1002, "no device of torch", [&] { attach("gpu"); });
  ExpectError(1601, "no accelerator plug-in", [&] { attach("meta"); });
  {
    nn::Module numbers;
    numbers.register_parameter("numbers", torch::zeros({64}, at::kComplexFloat));
    Options options = PoolOptions("refused", "64MiB");
    options.device = StandinDevice().str();
    const auto engine = Engine::Open(options);
    ExpectError(1601, "ComplexFloat", [&] { engine->SGD(numbers, torch::optim::SGDOptions(0.5)); });
    EXPECT_TRUE(numbers.parameters()[0].device().is_cpu());
  }
  EXPECT_TRUE(run.weight.device().is_cpu());
  {
    nn::Module there;
    there.register_parameter("there", torch::zeros({64}, StandinDevice()));
    Options options = PoolOptions("refused", "64MiB");
    options.device = "cuda:0";
    // Torch's part for CUDA is not in this program.
    ExpectError(2001, "not in this program", [&] { Engine::Open(options); });
    options.device = StandinDevice().str().substr(0, 8) + "1";
    const auto engine = Engine::Open(options);
    ExpectError(1601, "and `device` is",
                [&] { engine->SGD(there, torch::optim::SGDOptions(0.5)); });
  }
  attach("cpu");
  EXPECT_TRUE(run.weight.device().is_cpu());
}

}  // namespace
}  // namespace offload

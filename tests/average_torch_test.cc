// Moving averages that the daemon keeps (Options::average): those of fp32 weights are compared with
// what plain torch's operators give as swa_utils.AveragedModel uses them, those of bf16 ones with
// the same in memory (OFFLOADD_DISABLE=1), bit by bit.

#include <gtest/gtest.h>
#include <offload/torch.h>
#include <torch/nn/modules.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using at::Tensor;

constexpr int64_t kSteps = 7;

// A weight of several extents, small ones that are bundled, a frozen one, and a layer that takes no
// part before the third step.
struct Model : nn::Module {
  explicit Model(at::ScalarType dtype) {
    torch::manual_seed(7);
    first = register_module("first", nn::Linear(300, 900));
    last = register_module("last", nn::Linear(900, 10));
    late = register_module("late", nn::Linear(300, 10));
    frozen = register_module("frozen", nn::Linear(300, 10));
    for (const Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    to(dtype);
  }
  Tensor Loss(int64_t step) {
    torch::manual_seed(1000 + step);
    const Tensor x = torch::randn({4, 300}).to(first->weight.scalar_type());
    Tensor y = last(torch::tanh(first(x))) + frozen(x);
    if (step >= 2) y = y + late(x);
    return y.square().mean();
  }
  nn::Linear first{nullptr}, last{nullptr}, late{nullptr}, frozen{nullptr};
};

using Make = std::function<std::unique_ptr<optim::Optimizer>(Engine&, Model&)>;
std::unique_ptr<optim::Optimizer> MakeAdamW(Engine& engine, Model& model) {
  // Roots of fp64 numbers are those of the daemon with this one only.
  const bool is_double = model.first->weight.scalar_type() == at::kDouble;
  return engine.AdamW(model, optim::AdamWOptions(1e-2),
                      is_double ? AdamWFlavour::kFused : AdamWFlavour::kMulAdd);
}
std::unique_ptr<optim::Optimizer> MakeSgd(Engine& engine, Model& model) {
  return engine.SGD(model, optim::SGDOptions(1e-2));
}

void Train(Model& model, optim::Optimizer& optimizer, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    optimizer.zero_grad();
    model.Loss(step).backward();
    optimizer.step();
  }
}

std::vector<Tensor> Averages(Engine& engine, const Model& model) {
  std::vector<Tensor> averages;
  for (const Tensor& parameter : model.parameters())
    averages.push_back(engine.Gather(parameter, "average"));
  return averages;
}

void ExpectSame(const std::vector<Tensor>& expected, const std::vector<Tensor>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(expected[i].scalar_type(), actual[i].scalar_type());
    EXPECT_TRUE(torch::equal(expected[i], actual[i])) << "parameter " << i;
  }
}

Options WithAverage(const std::string& job, const std::string& average) {
  Options options = PoolOptions(job, "1GiB");
  options.average = average;
  return options;
}

// As swa_utils.AveragedModel of the parameters that have had an update, and the others as they are.
std::vector<Tensor> InPlainTorch(optim::Optimizer& optimizer, Model& model, bool exponential) {
  const std::vector<Tensor> parameters = model.parameters();
  std::vector<Tensor> averages;
  std::vector<int64_t> counts(parameters.size());
  for (const Tensor& parameter : parameters) averages.push_back(parameter.detach().clone());
  for (int64_t step = 0; step < kSteps; ++step) {
    Train(model, optimizer, step, step + 1);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor weight = parameters[i].detach();
      if (!parameters[i].grad().defined()) continue;
      const int64_t update = ++counts[i];
      if (update == 1 || (!exponential && update <= 2)) {
        averages[i].copy_(weight);
      } else if (exponential) {
        averages[i].lerp_(weight, 1 - 0.9);
      } else if (update % 2 == 0) {  // swa:2:2
        averages[i] = averages[i] + (weight - averages[i]) / (update / 2);
      }
    }
  }
  return averages;
}

void TestAgainstPlainTorch(const std::string& average, bool exponential) {
  SetOffloading(true);
  auto engine = Engine::Open(WithAverage("plain_" + average.substr(0, 3), average));
  Model model(at::kFloat);
  const auto optimizer = MakeAdamW(*engine, model);
  Train(model, *optimizer, 0, kSteps);
  const std::vector<Tensor> averages = Averages(*engine, model);
  Model plain(at::kFloat);
  optim::AdamW reference(plain.parameters(), optim::AdamWOptions(1e-2));
  ExpectSame(InPlainTorch(reference, plain, exponential), averages);
}

TEST(Average, ExponentialOnesAreThoseOfPlainTorch) { TestAgainstPlainTorch("ema:0.9", true); }
TEST(Average, EqualOnesAreThoseOfPlainTorch) { TestAgainstPlainTorch("swa:2:2", false); }

std::vector<Tensor> TrainWith(const Make& make, at::ScalarType dtype, const Options& options,
                              bool offloading, int64_t stop_at = kSteps) {
  SetOffloading(offloading);
  {
    auto engine = Engine::Open(options);
    Model model(dtype);
    const auto optimizer = make(*engine, model);
    Train(model, *optimizer, 0, stop_at);
    if (stop_at == kSteps) return Averages(*engine, model);
  }
  auto engine = Engine::Open(options);
  Model model(dtype);
  const auto optimizer = make(*engine, model);
  EXPECT_EQ(engine->step(), stop_at);
  Train(model, *optimizer, stop_at, kSteps);
  return Averages(*engine, model);
}

TEST(Average, IsTheSameInMemoryOffloadedAtTheFloorAndResumed) {
  const std::pair<const char*, Make> makers[] = {{"adamw", MakeAdamW}, {"sgd", MakeSgd}};
  for (const auto& [name, make] : makers) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      for (const char* const average : {"ema:0.9", "swa:2:3"}) {
        const std::string job =
            std::string(name) + at::toString(dtype) + (average[0] == 'e' ? "e" : "s");
        SCOPED_TRACE(job);
        const Options options = WithAverage(job, average);
        const std::vector<Tensor> expected = TrainWith(make, dtype, options, false);
        ExpectSame(expected, TrainWith(make, dtype, options, true, /*stop_at=*/4));
        Options little = WithAverage(job + "_floor", average);
        {
          auto engine = Engine::Open(WithAverage(job + "_plan", average));
          Model model(dtype);
          make(*engine, model);
          little.ram = std::to_string(engine->plan().floor_bytes);
        }
        ExpectSame(expected, TrainWith(make, dtype, little, true));
      }
    }
  }
}

TEST(Average, IsTheWeightOfWhatHasHadNoUpdate) {
  SetOffloading(true);
  auto engine = Engine::Open(WithAverage("none_yet", "ema:0.9"));
  Model model(at::kFloat);
  const auto optimizer = MakeAdamW(*engine, model);
  ExpectSame({engine->Gather(model.first->weight)},
             {engine->Gather(model.first->weight, "average")});
  Train(model, *optimizer, 0, 2);
  for (const nn::Linear& layer : {model.late, model.frozen})
    ExpectSame({engine->Gather(layer->weight)}, {engine->Gather(layer->weight, "average")});
  EXPECT_FALSE(torch::equal(engine->Gather(model.first->weight),
                            engine->Gather(model.first->weight, "average")));
}

TEST(Average, IsSavedInTheTypeOfTheModel) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const bool offloading : {true, false}) {
      const std::string job = std::string("saved") + at::toString(dtype) + (offloading ? "" : "_m");
      SCOPED_TRACE(job);
      SetOffloading(offloading);
      auto engine = Engine::Open(WithAverage(job, "ema:0.9"));
      Model model(dtype);
      const auto optimizer = MakeAdamW(*engine, model);
      Train(model, *optimizer, 0, 4);
      const std::string folder = Pool() + "/" + job + "_files";
      SaveOptions options;
      options.plane = "average";
      engine->SaveWeights(folder, options);
      Model loaded(dtype);
      LoadWeights(loaded, folder);
      std::vector<Tensor> expected, actual;
      for (const Tensor& average : Averages(*engine, model)) expected.push_back(average.to(dtype));
      for (const Tensor& parameter : loaded.parameters()) actual.push_back(parameter.detach());
      ExpectSame(expected, actual);
    }
  }
}

TEST(Average, IsPartOfTheJob) {
  SetOffloading(true);
  TrainWith(MakeAdamW, at::kFloat, WithAverage("part", "ema:0.9"), true, kSteps);
  const auto attach = [](const std::string& average) {
    auto engine = Engine::Open(WithAverage("part", average));
    Model model(at::kFloat);
    MakeAdamW(*engine, model);
    engine->Seal();
  };
  ExpectError(1602, "average", [&] { attach("none"); });
  attach("ema:0.5");  // how fast it moves may change
  attach("swa:1:1");
}

TEST(Average, IsRefusedWhereItWouldNotMove) {
  for (const bool offloading : {true, false}) {
    SetOffloading(offloading);
    const std::string mode = offloading ? "_offloaded" : "_in_memory";
    ExpectError(1002, "average \"ema:2\"",
                [&] { Engine::Open(WithAverage("bad" + mode, "ema:2")); });
    ExpectError(1604, "LBFGS runs in the trainer's process", [&] {
      auto engine = Engine::Open(WithAverage("lbfgs" + mode, "ema:0.9"));
      Model model(at::kFloat);
      optim::LBFGS optimizer(model.parameters());
      engine->Attach(model, optimizer);
    });
    ExpectError(1604, "a state of 1 updates", [&] {
      auto engine = Engine::Open(WithAverage("stepped" + mode, "ema:0.9"));
      Model model(at::kFloat);
      optim::AdamW optimizer(model.parameters());
      Train(model, optimizer, 0, 1);
      engine->Attach(model, optimizer);
      engine->Seal();
    });
    ExpectError(1604, "a sparse gradient", [&] {
      auto engine = Engine::Open(WithAverage("sparse" + mode, "ema:0.9"));
      nn::Embedding table(nn::EmbeddingOptions(10, 4).sparse(true));
      const auto optimizer = engine->SGD(*table, optim::SGDOptions(0.1));
      table(torch::tensor({1, 2})).sum().backward();
      optimizer->step();
    });
    ExpectError(1002, "keep", [&] {
      auto engine = Engine::Open(PoolOptions("without" + mode, "1GiB"));
      Model model(at::kFloat);
      const auto optimizer = MakeAdamW(*engine, model);
      SaveOptions options;
      options.plane = "average";
      engine->SaveWeights(Pool() + "/without", options);
    });
  }
}

}  // namespace
}  // namespace offload

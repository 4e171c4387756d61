// All micro-batches of a block before the next: the same losses, gradients, buffers and weights as
// micro-batches one after the other, bit for bit; and on the drive the bytes of one micro-batch.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <offload/torch.h>
#include <offload/vertical.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kWidth = 48;

// A half of a transformer's layer, in place where it can be.
struct FeedForwardImpl : nn::Module {
  explicit FeedForwardImpl(int64_t width, int64_t inner = 0) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, inner > 0 ? inner : 3 * width));
    down = register_module("down", nn::Linear(inner > 0 ? inner : 3 * width, width));
  }
  Tensor forward(const Tensor& input) { return input + down(at::gelu(up(norm(input)))).mul_(0.5); }
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(FeedForward);

nn::Sequential MakeModel(int64_t blocks, at::ScalarType type = at::kFloat) {
  torch::manual_seed(7);
  nn::Sequential model(nn::Linear(kWidth, kWidth));
  for (int64_t i = 0; i < blocks; ++i) model->push_back(FeedForward(kWidth));
  model->push_back(nn::Linear(kWidth, 10));
  model->to(type);
  return model;
}

std::vector<Tensor> Inputs(size_t count, at::ScalarType type = at::kFloat) {
  torch::manual_seed(11);
  std::vector<Tensor> inputs;
  for (size_t m = 0; m < count; ++m) {
    inputs.push_back(at::randn({static_cast<int64_t>(5 + m), kWidth}).to(type));
  }
  return inputs;
}

Tensor LossOf(const Tensor& output, size_t m, size_t count) {
  return output.to(at::kFloat).sub(static_cast<double>(m)).square().mean() /
         static_cast<double>(count);
}

// What is compared: losses and gradients, in order.
using Results = std::vector<Tensor>;

void AddGradients(nn::Module& model, Results& results) {
  for (const Tensor& parameter : model.parameters()) {
    results.push_back(parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  }
  for (const Tensor& buffer : model.buffers()) results.push_back(buffer.clone());
}

Results Ordinary(nn::Sequential& model, const std::vector<Tensor>& inputs) {
  Results results;
  for (size_t m = 0; m < inputs.size(); ++m) {
    const Tensor loss = LossOf(model->forward(inputs[m]), m, inputs.size());
    loss.backward();
    results.push_back(loss.detach());
  }
  AddGradients(*model, results);
  return results;
}

Results Vertical(nn::Sequential& model, const std::vector<Tensor>& inputs,
                 const VerticalOptions& options = VerticalOptions()) {
  Results results = VerticalBackward(
      *model, Blocks(model), inputs,
      [&](const Tensor& output, size_t m) { return LossOf(output, m, inputs.size()); }, options);
  AddGradients(*model, results);
  return results;
}

void ExpectSame(const Results& a, const Results& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (a[i].defined()) {
      EXPECT_TRUE(at::allclose(a[i], b[i], 0, 0, /*equal_nan=*/true)) << i;
    }
  }
}

// Both orders on models that begin the same.
void ExpectSameInBothOrders(const std::function<nn::Sequential()>& make,
                            const std::vector<Tensor>& inputs,
                            const VerticalOptions& options = VerticalOptions()) {
  nn::Sequential one = make(), other = make();
  ExpectSame(Ordinary(one, inputs), Vertical(other, inputs, options));
}

TEST(VerticalTest, GradientsAreThoseOfMicroBatchesOneAfterTheOther) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const size_t count : {1, 2, 7}) {
      ExpectSameInBothOrders([&] { return MakeModel(4, type); }, Inputs(count, type));
    }
  }
}

TEST(VerticalTest, GradientsThatAreThereAreAddedTo) {
  nn::Sequential one = MakeModel(2), other = MakeModel(2);
  Ordinary(one, Inputs(3)), Ordinary(other, Inputs(3));
  ExpectSame(Ordinary(one, Inputs(2)), Vertical(other, Inputs(2)));
}

TEST(VerticalTest, OneBlockAndNoMicroBatchAreTheOrdinaryCases) {
  ExpectSameInBothOrders(
      [] {
        torch::manual_seed(1);
        return nn::Sequential(nn::Linear(kWidth, 3));
      },
      Inputs(3));
  nn::Sequential model = MakeModel(1);
  EXPECT_TRUE(VerticalBackward(*model, Blocks(model), {}, [](const Tensor& output, size_t) {
                return output;
              }).empty());
}

TEST(VerticalTest, FrozenBlocksAreNotComputedAgain) {
  int calls = 0;
  nn::Sequential model = MakeModel(3);
  for (const size_t i : {0, 1}) {
    for (Tensor& parameter : model->ptr(i)->parameters()) parameter.set_requires_grad(false);
  }
  std::vector<Block> blocks = Blocks(model);
  blocks[1].forward = [&calls, forward = blocks[1].forward](const Tensor& input) {
    ++calls;
    return forward(input);
  };
  nn::Sequential other = MakeModel(3);
  for (const size_t i : {0, 1}) {
    for (Tensor& parameter : other->ptr(i)->parameters()) parameter.set_requires_grad(false);
  }
  const std::vector<Tensor> inputs = Inputs(3);
  Results results = VerticalBackward(
      *model, blocks, inputs, [](const Tensor& output, size_t m) { return LossOf(output, m, 3); });
  AddGradients(*model, results);
  ExpectSame(Ordinary(other, inputs), results);
  EXPECT_EQ(calls, 3);
}

TEST(VerticalTest, InputsGetTheirGradients) {
  std::vector<Tensor> one = Inputs(3), other = Inputs(3);
  for (size_t m = 0; m < 3; ++m) one[m].set_requires_grad(true), other[m].set_requires_grad(true);
  nn::Sequential model = MakeModel(2), copy = MakeModel(2);
  ExpectSame(Ordinary(model, one), Vertical(copy, other));
  for (size_t m = 0; m < 3; ++m) EXPECT_TRUE(at::equal(one[m].grad(), other[m].grad()));
}

nn::Sequential WithBatchNorm() {
  torch::manual_seed(3);
  nn::Sequential model;
  for (int i = 0; i < 3; ++i) {
    model->push_back(nn::Linear(kWidth, kWidth));
    model->push_back(nn::BatchNorm1d(kWidth));
    model->push_back(nn::ReLU(nn::ReLUOptions(/*inplace=*/true)));
  }
  return model;
}

TEST(VerticalTest, RunningStatisticsAreThoseOfOneForward) {
  ExpectSameInBothOrders(WithBatchNorm, Inputs(4));
}

// What a block makes depends on its buffer, which it writes.
struct DriftImpl : nn::Module {
  DriftImpl() {
    weight = register_parameter("weight", at::full({kWidth}, 0.5));
    drift = register_buffer("drift", at::zeros({kWidth}));
  }
  Tensor forward(const Tensor& input) {
    const Tensor output = (input + drift) * weight;
    const torch::NoGradGuard no_grad;
    if (writes_at < 0 || calls % 4 == writes_at) drift.add_(input.mean(0));
    ++calls;
    return output;
  }
  Tensor weight, drift;
  int64_t calls = 0, writes_at = -1;
};
TORCH_MODULE(Drift);

TEST(VerticalTest, ABufferThatIsReadIsAsItWas) {
  for (const int64_t writes_at : {-1, 0, 2}) {
    ExpectSameInBothOrders(
        [&] {
          nn::Sequential model(nn::Linear(kWidth, kWidth), Drift(), nn::Linear(kWidth, 3));
          model->ptr(1)->as<DriftImpl>()->writes_at = writes_at;
          torch::manual_seed(5);
          const torch::NoGradGuard no_grad;
          for (Tensor& parameter : model->parameters()) parameter.normal_();
          return model;
        },
        Inputs(4));
  }
}

TEST(VerticalTest, FunctionsWithoutAModuleWatchTheWholeModel) {
  nn::Sequential one = WithBatchNorm(), other = WithBatchNorm();
  std::vector<Block> blocks = Blocks(other);
  for (Block& block : blocks) block.module = nullptr;
  const std::vector<Tensor> inputs = Inputs(3);
  Results results = VerticalBackward(
      *other, blocks, inputs, [](const Tensor& output, size_t m) { return LossOf(output, m, 3); });
  AddGradients(*other, results);
  ExpectSame(Ordinary(one, inputs), results);
}

TEST(VerticalTest, NotANumberIsNoDifference) {
  std::vector<Tensor> inputs = Inputs(2);
  inputs[1].fill_(std::numeric_limits<float>::quiet_NaN());
  ExpectSameInBothOrders([] { return MakeModel(2); }, inputs);
}

TEST(VerticalTest, SpilledIsTheSame) {
  VerticalOptions options;
  options.spill_folder = Pool();
  const auto files = [] {
    return std::distance(std::filesystem::directory_iterator(Pool()),
                         std::filesystem::directory_iterator());
  };
  const auto before = files();
  ExpectSameInBothOrders([] { return MakeModel(3); }, Inputs(5), options);
  ExpectSameInBothOrders([] { return MakeModel(3, at::kBFloat16); }, Inputs(5, at::kBFloat16),
                         options);
  EXPECT_EQ(files(), before);
  nn::Sequential model = MakeModel(1);
  options.spill_folder = Pool() + "/nowhere";
  ExpectError(1201, "nowhere", [&] { Vertical(model, Inputs(2), options); });
}

// ---- What has other bits in this order ----------------------------------------------------------

nn::Sequential WithDropout() {
  torch::manual_seed(9);
  return nn::Sequential(nn::Linear(kWidth, kWidth), nn::Dropout(0.3), nn::Linear(kWidth, kWidth),
                        nn::Dropout(0.3), nn::Linear(kWidth, 4));
}

TEST(VerticalTest, RandomNumbersAreRefused) {
  nn::Sequential model = WithDropout();
  ExpectError(1002, "block 1 draws random numbers", [&] { Vertical(model, Inputs(2)); });
  model->eval();
  EXPECT_NO_THROW(Vertical(model, Inputs(2)));
}

TEST(VerticalTest, OneMicroBatchDrawsWhatItWouldDraw) {
  nn::Sequential one = WithDropout(), other = WithDropout();
  const std::vector<Tensor> inputs = Inputs(1);
  torch::manual_seed(21);
  const Results ordinary = Ordinary(one, inputs);
  const Tensor next = at::randn({3});
  torch::manual_seed(21);
  ExpectSame(ordinary, Vertical(other, inputs));
  EXPECT_TRUE(at::equal(next, at::randn({3})));
}

TEST(VerticalTest, DropoutDropsTheSameInBothForwards) {
  VerticalOptions options;
  options.exact = false;
  nn::Sequential model = WithDropout();
  const std::vector<Tensor> inputs = Inputs(4);
  torch::manual_seed(2);
  Vertical(model, inputs, options);
  // The same by hand: a forward of every block over all micro-batches, and one graph.
  nn::Sequential other = WithDropout();
  torch::manual_seed(2);
  std::vector<Tensor> values = inputs;
  for (const nn::AnyModule& block : *other) {
    nn::AnyModule module = block;
    for (Tensor& value : values) value = module.forward(value);
  }
  for (size_t m = 0; m < 4; ++m) LossOf(values[m], m, 4).backward();
  Results one, two;
  AddGradients(*model, one), AddGradients(*other, two);
  ExpectSame(one, two);
}

TEST(VerticalTest, AParameterOfTwoBlocksIsRefused) {
  const auto make = [] {
    torch::manual_seed(4);
    nn::Linear shared(kWidth, kWidth);
    return nn::Sequential(shared, nn::Linear(kWidth, kWidth), shared);
  };
  nn::Sequential model = make();
  ExpectError(1002, "parameter '0.weight' is of blocks 0 and 2",
              [&] { Vertical(model, Inputs(2)); });
  VerticalOptions options;
  options.exact = false;
  EXPECT_NO_THROW(Vertical(model, Inputs(2), options));
  ExpectSameInBothOrders(make, Inputs(1));
}

TEST(VerticalTest, AnotherOutputTheSecondTimeIsRefused) {
  nn::Sequential model = MakeModel(1);
  std::vector<Block> blocks = Blocks(model);
  double calls = 0;
  blocks[1].forward = [&](const Tensor& input) { return input * ++calls; };
  ExpectError(1002, "block 1 computed something else the second time", [&] {
    VerticalBackward(*model, blocks, Inputs(2),
                     [](const Tensor& output, size_t m) { return LossOf(output, m, 2); });
  });
}

TEST(VerticalTest, NothingToComputeIsRefused) {
  nn::Sequential model = MakeModel(1);
  const auto loss = [](const Tensor& output, size_t) { return output.sum(); };
  ExpectError(1002, "no blocks", [&] { VerticalBackward(*model, {}, Inputs(1), loss); });
  ExpectError(1002, "no function", [&] { VerticalBackward(*model, {{}}, Inputs(1), loss); });
  ExpectError(1002, "no tensor", [&] { VerticalBackward(*model, Blocks(model), {{}}, loss); });
  ExpectError(1002, "no loss", [&] { VerticalBackward(*model, Blocks(model), Inputs(1), {}); });
}

// ---- Offloaded ----------------------------------------------------------------------------------

constexpr int64_t kWide = 256;

struct Outcome {
  std::vector<Tensor> results;
  double bytes_per_step = 0;
};

enum class Order { kOrdinary, kVertical };

Outcome Train(const std::string& job, const std::string& ram, Order order, size_t count,
              int64_t steps) {
  torch::manual_seed(13);
  nn::Sequential model;
  for (int i = 0; i < 10; ++i) model->push_back(FeedForward(kWide, 1024));
  Options options = PoolOptions(job, ram);
  options.weights_home = options.state_home = "nvme";
  options.update_in_backward = "never";  // whose bytes depend on what was foreseen
  const auto engine = Engine::Open(options);
  const auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
  Outcome run;
  uint64_t before = 0;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<Tensor> inputs;
    for (size_t m = 0; m < count; ++m) {
      torch::manual_seed(100 * step + static_cast<int64_t>(m));
      inputs.push_back(at::randn({4, kWide}));
    }
    const auto loss = [&](const Tensor& output, size_t m) { return LossOf(output, m, count); };
    if (order == Order::kVertical) {
      for (const Tensor& each : VerticalBackward(*model, Blocks(model), inputs, loss)) {
        run.results.push_back(each);
      }
    } else {
      for (size_t m = 0; m < count; ++m) {
        const Tensor each = loss(model->forward(inputs[m]), m);
        each.backward();
        run.results.push_back(each.detach());
      }
    }
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer->step();
    optimizer->zero_grad();
    engine->WaitDurable();
    const Statistics statistics = engine->statistics();
    const uint64_t now = statistics.bytes_read + statistics.bytes_written;
    if (step >= 2) run.bytes_per_step += static_cast<double>(now - before) / (steps - 2.0);
    before = now;
  }
  for (const Tensor& parameter : model->parameters()) {
    for (const char* const plane : {"weight", "exp_avg", "exp_avg_sq"}) {
      run.results.push_back(engine->Gather(parameter, plane));
    }
  }
  return run;
}

// With all gradients in memory, and with gradients that pass a window of their own: those are
// written again where the window has no room for all of a block's.
TEST(VerticalOffloadedTest, AccumulationCostsNoByteMore) {
  const std::pair<const char*, double> cases[] = {{"96MiB", 1.1}, {"48MiB", 1.5}};
  for (const auto& [ram, allowed] : cases) {
    SCOPED_TRACE(ram);
    SetOffloading(true);
    const auto train = [ram = ram](const char* job, Order order, size_t count) {
      return Train(std::string(job) + ram, ram, order, count, 5);
    };
    const Outcome one = train("one", Order::kOrdinary, 1);
    const Outcome ordinary = train("ordinary", Order::kOrdinary, 8);
    const Outcome vertical = train("vertical", Order::kVertical, 8);
    ExpectSame(ordinary.results, vertical.results);
    EXPECT_LE(vertical.bytes_per_step, allowed * one.bytes_per_step);
    EXPECT_GE(ordinary.bytes_per_step, 1.7 * one.bytes_per_step);
    printf(
        "bytes of a step: %.0f with one micro-batch; with eight %.0f one after the other, %.0f "
        "in vertical order\n",
        one.bytes_per_step, ordinary.bytes_per_step, vertical.bytes_per_step);
    SetOffloading(false);
    ExpectSame(train("memory", Order::kVertical, 8).results, vertical.results);
  }
}

}  // namespace
}  // namespace offload

#include "zero3/torch/in_memory.h"

#include <gtest/gtest.h>
#include <offload/torch.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>

namespace offload::zero3 {
namespace {

using torch::Tensor;

struct Parameters : torch::nn::Module {
  explicit Parameters(at::ScalarType dtype) {
    torch::manual_seed(5);
    first = register_parameter("first", torch::randn({37, 11}).to(dtype));
    second = register_parameter("second", torch::randn({1003}).to(dtype));
    frozen = register_parameter("frozen", torch::randn({7}).to(dtype), /*requires_grad=*/false);
    tied = register_parameter("tied", first);
  }

  // Different at every step, and the same for every optimizer that is compared.
  void SetGradients(int64_t step) {
    torch::manual_seed(static_cast<uint64_t>(100 + step));
    for (Tensor* parameter : {&first, &second}) {
      parameter->mutable_grad() = torch::randn(parameter->sizes()).to(parameter->scalar_type());
    }
  }

  Tensor first, second, frozen, tied;
};

const InMemoryState& StateOf(const torch::optim::Optimizer& optimizer, const Tensor& parameter) {
  return *dynamic_cast<const InMemoryOptimizer&>(optimizer).StateOf(parameter);
}

torch::optim::AdamWOptions AdamWOptions() {
  return torch::optim::AdamWOptions(1e-2).weight_decay(0.1).betas({0.9, 0.95});
}

TEST(InMemoryTest, MulAddFlavourIsTorchsOwnClassBitForBit) {
  Parameters ours(at::kFloat), theirs(at::kFloat);
  auto optimizer = InMemoryAdamW(ours, AdamWOptions(), AdamWFlavour::kMulAdd);
  torch::optim::AdamW reference(std::vector<Tensor>{theirs.first, theirs.second, theirs.frozen},
                                AdamWOptions());
  for (int64_t step = 0; step < 5; ++step) {
    ours.SetGradients(step);
    theirs.SetGradients(step);
    optimizer->step();
    reference.step();
  }
  EXPECT_TRUE(ours.first.equal(theirs.first));
  EXPECT_TRUE(ours.second.equal(theirs.second));
}

TEST(InMemoryTest, FlavoursDifferByRoundingsOnly) {
  std::vector<Tensor> results;
  for (const auto flavour : {AdamWFlavour::kFused, AdamWFlavour::kLerp, AdamWFlavour::kMulAdd}) {
    Parameters model(at::kFloat);
    auto optimizer = InMemoryAdamW(model, AdamWOptions(), flavour);
    for (int64_t step = 0; step < 3; ++step) {
      model.SetGradients(step);
      optimizer->step();
    }
    results.push_back(model.second.detach().clone());
  }
  EXPECT_TRUE(results[0].allclose(results[1], 1e-6, 1e-6));
  EXPECT_TRUE(results[0].allclose(results[2], 1e-6, 1e-6));
}

TEST(InMemoryTest, SgdIsTorchsOwnClassBitForBit) {
  for (const bool nesterov : {false, true}) {
    Parameters ours(at::kFloat), theirs(at::kFloat);
    const auto options =
        torch::optim::SGDOptions(1e-2).momentum(0.9).weight_decay(0.1).nesterov(nesterov);
    auto optimizer = InMemorySGD(ours, options);
    torch::optim::SGD reference(std::vector<Tensor>{theirs.first, theirs.second, theirs.frozen},
                                options);
    for (int64_t step = 0; step < 4; ++step) {
      ours.SetGradients(step);
      theirs.SetGradients(step);
      optimizer->step();
      reference.step();
    }
    EXPECT_TRUE(ours.first.equal(theirs.first));
    EXPECT_TRUE(ours.second.equal(theirs.second));
  }
}

TEST(InMemoryTest, HalfPrecisionWeightIsTheCastOfAnFp32Master) {
  Parameters half(at::kBFloat16), full(at::kBFloat16);
  full.first.set_data(full.first.to(at::kFloat));
  auto half_optimizer = InMemoryAdamW(half, AdamWOptions());
  auto full_optimizer = InMemoryAdamW(full, AdamWOptions());
  for (int64_t step = 0; step < 3; ++step) {
    half.SetGradients(step);
    full.SetGradients(step);
    full.first.mutable_grad() = half.first.grad().to(at::kFloat);
    half_optimizer->step();
    full_optimizer->step();
  }
  const InMemoryState& state = StateOf(*half_optimizer, half.first);
  EXPECT_TRUE(state.master.equal(full.first));
  EXPECT_TRUE(state.planes[1].equal(StateOf(*full_optimizer, full.first).planes[1]));
  EXPECT_TRUE(half.first.equal(state.master.to(at::kBFloat16)));
  EXPECT_FALSE(half.first.to(at::kFloat).equal(state.master)) << "the master holds more";
}

TEST(InMemoryTest, WrittenParameterBecomesItsMaster) {
  Parameters model(at::kBFloat16);
  auto optimizer = InMemoryAdamW(model, torch::optim::AdamWOptions(0.0).weight_decay(0));
  model.SetGradients(0);
  optimizer->step();
  const Tensor exp_avg = StateOf(*optimizer, model.first).planes[0].clone();
  {
    const at::NoGradGuard no_gradients;
    model.first.fill_(2.5);
  }
  model.first.mutable_grad().zero_();
  optimizer->step();
  EXPECT_TRUE(model.first.eq(2.5).all().item<bool>());
  EXPECT_TRUE(StateOf(*optimizer, model.first).planes[0].allclose(exp_avg * 0.9f));
}

TEST(InMemoryTest, ParameterWithoutGradientIsSkippedAndTiedOneCountsOnce) {
  Parameters model(at::kFloat);
  const Tensor frozen = model.frozen.clone();
  const Tensor second = model.second.detach().clone();
  auto optimizer = InMemoryAdamW(model, AdamWOptions());
  EXPECT_EQ(optimizer->param_groups().front().params().size(), 3u);
  model.SetGradients(0);
  model.second.mutable_grad().reset();
  optimizer->step();
  EXPECT_TRUE(model.frozen.equal(frozen));
  EXPECT_TRUE(model.second.equal(second));
  EXPECT_EQ(StateOf(*optimizer, model.first).step, 1);
}

TEST(InMemoryTest, AmsgradIsTorchsOwnClassBitForBit) {
  Parameters ours(at::kFloat), theirs(at::kFloat);
  const auto options = AdamWOptions().amsgrad(true);
  auto optimizer = InMemoryAdamW(ours, options, AdamWFlavour::kMulAdd);
  torch::optim::AdamW reference(std::vector<Tensor>{theirs.first, theirs.second, theirs.frozen},
                                options);
  for (int64_t step = 0; step < 5; ++step) {
    ours.SetGradients(step);
    theirs.SetGradients(step);
    optimizer->step();
    reference.step();
  }
  EXPECT_TRUE(ours.first.equal(theirs.first));
  EXPECT_TRUE(ours.second.equal(theirs.second));
}

// Rows of eleven in memory of twenty, columns first, and two sliced axes: whatever lies where.
TEST(InMemoryTest, RulesFollowTheElementsWhereverTheyLie) {
  torch::manual_seed(8);
  const Tensor start = torch::randn({37, 11});
  const auto slice = [](const Tensor& values) {
    Tensor whole = torch::zeros({37, 20});
    whole.narrow(1, 0, 11).copy_(values);
    return whole.narrow(1, 0, 11);
  };
  const std::function<Tensor(const Tensor&)> layouts[] = {
      [](const Tensor& values) { return values.clone(); }, slice,
      [](const Tensor& values) { return values.t().contiguous().t(); }};
  for (const bool is_lamb : {false, true}) {
    Tensor expected;
    for (const auto& weights : layouts) {
      for (const auto& gradients : layouts) {
        torch::nn::Module model;
        Tensor parameter = model.register_parameter("weight", weights(start));
        const auto optimizer =
            is_lamb ? InMemoryLAMB(model, LAMBOptions()) : InMemoryLion(model, LionOptions());
        for (int64_t step = 0; step < 3; ++step) {
          torch::manual_seed(static_cast<uint64_t>(step));
          parameter.mutable_grad() = gradients(torch::randn({37, 11}));
          optimizer->step();
        }
        if (!expected.defined()) expected = parameter.detach().clone();
        // LAMB adds its norms in the order of memory.
        const bool is_exact = !is_lamb || parameter.stride(0) != 1;
        EXPECT_TRUE(is_exact ? parameter.equal(expected) : parameter.allclose(expected, 1e-6, 1e-6))
            << is_lamb << parameter.strides();
      }
    }
  }
}

TEST(InMemoryTest, OptionsThatMakeNoSenseAreRefused) {
  Parameters model(at::kFloat);
  for (const auto& options : {AdamWOptions().eps(-1), AdamWOptions().betas({0.9, 1.0})}) {
    try {
      InMemoryAdamW(model, options);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.id(), 1002) << error.what();
    }
  }
}

TEST(InMemoryTest, WhatTheOptimizerKeepsIsGatheredByItsName) {
  Parameters model(at::kFloat);
  auto pointer = InMemorySGD(model, torch::optim::SGDOptions(1e-2).momentum(0.9));
  auto& optimizer = dynamic_cast<InMemoryOptimizer&>(*pointer);
  EXPECT_TRUE(optimizer.Gather(model.first, "momentum_buffer").eq(0).all().item<bool>());
  model.SetGradients(0);
  optimizer.step();
  EXPECT_TRUE(optimizer.Gather(model.first, "momentum_buffer").equal(model.first.grad()));
  EXPECT_TRUE(optimizer.Gather(model.first, "exp_avg").equal(model.first.grad()));
  EXPECT_THROW(optimizer.Gather(model.first, "exp_avg_sq"), Error);
}

}  // namespace
}  // namespace offload::zero3

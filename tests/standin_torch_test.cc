// The stand-in device computes what the CPU does, bit for bit, and finds who does not wait for it.
#include "tests/standin_torch.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using accelerator::HostAccelerator;
using accelerator::Pace;
using at::Tensor;

struct Network : nn::Module {
  Network() {
    embedding = register_module("embedding", nn::Embedding(100, 64));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({64})));
    up = register_module("up", nn::Linear(64, 128));
    down = register_module("down", nn::Linear(128, 64));
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    x = x + down(torch::gelu(up(norm(x))));
    return nn::functional::linear(x, embedding->weight);
  }
  nn::Embedding embedding{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};

// Losses, norms, gradients and weights of a few steps.
std::vector<Tensor> Train(c10::Device device, at::ScalarType dtype) {
  torch::manual_seed(7);
  Network network;
  network.to(dtype);
  network.to(device);
  torch::optim::AdamW optimizer(network.parameters(), 1e-2);
  std::vector<Tensor> seen;
  for (int step = 0; step < 3; ++step) {
    const Tensor tokens = torch::randint(100, {4, 12}).to(device);
    const Tensor logits = network.forward(tokens).to(at::kFloat).reshape({-1, 100});
    const Tensor loss = torch::cross_entropy_loss(logits, tokens.reshape({-1}));
    loss.backward();
    seen.push_back(loss.detach().cpu());
    seen.push_back(torch::tensor(nn::utils::clip_grad_norm_(network.parameters(), 0.5)));
    for (const Tensor& parameter : network.parameters()) seen.push_back(parameter.grad().cpu());
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const Tensor& parameter : network.parameters()) seen.push_back(parameter.detach().cpu());
  return seen;
}

class StandinTest : public testing::Test {
 protected:
  StandinTest() : device_({.seed = 5, .pace = Pace::kLate}) {
    at::set_num_threads(1);
    UseStandin(device_);
  }
  HostAccelerator device_;
};

TEST_F(StandinTest, ANetworkHasTheBitsOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::vector<Tensor> expected = Train(at::kCPU, dtype);
    const std::vector<Tensor> actual = Train(StandinDevice(), dtype);
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(actual[i].device().is_cpu());
      EXPECT_TRUE(torch::equal(expected[i], actual[i])) << c10::toString(dtype) << ", " << i;
    }
  }
  EXPECT_THAT(device_.Violations(), testing::IsEmpty());
  EXPECT_THAT(device_.Leftovers(), testing::IsEmpty());
}

TEST_F(StandinTest, BackwardRunsInAThreadOfTheDevice) {
  const Tensor x = torch::ones({3}, at::TensorOptions(StandinDevice()).requires_grad(true));
  std::thread::id thread;
  x.register_hook([&](const Tensor&) { thread = std::this_thread::get_id(); });
  (x * 2).sum().backward();
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_TRUE(torch::equal(x.grad().cpu(), torch::full({3}, 2.0)));
}

// What one stream writes and another reads.
Tensor AcrossStreams(bool waits) {
  const Tensor x = torch::ones({64}, StandinDevice());
  const c10::Stream other = NewStandinStream();
  c10::Event event(other.device_type());
  event.record(c10::impl::VirtualGuardImpl(other.device_type()).getStream(other.device()));
  const c10::StreamGuard guard(other);
  if (waits) event.block(other);
  const Tensor sum = x.sum();
  x.record_stream(other);
  return sum.cpu();
}

TEST_F(StandinTest, AWaitBetweenStreamsThatIsMissingIsReported) {
  EXPECT_EQ(AcrossStreams(/*waits=*/true).item<float>(), 64);
  EXPECT_THAT(device_.Violations(), testing::IsEmpty());
  AcrossStreams(/*waits=*/false);
  EXPECT_THAT(device_.Violations(), testing::Not(testing::IsEmpty()));
}

}  // namespace
}  // namespace offload

// Weights that the trainer writes between its steps: their bytes go to the daemon behind the
// operator. Whatever comes next, on whichever thread (another operator, a pointer, a copy of the
// daemon's, a step, the end of the engine), finds what was written, and what is written often is
// put once. Compared with the same in memory (OFFLOADD_DISABLE=1), bit by bit.

#include <gtest/gtest.h>
#include <offload/torch.h>
#include <torch/nn/modules.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;

// Weights of several extents, of one, and small ones that are bundled; alike where they are to be
// copied to each other.
struct Model : nn::Module {
  explicit Model(at::ScalarType dtype) {
    torch::manual_seed(3);
    add({700, 900});
    add({900, 700});
    for (int i = 0; i < 4; ++i) add({130, 70});
    for (int i = 0; i < 12; ++i) add({24});
    to(dtype);
  }
  void add(std::vector<int64_t> sizes) {
    register_parameter("p" + std::to_string(parameters(/*recurse=*/false).size()),
                       torch::randn(sizes));
  }
  Tensor Loss() {
    std::vector<Tensor> sums;
    for (const Tensor& parameter : parameters()) sums.push_back(parameter.square().sum());
    return torch::stack(sums).sum();
  }
};

class Program {
 public:
  Program(at::ScalarType dtype, const Options& options, bool offloading, uint32_t seed)
      : random_(seed), model_(dtype) {
    SetOffloading(offloading);
    optimizer_.emplace(model_.parameters(), torch::optim::SGDOptions(1e-3));
    engine_ = Engine::Open(options);
    engine_->Attach(model_, *optimizer_);
  }

  std::vector<Tensor> Run(int actions) {
    for (int i = 0; i < actions; ++i) Act();
    engine_.reset();
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : model_.parameters()) log_.push_back(parameter.clone());
    return std::move(log_);
  }

 private:
  Tensor Any() { return model_.parameters()[random_() % model_.parameters().size()]; }
  // One that is as large.
  Tensor Like(const Tensor& parameter) {
    for (;;) {
      if (const Tensor other = Any(); other.sizes() == parameter.sizes()) return other;
    }
  }
  void Step() {
    const torch::AutoGradMode grad(true);
    optimizer_->zero_grad();
    model_.Loss().backward();
    optimizer_->step();
  }

  void Act() {
    const torch::NoGradGuard no_grad;
    Tensor parameter = Any();
    switch (random_() % 17) {
      case 0:
      case 1:
        parameter.mul_(0.75);
        break;
      case 2:
        parameter.add_(Like(parameter), 0.5);
        break;
      case 3:
        parameter.copy_(Like(parameter));
        break;
      case 4:
        log_.push_back(parameter.sum());
        break;
      case 5:
        log_.push_back(parameter * 1);
        break;
      case 6:
        parameter[0].fill_(0.25);
        break;
      case 7:
        *(static_cast<char*>(parameter.data_ptr()) + 1) ^= 1;
        break;
      case 8:
        log_.push_back(torch::tensor(*(static_cast<const char*>(parameter.const_data_ptr()) + 1)));
        break;
      case 9:
        log_.push_back(engine_->Gather(parameter));
        break;
      case 10:
        torch::_foreach_mul_(model_.parameters(), 1.5);
        torch::_foreach_mul_(model_.parameters(), 0.5);
        break;
      case 11:
        at::mul_out(parameter, Like(parameter), Like(parameter));
        parameter.clamp_(-2, 2);
        break;
      case 12:
        EXPECT_ANY_THROW(parameter.add_(torch::ones({3, 5, 7})));
        break;
      case 13:
        parameter.data().add_(0.125);
        break;
      case 14:
        std::thread([&] {
          const torch::NoGradGuard no_grad_here;
          log_.push_back(parameter.abs().amax());
          parameter.sub_(0.25);
        }).join();
        break;
      case 15:
        parameter.set_data(parameter.clone());
        break;
      default:
        if (random_() % 3 == 0) Step();
    }
  }

  std::mt19937 random_;
  Model model_;
  std::optional<torch::optim::SGD> optimizer_;
  std::shared_ptr<Engine> engine_;
  std::vector<Tensor> log_;
};

Options With(const std::string& job, const std::string& ram) {
  Options options = PoolOptions(job, ram);
  options.weights_at_close = "memory";
  return options;
}

std::string Floor(at::ScalarType dtype) {
  SetOffloading(true);
  Model model(dtype);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(1e-3));
  const auto engine = Engine::Open(With(c10::toString(dtype), "1GiB"));
  engine->Attach(model, optimizer);
  return std::to_string(engine->plan().floor_bytes);
}

class LatePutsTest : public testing::TestWithParam<at::ScalarType> {};

TEST_P(LatePutsTest, WhateverComesNextFindsWhatWasWritten) {
  const std::string floor = Floor(GetParam());
  for (uint32_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::string job = std::string(c10::toString(GetParam())) + std::to_string(seed);
    const Options options = With(job, seed % 2 == 0 ? floor : "1GiB");
    const std::vector<Tensor> expected = Program(GetParam(), options, false, seed).Run(300);
    const std::vector<Tensor> actual = Program(GetParam(), options, true, seed).Run(300);
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_TRUE(torch::equal(expected[i], actual[i])) << "entry " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, LatePutsTest, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(LatePutsTest, WhatIsWrittenOftenIsPutOnce) {
  SetOffloading(true);
  Model model(at::kFloat);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(1e-3));
  const auto engine = Engine::Open(With("often", "1GiB"));
  engine->Attach(model, optimizer);
  const torch::NoGradGuard no_grad;
  Tensor weight = model.parameters()[0], other = model.parameters()[1];
  const auto bytes_of_writes = [&](int writes) {
    engine->Gather(other);
    const uint64_t before = engine->statistics().bytes_written;
    for (int i = 0; i < writes; ++i) {
      weight.add_(1);
      other.sum();
    }
    engine->Gather(other);
    return engine->statistics().bytes_written - before;
  };
  const uint64_t once = bytes_of_writes(1);
  EXPECT_GE(once, weight.nbytes());
  EXPECT_EQ(bytes_of_writes(10), once);
}

}  // namespace
}  // namespace offload

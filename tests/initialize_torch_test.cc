// Engine::Initialize: a DeepSpeed configuration gives engine and optimizer, and training is that of
// the same loop in memory, clipping included.
#include <offload/torch.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace offload {
namespace {

class InitializeTest : public ::testing::Test {
 protected:
  InitializeTest() {
    torch::set_num_threads(1);
    const char* const scratch = std::getenv("TEST_TMPDIR");
    std::string name = absl::StrCat(scratch == nullptr ? "." : scratch, "/initialize-XXXXXX");
    folder_ = mkdtemp(name.data());
    std::filesystem::create_directory(folder_ / "pool");
    for (const char* variable : {"OFFLOADD_POOL", "OFFLOADD_JOB", "OFFLOADD_CONFIG"})
      unsetenv(variable);
    setenv("OFFLOADD_RAM", "64MiB", 1);
    setenv("XDG_CONFIG_HOME", folder_.c_str(), 1);
  }
  ~InitializeTest() override { std::filesystem::remove_all(folder_); }

  // A configuration with the pool and `rest`.
  std::string Config(const std::string& rest) const {
    return absl::StrCat(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": )",
                        R"("nvme", "nvme_path": ")", (folder_ / "pool").string(), "\"}}, ", rest,
                        "}");
  }

  static torch::nn::Sequential MakeModel() {
    torch::manual_seed(0);
    return torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::GELU(),
                                 torch::nn::Linear(64, 32));
  }

  static std::vector<float> Train(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer,
                                  int64_t accumulation, double clipping) {
    std::vector<float> losses;
    for (int step = 0; step < 4; ++step) {
      for (int64_t micro = 0; micro < accumulation; ++micro) {
        torch::manual_seed(100 + step * 10 + micro);
        const torch::Tensor x = torch::randn({8, 32}).to(model->parameters()[0].dtype());
        torch::Tensor loss = (model->forward(x) - x).to(torch::kFloat).pow(2).mean() / accumulation;
        loss.backward();
        losses.push_back(loss.item<float>());
      }
      if (clipping > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), clipping);
      optimizer.step();
      optimizer.zero_grad();
    }
    return losses;
  }

  // The same bits as `expected`, which is in memory.
  static void ExpectEqual(torch::nn::Sequential& model, torch::nn::Sequential& expected) {
    const auto here = model->parameters(), there = expected->parameters();
    for (size_t i = 0; i < here.size(); ++i)
      EXPECT_TRUE(torch::equal(here[i].detach().clone(), there[i])) << i;
  }

  static int IdOf(const std::string& config) {
    auto model = MakeModel();
    try {
      Engine::Initialize(*model, config);
    } catch (const Error& error) {
      return error.id();
    }
    return -1;
  }

  std::filesystem::path folder_;
};

TEST_F(InitializeTest, AFileGivesEngineAndOptimizerAndTheBitsOfTheLoopInMemory) {
  const std::string file = folder_ / "ds_config.json";
  std::ofstream(file) << Config(R"("train_batch_size": 16, "train_micro_batch_size_per_gpu": 8,
      "gradient_clipping": 0.1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2,
      "weight_decay": 0.1, "betas": [0.8, 0.99]}})");
  auto model = MakeModel(), expected = MakeModel();
  auto made = Engine::Initialize(*model, file);
  EXPECT_EQ(made.accumulation, 2);
  EXPECT_NE(made.report.find("mapped    gradient_clipping = 0.1"), std::string::npos)
      << made.report;
  auto optimizer = InMemoryAdamW(
      *expected, torch::optim::AdamWOptions(1e-2).weight_decay(0.1).betas({0.8, 0.99}));
  EXPECT_EQ(Train(model, *made.optimizer, 2, /*clipping=*/0),
            Train(expected, *optimizer, 2, /*clipping=*/0.1));
  ExpectEqual(model, expected);
  EXPECT_EQ(made.engine->step(), 4);
}

TEST_F(InitializeTest, RatesThatTheLoopChangesCountWithClippingToo) {
  auto model = MakeModel(), expected = MakeModel();
  auto made =
      Engine::Initialize(*model, Config(R"("bf16": {"enabled": true}, "gradient_clipping": 1e-3,
                        "optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}})"));
  EXPECT_EQ(model->parameters()[0].dtype(), torch::kBFloat16);
  expected->to(torch::kBFloat16);
  auto optimizer = InMemorySGD(*expected, torch::optim::SGDOptions(1).momentum(0.9));
  for (torch::optim::Optimizer* each : {made.optimizer.get(), optimizer.get()})
    each->param_groups()[0].options().set_lr(0.5);
  EXPECT_EQ(Train(model, *made.optimizer, 1, /*clipping=*/0),
            Train(expected, *optimizer, 1, /*clipping=*/1e-3));
  ExpectEqual(model, expected);
}

TEST_F(InitializeTest, WhatWouldTrainSomethingElseIsRefused) {
  const std::string adam = R"("optimizer": {"type": "AdamW"})";
  EXPECT_EQ(IdOf(Config(adam + R"(, "fp16": {"enabled": true})")), 1104);
  EXPECT_EQ(IdOf(Config(adam + R"(, "compression_training": {"enabled": true})")), 1107);
  EXPECT_EQ(IdOf(Config(adam + R"(, "scheduler": {"type": "WarmupLR"})")), 1104);
  const char* const autocast = R"(, "torch_autocast": {"enabled": true, "dtype": "bf16"})";
  EXPECT_EQ(IdOf(Config(adam + autocast)), 1104);
  EXPECT_EQ(IdOf(Config(R"("optimizer": {"type": "AdamW", "params": {"lr": "auto"}})")), 1105);
  EXPECT_EQ(IdOf(Config(R"("gradient_clipping": 1)")), 1105) << "no optimizer";
  EXPECT_EQ(IdOf("{\"optimizer\": }"), 1101);
  EXPECT_EQ(IdOf("nowhere.json"), 1405);
  EXPECT_EQ(IdOf(R"({"zero_optimization": {"offload_param": {"device": "nvme"}}})"), 1105);
}

TEST_F(InitializeTest, TheEnvironmentCountsMoreAndAFileLess) {
  std::filesystem::create_directory(folder_ / "offloadd");
  std::ofstream(folder_ / "offloadd" / "offloadd.toml") << "job = \"of-file\"\nio.engine = "
                                                           "\"threads\"\n";
  std::filesystem::create_directory(folder_ / "other");
  setenv("OFFLOADD_POOL", (folder_ / "other").c_str(), 1);
  auto model = MakeModel();
  auto made = Engine::Initialize(*model, Config(R"("optimizer": {"type": "AdamW"})"));
  made.engine->Seal();
  EXPECT_TRUE(std::filesystem::exists(folder_ / "other" / "of-file.offload"));
}

}  // namespace
}  // namespace offload

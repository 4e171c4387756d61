// A trainer that attaches must compute what it computes without: the same program runs twice, once
// against a real daemon and once with OFFLOADD_DISABLE=1, and everything it can see is compared bit
// by bit.

#include <gtest/gtest.h>
#include <offload/torch.h>
#include <signal.h>
#include <stdlib.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/private_daemon.h"
#include "tests/torch_fixture.h"
#include "zero3/planner.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kTokens = 1500, kWidth = 384, kInner = 1024;

// Something of everything: an embedding that is also the head, layer norms (bundled), matrices of
// several extents, a frozen one, one that only some steps use, one that is used twice, a scalar,
// and a parameter without elements.
struct Model : nn::Module {
  Model() {
    embedding = register_module("embedding", nn::Embedding(kTokens, kWidth));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, kInner));
    down = register_module("down", nn::Linear(kInner, kWidth));
    for (int i = 0; i < 6; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), nn::Linear(kWidth, kWidth)));
    }
    frozen = register_module("frozen", nn::Linear(kWidth, kWidth));
    sometimes = register_module("sometimes", nn::Linear(kWidth, kWidth));
    twice = register_module("twice", nn::Linear(kWidth, kWidth));
    same = register_module("same", twice);  // a second name
    scale = register_parameter("scale", torch::ones({}));
    nothing = register_parameter("nothing", torch::empty({0, 3}));
    offset = register_buffer("offset", torch::full({kWidth}, 0.125));
    for (Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }

  Tensor forward(const Tensor& tokens, bool detour) {
    Tensor x = embedding(tokens);
    x = x + down(torch::gelu(up(norm(x))));
    for (nn::Linear& block : blocks) x = x + torch::tanh(block(x));
    x = x + torch::tanh(frozen(x)) * scale + offset;
    if (detour) x = x + sometimes(x);
    x = x + twice(torch::relu(twice(x)));
    return nn::functional::linear(norm(x), embedding->weight);
  }

  nn::Embedding embedding{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr}, frozen{nullptr}, sometimes{nullptr}, twice{nullptr},
      same{nullptr};
  std::vector<nn::Linear> blocks;
  Tensor scale, nothing, offset;
};

struct Recipe {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  bool sgd = false;
  bool spill = false;
  double ram_above_floor = 1.0;  // of the smallest that runs this way
  int zero_stage = -1;
  std::string weights_home = "auto", state_home = "auto";
};

std::shared_ptr<Model> MakeModel(at::ScalarType dtype) {
  torch::manual_seed(3);
  auto model = std::make_shared<Model>();
  model->to(dtype);
  return model;
}

std::string RamFor(const Model& model, const Recipe& recipe) {
  std::vector<proto::Tensor> tensors;
  std::vector<const void*> seen;
  for (const auto& item : model.named_parameters()) {
    const Tensor& tensor = item.value();
    if (tensor.numel() == 0 ||
        std::find(seen.begin(), seen.end(), tensor.unsafeGetTensorImpl()) != seen.end())
      continue;
    seen.push_back(tensor.unsafeGetTensorImpl());
    tensors.push_back(
        {.name = item.key(),
         .shape = tensor.sizes().vec(),
         .dtype = recipe.dtype == at::kFloat ? proto::Dtype::kFloat32 : proto::Dtype::kBFloat16,
         .trainable = tensor.requires_grad()});
  }
  zero3::PlanInput input;
  kernels::OptimizerSpec optimizer;
  if (recipe.sgd) optimizer = kernels::OptimizerSpec("sgd", {{"momentum", 0.9}});
  input.catalogue = *proto::BuildCatalogue(std::move(tensors), optimizer);
  input.always_spill_gradients = recipe.spill;
  input.policy = {.weights = *zero3::ParseHome("weights", recipe.weights_home),
                  .state = *zero3::ParseHome("state", recipe.state_home)};
  input.ram_bytes = uint64_t{1} << 40;
  const zero3::Plan plan = *zero3::MakePlan(input);
  const uint64_t floor = recipe.spill ? plan.floor_bytes : plan.floor_without_spilling_bytes;
  return std::to_string(static_cast<uint64_t>(floor * recipe.ram_above_floor));
}

Options OptionsFor(const Model& model, const Recipe& recipe) {
  Options options;
  options.nvme_path = Pool();
  options.ram = RamFor(model, recipe);
  options.job = recipe.name;
  options.spill_gradients = recipe.spill;
  options.zero_stage = recipe.zero_stage;
  options.weights_home = recipe.weights_home;
  options.state_home = recipe.state_home;
  return options;
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(Engine& engine, Model& model,
                                                       const Recipe& recipe) {
  if (recipe.sgd)
    return engine.SGD(model, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  return engine.AdamW(model, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
}

Tensor Batch(int64_t number) {
  torch::manual_seed(1000 + number);
  return torch::randint(kTokens, {2, 9});
}

Tensor Loss(Model& model, int64_t batch, bool detour) {
  const Tensor tokens = Batch(batch);
  const Tensor logits = model.forward(tokens.slice(1, 0, 8), detour);
  return nn::functional::cross_entropy(logits.to(at::kFloat).view({-1, kTokens}),
                                       tokens.slice(1, 1, 9).reshape({-1}));
}

// What a run shows, in order.
struct Log {
  std::vector<std::pair<std::string, Tensor>> entries;
  void Add(const std::string& what, const Tensor& value) {
    entries.emplace_back(what, value.detach().clone());
  }
  void Add(const std::string& what, double value) {
    entries.emplace_back(what, torch::tensor(value, at::kDouble));
  }
};

void ExpectEqual(const Log& reference, const Log& offloaded) {
  ASSERT_EQ(reference.entries.size(), offloaded.entries.size());
  for (size_t i = 0; i < reference.entries.size(); ++i) {
    const auto& [what, expected] = reference.entries[i];
    ASSERT_EQ(what, offloaded.entries[i].first);
    const Tensor& actual = offloaded.entries[i].second;
    EXPECT_TRUE(torch::equal(expected, actual))
        << what << " differs in " << (expected != actual).sum().item<int64_t>() << " of "
        << expected.numel() << " elements";
  }
}

void LogState(Engine& engine, Model& model, Log& log) {
  for (const auto& item : model.named_parameters()) {
    if (item.value().numel() == 0) continue;
    log.Add(item.key() + " through torch", item.value() * 1);
    log.Add(item.key() + " weight", engine.Gather(item.value(), "weight"));
  }
}

void LogMoments(Engine& engine, Model& model, const Recipe& recipe, Log& log) {
  for (const auto& item : model.named_parameters()) {
    if (item.value().numel() == 0 || !item.value().requires_grad()) continue;
    log.Add(item.key() + " master", engine.Gather(item.value(), "master"));
    log.Add(item.key() + " exp_avg", engine.Gather(item.value(), "exp_avg"));
    if (!recipe.sgd) log.Add(item.key() + " exp_avg_sq", engine.Gather(item.value(), "exp_avg_sq"));
  }
}

// Operators that throw instead of overwriting gradients, which stay what they are.
void FailToOverwrite(Model& model) {
  for (Tensor& parameter : model.parameters()) {
    Tensor gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    EXPECT_THROW(gradient.copy_(torch::zeros({3, 3, 3, 3})), c10::Error);
    const torch::NoGradGuard no_grad;
    EXPECT_THROW(gradient.normal_(0, -1), c10::Error);
  }
}

void TrainStep(Engine& engine, torch::optim::Optimizer& optimizer, Model& model, int64_t step,
               Log& log) {
  const bool detour = step % 3 == 1;  // another path than the recorded one
  for (int64_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
    const Tensor loss = Loss(model, step * 2 + micro_batch, detour) / 2;
    loss.backward();
    log.Add("loss", loss);
  }
  if (step % 3 == 0) FailToOverwrite(model);
  // Active in some steps, not in others, and absent in one.
  if (step != 3)
    log.Add("norm", nn::utils::clip_grad_norm_(model.parameters(), step % 2 == 0 ? 0.3 : 1e6));
  optimizer.param_groups()[0].options().set_lr(optimizer.param_groups()[0].options().get_lr() *
                                               0.9);
  if (step % 3 == 2) FailToOverwrite(model);  // clipped
  optimizer.step();
  if (step % 2 == 0) {  // right after the step: gradients and parameters
    for (const auto& item : model.named_parameters()) {
      if (item.value().grad().defined()) log.Add(item.key() + " gradient", item.value().grad() * 1);
    }
    LogState(engine, model, log);
  }
  optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
  if (step == 1) FailToOverwrite(model);  // zero
  if (step % 2 == 1) {                    // evaluation between the step and the next forward
    const torch::NoGradGuard no_grad;
    log.Add("evaluation", Loss(model, 77, false));
  }
  if (step == 4) {
    const c10::InferenceMode inference;
    log.entries.emplace_back("inference", torch::tensor(Loss(model, 78, true).item<float>()));
  }
  if (step == 2) {  // the trainer writes weights
    const torch::NoGradGuard no_grad;
    model.up->weight.mul_(0.5);
    model.norm->weight.fill_(1.25);
    model.down->weight.slice(0, 3, 5).copy_(torch::full({2, kInner}, 0.01));
    model.frozen->bias.copy_(torch::full({kWidth}, 0.25));
  }
}

// What must pass has its window, what must stay has none; state is more than half of all bytes.
void ExpectHomes(const Engine& engine, const Recipe& recipe) {
  const PlanSummary plan = engine.plan();
  if (recipe.weights_home != "auto") {
    EXPECT_EQ(plan.window_bytes == 0, recipe.weights_home == "ram") << plan.text;
  }
  if (recipe.state_home == "ram") {
    EXPECT_GT(plan.resident_bytes, plan.state_bytes / 2) << plan.text;
  } else if (recipe.state_home == "nvme") {
    EXPECT_LT(plan.resident_bytes, plan.state_bytes / 2) << plan.text;
  }
}

Log Train(const Recipe& recipe, bool offload, int64_t steps) {
  setenv("OFFLOADD_DISABLE", offload ? "0" : "1", 1);
  Log log;
  auto model = MakeModel(recipe.dtype);
  auto engine = Engine::Open(OptionsFor(*model, recipe));
  auto optimizer = MakeOptimizer(*engine, *model, recipe);
  LogState(*engine, *model, log);
  for (int64_t step = 0; step < steps; ++step) TrainStep(*engine, *optimizer, *model, step, log);
  LogState(*engine, *model, log);
  LogMoments(*engine, *model, recipe, log);
  EXPECT_EQ(engine->step(), steps);
  if (offload) {
    EXPECT_EQ(engine->plan().gradients_spilled, recipe.spill);
    // With little memory weights really come from the drive.
    if (recipe.ram_above_floor == 1.0) {
      EXPECT_GT(engine->plan().window_bytes, 0u);
      EXPECT_GT(engine->statistics().bytes_read, 2 * engine->plan().state_bytes);
    }
    EXPECT_LE(engine->statistics().peak_bytes, engine->statistics().budget_bytes);
    ExpectHomes(*engine, recipe);
  }
  return log;
}

class ParityTest : public testing::TestWithParam<Recipe> {};

TEST_P(ParityTest, OffloadedTrainingIsBitEqual) {
  const Log reference = Train(GetParam(), /*offload=*/false, 6);
  const Log offloaded = Train(GetParam(), /*offload=*/true, 6);
  ExpectEqual(reference, offloaded);
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, ParityTest,
    testing::Values(Recipe{"fp32_adamw", at::kFloat}, Recipe{"bf16_adamw", at::kBFloat16},
                    Recipe{"fp32_sgd", at::kFloat, /*sgd=*/true},
                    Recipe{"bf16_sgd", at::kBFloat16, true},
                    Recipe{"fp32_adamw_spilled", at::kFloat, false, /*spill=*/true},
                    Recipe{"bf16_adamw_spilled", at::kBFloat16, false, true},
                    Recipe{"bf16_adamw_rich", at::kBFloat16, false, false, 4.0},
                    Recipe{"fp32_adamw_middle", at::kFloat, false, false, 1.2},
                    Recipe{"fp32_stage_3", at::kFloat, false, false, 1.2, 3},
                    Recipe{"bf16_state_stays", at::kBFloat16, false, false, 1.1, 3, "nvme", "ram"},
                    Recipe{"bf16_weights_stay", at::kBFloat16, false, false, 4.0, 1, "ram", "nvme"},
                    Recipe{"fp32_shares", at::kFloat, false, false, 1.1, 2, "0.5", "0.3"}),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

// ---- What goes wrong ---------------------------------------------------------------------------

class AttachTest : public testing::Test {
 protected:
  void Open(const Recipe& recipe) {
    setenv("OFFLOADD_DISABLE", "0", 1);
    recipe_ = recipe;
    model_ = MakeModel(recipe.dtype);
    engine_ = Engine::Open(OptionsFor(*model_, recipe));
    optimizer_ = MakeOptimizer(*engine_, *model_, recipe);
  }
  void Close() {
    optimizer_.reset();
    engine_.reset();
  }

  Recipe recipe_;
  std::shared_ptr<Model> model_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  Log log_;
};

TEST_F(AttachTest, RawAccessThatIsRefusedNamesTheParameterAndTheWayOut) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  recipe_ = {"raw_access"};
  model_ = MakeModel(recipe_.dtype);
  Options options = OptionsFor(*model_, recipe_);
  options.raw_access = "error";
  engine_ = Engine::Open(options);
  optimizer_ = MakeOptimizer(*engine_, *model_, recipe_);
  try {
    model_->up->weight.data_ptr<float>();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("OFD-1603"), std::string::npos) << text;
    EXPECT_NE(text.find("up.weight"), std::string::npos) << text;
    EXPECT_NE(text.find("ather"), std::string::npos) << text;
  }
  EXPECT_NE(engine_->Gather(model_->up->weight).data_ptr<float>(), nullptr);
}

TEST_F(AttachTest, HomesAndStagesThatThereAreNotAreNamed) {
  const auto expect = [this](const char* name, const auto& change) {
    recipe_ = {"bad_policy"};
    model_ = MakeModel(recipe_.dtype);
    Options options = OptionsFor(*model_, recipe_);
    change(options);
    try {
      Engine::Open(options);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.id(), 1002) << error.what();
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  };
  setenv("OFFLOADD_DISABLE", "0", 1);
  expect("weights_home", [](Options& options) { options.weights_home = "gpu"; });
  expect("state_home", [](Options& options) { options.state_home = "1.5"; });
  expect("ZeRO stage 4", [](Options& options) { options.zero_stage = 4; });
  expect("max_live", [](Options& options) { options.max_live = -1; });
}

TEST_F(AttachTest, OperatorsFailAtOnceWhenTheDaemonIsKilled) {
  Open({"daemon_killed"});
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  const std::optional<pid_t> daemon = FindDaemon();
  ASSERT_TRUE(daemon.has_value());
  kill(*daemon, SIGKILL);
  ExpectError(1801, "parameter '", [&] {
    for (int64_t step = 1; step < 4; ++step) TrainStep(*engine_, *optimizer_, *model_, step, log_);
  });
}

// As of a trainer that has a handler, which saves or goes on (batch systems).
TEST_F(AttachTest, ALimitOfProcessorTimeThatMayBePassedDoesNotEndTheDaemon) {
  Open({"processor_time"});
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  const std::optional<pid_t> daemon = FindDaemon();
  ASSERT_TRUE(daemon.has_value());
  kill(*daemon, SIGXCPU);
  for (int64_t step = 1; step < 4; ++step) TrainStep(*engine_, *optimizer_, *model_, step, log_);
  engine_->WaitDurable();
  EXPECT_EQ(engine_->step(), 4);
}

TEST_F(AttachTest, NonFiniteGradientStopsTheStepAndChangesNothing) {
  Open({"non_finite"});
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  const Tensor before = engine_->Gather(model_->down->weight);
  (Loss(*model_, 5, false) * std::numeric_limits<float>::infinity()).backward();
  ExpectError(1701, "gradient of parameter", [&] { optimizer_->step(); });
  EXPECT_EQ(engine_->step(), 1);
  EXPECT_TRUE(torch::equal(before, engine_->Gather(model_->down->weight)));
  optimizer_->zero_grad();
  TrainStep(*engine_, *optimizer_, *model_, 1, log_);
  EXPECT_EQ(engine_->step(), 2);
}

TEST_F(AttachTest, ModelThatOutlivesItsEngineRefusesToRun) {
  Open({"outlived"});
  TrainStep(*engine_, *optimizer_, *model_, 1, log_);
  Loss(*model_, 1, false).backward();
  const Tensor gradient = model_->up->weight.grad();
  Close();
  ExpectError(1802, "parameter '", [&] { Loss(*model_, 0, false); });
  ExpectError(1802, "gradient", [&] { gradient.sum(); });
}

TEST_F(AttachTest, CastsOfAnAttachedParameterAreRefusedWhereTheyStand) {
  Open({"cast_afterwards"});
  ExpectError(1601, "parameter 'twice.weight' cannot become Double of shape [384, 384]",
              [&] { model_->twice->to(at::kDouble); });
  ExpectError(1601, "of shape [2, 384]", [&] {
    model_->twice->weight.set_data(torch::zeros({2, kWidth}));
  });
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
}

TEST_F(AttachTest, SetDataIsRefusedWhereMemoryWouldBeSharedInPlainTorch) {
  Open({"set_data_shared"});
  Tensor& weight = model_->twice->weight;
  weight.set_data(model_->blocks[0]->weight);
  EXPECT_TRUE(torch::equal(weight, model_->blocks[0]->weight));
  Loss(*model_, 0, false).backward();
  ExpectError(1601, "has the memory of parameter", [&] { optimizer_->step(); });
  Tensor vector = torch::full({kWidth * kWidth}, 0.01);
  weight.set_data(vector.view({kWidth, kWidth}));
  EXPECT_EQ(weight.sum().item<float>(), vector.sum().item<float>());
  Loss(*model_, 0, false).backward();
  optimizer_->step();
  EXPECT_EQ(engine_->step(), 1);
  EXPECT_TRUE(torch::equal(weight, vector.view({kWidth, kWidth})));
}

TEST_F(AttachTest, MemoryThatSetDataGaveIsTheParameters) {
  Open({"set_data_written"});
  const torch::NoGradGuard no_grad;
  Tensor& weight = model_->twice->weight;
  Tensor vector = torch::full({kWidth * kWidth}, 0.01);
  weight.set_data(vector.view({kWidth, kWidth}));
  weight.mul_(2);
  EXPECT_EQ(vector[0].item<float>(), 0.02F);
  vector.mul_(2);
  EXPECT_EQ(weight[0][0].item<float>(), 0.04F);
  vector[1] = 0.25;
  EXPECT_EQ(engine_->Gather(weight)[0][1].item<float>(), 0.25F);
  weight.set_data(vector.clone().view({kWidth, kWidth}));
  const float sum = vector.sum().item<float>();
  vector.mul_(3);
  EXPECT_EQ(weight.sum().item<float>(), sum);
}

TEST_F(AttachTest, TensorThatSetDataGaveFollowsTheParameter) {
  Open({"set_data_kept"});
  Tensor& weight = model_->twice->weight;
  const Tensor kept = torch::full({kWidth, kWidth}, 0.01);
  weight.set_data(kept);
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
    EXPECT_TRUE(torch::equal(kept, weight));
    kept.mul_(2);
  }
  EXPECT_TRUE(torch::equal(weight, torch::full({kWidth, kWidth}, 0.01).add_(1).mul_(2)));
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  EXPECT_TRUE(torch::equal(kept, weight));
}

// Also those that were taken before; and again, where the parameter has moved on.
TEST_F(AttachTest, PointersToTheMemoryThatSetDataLeavesStayTrue) {
  Open({"set_data_left"});
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  Tensor& weight = model_->twice->weight;
  std::vector<Tensor> kept;
  std::vector<float*> pointers;
  std::vector<float> values;
  for (int i = 0; i < 3; ++i) {
    kept.push_back(weight.detach());
    pointers.push_back(kept.back().data_ptr<float>());
    values.push_back(kept.back()[0][0].item<float>());
    weight.set_data(torch::full({kWidth, kWidth}, 0.125 * (i + 1)));
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pointers[i][0], values[i]) << i;
    pointers[i][0] = 7;
    EXPECT_EQ(kept[i][0][0].item<float>(), 7) << i;
  }
  EXPECT_TRUE(torch::equal(weight, torch::full({kWidth, kWidth}, 0.375)));
  kept.clear();
  float* const own = weight.data_ptr<float>();
  own[1] = 0.5;
  TrainStep(*engine_, *optimizer_, *model_, 1, log_);
  EXPECT_EQ(engine_->step(), 2);
  Close();
}

TEST_F(AttachTest, EverythingThatCannotBeAttachedIsSaidAtOnce) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  model_ = MakeModel(at::kFloat);
  engine_ = Engine::Open(OptionsFor(*model_, {"unsupported_model"}));
  model_->scale.set_data(torch::ones({}, at::kComplexFloat));
  model_->up->weight.set_data(torch::zeros({kInner, 2 * kWidth}).slice(1, 0, kWidth));
  const Tensor larger = torch::zeros({2 * kWidth, kInner});
  model_->down->weight.set_data(larger.slice(0, 0, kWidth));
  model_->norm->bias.set_data(torch::ones({kWidth}, at::kComplexFloat));
  ExpectError(
      1601,
      "parameters 'scale', 'norm.bias' have dtype ComplexFloat, float32, bfloat16, float16 and "
      "float64 are supported; parameter 'up.weight' has elements that overlap or lie apart in "
      "memory; "
      "parameter 'down.weight' is a part of a larger tensor",
      [&] { engine_->SGD(*model_, torch::optim::SGDOptions(1e-3)); });
}

TEST_F(AttachTest, NameThatTheDaemonCannotReadIsRefused) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  model_ = MakeModel(at::kFloat);
  model_->register_parameter("na\xefve \"\n", torch::ones({3}));
  engine_ = Engine::Open(OptionsFor(*model_, {"unread_name"}));
  ExpectError(1601, "the name 'na\\xefve \\\"\\n' of a tensor is not UTF-8", [&] {
    engine_->SGD(*model_, torch::optim::SGDOptions(1e-3));
    engine_->Seal();
  });
}

TEST_F(AttachTest, FrozenTableOfWholeNumbersStaysInMemoryAndIsResumed) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  recipe_ = {"table"};
  for (int64_t run = 0; run < 2; ++run) {
    model_ = MakeModel(at::kFloat);
    Tensor& table = model_->frozen->register_parameter("table", torch::arange(run, run + 3), false);
    engine_ = Engine::Open(OptionsFor(*model_, recipe_));
    optimizer_ = MakeOptimizer(*engine_, *model_, recipe_);
    TrainStep(*engine_, *optimizer_, *model_, run, log_);
    EXPECT_TRUE(torch::equal(table, torch::arange(0, 3))) << table;
    Close();
  }
}

TEST_F(AttachTest, UnsupportedOptionsAreRefused) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  model_ = MakeModel(at::kFloat);
  engine_ = Engine::Open(OptionsFor(*model_, {"unsupported"}));
  ExpectError(1002, "adamw with eps -1",
              [&] { engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-3).eps(-1)); });
  ExpectError(1002, "nesterov", [&] {
    engine_->SGD(*model_,
                 torch::optim::SGDOptions(1e-3).momentum(0.9).dampening(0.5).nesterov(true));
  });
  model_->scale.set_data(torch::ones({}, at::kComplexFloat));
  ExpectError(1601, "scale", [&] { engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-3)); });
}

TEST_F(AttachTest, NumbersThatCannotBeAreRefusedByName) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  model_ = MakeModel(at::kFloat);
  const auto refuses = [&](const std::string& text, int Options::*number, int value,
                           int world_size = 0) {
    Options options = OptionsFor(*model_, {"numbers"});
    options.world_size = world_size;
    options.*number = value;
    ExpectError(1002, text, [&] { Engine::Open(options); });
  };
  refuses("generations is -1", &Options::generations, -1);
  refuses("update_threads is -4", &Options::update_threads, -4);
  refuses("world_size is -1", &Options::world_size, -1);
  refuses("rank is -1", &Options::local_rank, 0, /*world_size=*/2);
  refuses("rank is 3, and world_size is not set", &Options::rank, 3);
  refuses("local_rank is 0, and world_size is not set", &Options::local_rank, 0);
  refuses("local_world_size is 2, and world_size is not set", &Options::local_world_size, 2);
}

TEST_F(AttachTest, AWayOutOfSeveralReasonsIsSaidOnce) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  model_ = MakeModel(at::kFloat);
  engine_ = Engine::Open(OptionsFor(*model_, {"two_types"}));
  model_->scale.set_data(torch::ones({}, at::kComplexFloat));
  model_->norm->bias.set_data(torch::ones({kWidth}, at::kComplexDouble));
  ExpectError(1601, "are supported. Register torch::view_as_real() of it as the parameter",
              [&] { engine_->SGD(*model_, torch::optim::SGDOptions(1e-3)); });
  try {
    engine_->SGD(*model_, torch::optim::SGDOptions(1e-3));
  } catch (const Error& error) {
    const std::string text = error.what(), way_out = "Register torch::view_as_real()";
    EXPECT_EQ(text.find("Convert the module"), std::string::npos) << text;
    EXPECT_EQ(text.find(way_out), text.rfind(way_out)) << text;
  }
}

TEST_F(AttachTest, StepInAThreadThatRoundsUpwardIsRefused) {
  Open({"upward"});
  Loss(*model_, 0, false).backward();
  std::fesetround(FE_UPWARD);
  ExpectError(1604, "fesetround", [&] { optimizer_->step(); });
  std::fesetround(FE_TONEAREST);
  optimizer_->step();
}

TEST_F(AttachTest, StepInAThreadThatFlushesDenormalsIsRefused) {
  Open({"denormals"});
  Loss(*model_, 0, false).backward();
  ASSERT_TRUE(at::globalContext().setFlushDenormal(true));
  ExpectError(1604, "setFlushDenormal", [&] { optimizer_->step(); });
  at::globalContext().setFlushDenormal(false);
  optimizer_->step();
  EXPECT_EQ(engine_->step(), 1);
}

TEST_F(AttachTest, GradientThatSomebodyKeptKeepsItsValue) {
  Open({"kept_gradient"});
  Loss(*model_, 0, false).backward();
  const Tensor kept = model_->up->weight.grad();
  const Tensor value = kept.clone();
  optimizer_->step();
  optimizer_->zero_grad();
  Loss(*model_, 1, false).backward();
  EXPECT_TRUE(torch::equal(kept, value));
  EXPECT_FALSE(torch::equal(model_->up->weight.grad(), value));
}

TEST_F(AttachTest, ResumedRunContinuesAsIfItHadNotStopped) {
  Log whole, parts;
  Open({"whole", at::kBFloat16});
  for (int64_t step = 0; step < 4; ++step) TrainStep(*engine_, *optimizer_, *model_, step, whole);
  LogMoments(*engine_, *model_, recipe_, whole);
  Close();

  Open({"parts", at::kBFloat16});
  for (int64_t step = 0; step < 2; ++step) {
    if (step == 1) engine_->SetTrainerState("after two");
    TrainStep(*engine_, *optimizer_, *model_, step, parts);
  }
  const double lr = optimizer_->param_groups()[0].options().get_lr();
  Close();
  torch::manual_seed(99);
  model_ = std::make_shared<Model>();
  model_->to(at::kBFloat16);
  engine_ = Engine::Open(OptionsFor(*model_, recipe_));
  EXPECT_EQ(engine_->step(), 2);
  EXPECT_EQ(engine_->TrainerState(), "after two");
  optimizer_ = MakeOptimizer(*engine_, *model_, recipe_);
  optimizer_->param_groups()[0].options().set_lr(lr);
  // Zeroed, not undefined, as the run before left them; what plain torch would update with zeros it
  // updates here, too.
  for (Tensor& parameter : model_->parameters()) {
    if (parameter.requires_grad() && parameter.numel() > 0)
      parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  for (int64_t step = 2; step < 4; ++step) TrainStep(*engine_, *optimizer_, *model_, step, parts);
  LogMoments(*engine_, *model_, recipe_, parts);
  ExpectEqual(whole, parts);
}

TEST_F(AttachTest, AnOperatorThatThrowsLeavesTheWeightThatItWasToOverwrite) {
  Open({"thrown"});
  const torch::NoGradGuard no_grad;
  Tensor& weight = model_->up->weight;
  const Tensor before = weight.clone();
  EXPECT_THROW(weight.copy_(torch::zeros({3, 3, 3})), c10::Error);
  EXPECT_THROW(weight.uniform_(1, -1), c10::Error);
  EXPECT_THROW(weight.normal_(0, -1), c10::Error);
  EXPECT_THROW(weight.fill_(torch::zeros({2})), c10::Error);
  EXPECT_TRUE(torch::equal(weight, before));
  EXPECT_TRUE(torch::equal(engine_->Gather(weight), before));
  Close();
}

TEST_F(AttachTest, BackwardThatThrowsLeavesARunnableModel) {
  Open({"thrown"});
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Tensor hidden = model_->up(model_->embedding(Batch(0)));
    hidden.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("boom"); });
    EXPECT_THROW(hidden.sum().backward(), std::runtime_error);
  }
  optimizer_->zero_grad();
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  EXPECT_EQ(engine_->step(), 1);
}

TEST_F(AttachTest, ThreadsEvaluateTogetherWhileWeightsAreScarce) {
  Open({"threads", at::kBFloat16, false, false, 1.05});
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
  std::vector<std::thread> threads;
  std::vector<Tensor> results(4);
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      const torch::NoGradGuard no_grad;
      for (int round = 0; round < 5; ++round) {
        const Tensor tokens = torch::arange(16).view({2, 8});
        results[i] = model_->forward(tokens, i % 2 == 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(torch::equal(results[0], results[2]));
  EXPECT_TRUE(torch::equal(results[1], results[3]));
}

TEST_F(AttachTest, ModelBuiltUnderTheGuardIsTheSame) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  const Recipe recipe = {"construction", at::kBFloat16};
  auto plain = MakeModel(recipe.dtype);
  engine_ = Engine::Open(OptionsFor(*plain, recipe));
  {
    InitGuard guard(engine_);
    model_ = MakeModel(recipe.dtype);
    EXPECT_ANY_THROW(model_->embedding->weight.data_ptr());  // its bytes are in the pool
    Tensor big = torch::ones({64, 1024}) * 2 + 1;            // results of kernels, too
    EXPECT_THROW(big.copy_(torch::zeros({3, 3, 3})), c10::Error);
    EXPECT_THROW(big.uniform_(1, -1), c10::Error);
    EXPECT_EQ(big.sum().item<float>(), 3 * 65536);
  }
  EXPECT_TRUE(
      torch::equal(model_->embedding->weight, plain->embedding->weight));  // not yet attached
  EXPECT_ANY_THROW(model_->embedding->weight.data_ptr());
  optimizer_ = MakeOptimizer(*engine_, *model_, recipe);
  Log expected, built;
  for (const auto& item : plain->named_parameters()) expected.Add(item.key(), item.value());
  for (const auto& item : model_->named_parameters()) built.Add(item.key(), item.value() * 1);
  ExpectEqual(expected, built);
  TrainStep(*engine_, *optimizer_, *model_, 0, log_);
}

// Anonymous memory of this process, in MiB.
int64_t AnonymousMiB() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return atoll(line.c_str() + 8) / 1024;
  }
  return -1;
}

std::shared_ptr<nn::SequentialImpl> MakeTower() {
  torch::manual_seed(11);
  auto tower = std::make_shared<nn::SequentialImpl>();
  for (int i = 0; i < 8; ++i) tower->push_back(nn::Linear(2048, 2048));
  tower->to(at::kBFloat16);
  return tower;
}

TEST_F(AttachTest, ConstructionAndAttachHoldOneTensorAtATime) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  Options options;
  options.nvme_path = Pool();
  options.ram = "200MiB";
  options.job = "tower";
  engine_ = Engine::Open(options);
  const int64_t before = AnonymousMiB();
  std::shared_ptr<nn::SequentialImpl> tower;
  {
    InitGuard guard(engine_);
    tower = MakeTower();  // 128 MiB in fp32, 64 MiB in bf16
    EXPECT_LT(AnonymousMiB() - before, 40);
  }
  optimizer_ = engine_->AdamW(*tower, torch::optim::AdamWOptions(1e-3));
  engine_->Seal();
  EXPECT_LT(AnonymousMiB() - before, 40);
  const auto plain = MakeTower();
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(plain->parameters()[i], engine_->Gather(tower->parameters()[i]))) << i;
  }
}

TEST_F(AttachTest, TheLeastRamThatIsToldHoldsLargeBuffersToo) {
  setenv("OFFLOADD_DISABLE", "0", 1);
  nn::Linear model(768, 768);
  model->register_buffer("mask", torch::ones({768, 768}));
  model->register_buffer("seen", model->weight.detach());  // is the weight
  Options options;
  options.nvme_path = Pool();
  options.ram = "9MiB";
  options.job = "masked";
  const auto attach = [&] {
    optimizer_.reset();
    engine_.reset();
    engine_ = Engine::Open(options);
    optimizer_ = engine_->AdamW(*model, torch::optim::AdamWOptions(1e-3));
    engine_->Seal();
  };
  std::string told;
  try {
    attach();
  } catch (const Error& error) {
    told = error.what();
  }
  const std::string words = "Set ram to at least ";
  ASSERT_NE(told.find(words), std::string::npos) << told;
  const uint64_t floor = std::stoull(told.substr(told.find(words) + words.size()));
  options.ram = std::to_string(floor);
  EXPECT_NO_THROW(attach());
  EXPECT_EQ(engine_->plan().floor_bytes, floor);
}

}  // namespace
}  // namespace offload

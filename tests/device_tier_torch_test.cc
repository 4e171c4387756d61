// Tensors that stay on the device and are updated there train as in the device's memory, whatever
// looks at them between two checkpoints; and a job that ends there ends at a checkpoint, whole.
//
// The same program runs on the stand-in twice, attached and with OFFLOADD_DISABLE=1, and everything
// that it can see is compared bit by bit.

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <offload/torch.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "examples/language_model.h"
#include "kernels/square_root.h"
#include "tests/private_daemon.h"
#include "tests/standin_torch.h"
#include "tests/standin_torch_fixture.h"
#include "tests/torch_fixture.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_tensors.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using accelerator::HostAccelerator;
using accelerator::Pace;
using at::Tensor;

constexpr int64_t kInterval = 3, kSteps = 8, kMicroBatches = 2, kLength = 4, kVocabulary = 200;

// How much of the tier gpu_ram has room for.
enum class Room : uint8_t { kFloor, kNone, kSome, kAll };

struct Recipe {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::string optimizer = "adamw";
  Room room = Room::kAll;
  Pace pace = Pace::kRandom;
  bool queries_are_late = false;
  bool spills = false;  // what stays with the daemon
  AdamWFlavour flavour = AdamWFlavour::kMulAdd;
  bool has_large_buffer = false;
  uint64_t memory_bytes = uint64_t{1} << 30;  // of the device
  bool registers_slab = true;
  std::string average = "none";  // which moves where the daemon updates: there is no tier then
};

constexpr const char* kBuffer = "statistics";

using Model = examples::LanguageModel;

std::shared_ptr<Model> MakeModelOf(const Recipe& recipe) {
  torch::manual_seed(11);
  std::shared_ptr<Model> model = examples::MakeModel({.kind = examples::ModelKind::kLlama,
                                                      .layers = 2,
                                                      .hidden = 192,
                                                      .heads = 4,
                                                      .key_value_heads = 2,
                                                      .head_size = 48,
                                                      .feed_forward = 256,
                                                      .vocabulary = kVocabulary,
                                                      .context = kLength});
  model->to(recipe.dtype);
  // Above what a step carries by itself, so that it is in the store.
  if (recipe.has_large_buffer) model->register_buffer(kBuffer, at::zeros(200'000));
  model->to(StandinDevice());
  return model;
}

std::string SpecName(const std::string& optimizer) {
  return optimizer.substr(0, optimizer.find('_'));
}

kernels::OptimizerSpec SpecOf(const Recipe& recipe) {
  kernels::OptimizerSpec spec(SpecName(recipe.optimizer));
  if (recipe.optimizer == "sgd_momentum") spec.Set("momentum", 0.9);
  if (recipe.optimizer == "adam_amsgrad") spec.Set("amsgrad", 1);
  if (recipe.optimizer == "rmsprop") spec.Set("momentum", 0.9).Set("centered", 1);
  return spec;
}

std::vector<zero3::GpuTensor> NeedsOf(const nn::Module& model, const Recipe& recipe) {
  return zero3::GpuTensorsOf(*proto::BuildCatalogue(TensorsOf(model), SpecOf(recipe)),
                             {.optimizer = SpecOf(recipe), .durability = {.steps = kInterval}});
}

// The table of square roots has room, too, where this processor's vector library needs one.
uint64_t GpuRamOf(const nn::Module& model, const Recipe& recipe) {
  const bool may_take = SpecOf(recipe).row().takes_library_roots != nullptr;
  const uint64_t table_bytes = (may_take ? kernels::SquareRoots::kBytes : 0) + (64 << 10);
  const zero3::GpuPlan all = *zero3::MakeGpuPlan(NeedsOf(model, recipe), uint64_t{1} << 40);
  const uint64_t without = all.weight_bytes + all.gradient_bytes;
  switch (recipe.room) {
    case Room::kFloor:
      return all.floor_bytes;
    case Room::kNone:
      return without;
    case Room::kSome:
      return without + all.tier_state_bytes / 2 + table_bytes;
    case Room::kAll:
      break;
  }
  return without + all.tier_state_bytes + table_bytes;
}

class Training {
 public:
  Training(const Recipe& recipe, bool offloads)
      : recipe_(recipe),
        device_({.seed = 5,
                 .pace = recipe.pace,
                 .queries_are_late = recipe.queries_are_late,
                 .registers_read_only = recipe.registers_slab,
                 .memory_bytes = recipe.memory_bytes}) {
    UseStandin(device_);
    SetOffloading(offloads);
    model_ = MakeModelOf(recipe_);
    options_ = PoolOptions(recipe_.name, recipe_.spills ? "40MiB" : "200MiB");
    options_.gpu_ram = std::to_string(GpuRamOf(*model_, recipe_));
    options_.durability = "checkpoint:" + std::to_string(kInterval);
    options_.spill_gradients = recipe_.spills;
    options_.average = recipe_.average;
    Open();
  }
  ~Training() {
    Close();
    model_.reset();
    seen.clear();
    ExpectClean(device_);
  }

  void Open() {
    engine_ = Engine::Open(options_);
    if (recipe_.optimizer == "adamw_parts") {
      std::vector<torch::optim::OptimizerParamGroup> half;
      half.emplace_back(model_->parameters());
      half.front().params().resize(half.front().params().size() / 2);
      optimizer_ = engine_->AdamW(*model_, std::move(half), torch::optim::AdamWOptions(1e-2),
                                  recipe_.flavour);
      rest_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-3), recipe_.flavour);
    } else if (recipe_.optimizer == "adamw") {
      optimizer_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-2).weight_decay(0.1),
                                  recipe_.flavour);
    } else if (recipe_.optimizer == "adam_amsgrad") {
      optimizer_ =
          engine_->Adam(*model_, torch::optim::AdamOptions(1e-2).amsgrad(true), recipe_.flavour);
    } else if (recipe_.optimizer == "adagrad") {
      optimizer_ = engine_->Adagrad(*model_, torch::optim::AdagradOptions(1e-2).lr_decay(0.1));
    } else if (recipe_.optimizer == "rmsprop") {
      optimizer_ = engine_->RMSprop(
          *model_, torch::optim::RMSpropOptions(1e-3).momentum(0.9).centered(true));
    } else if (recipe_.optimizer == "lamb") {
      optimizer_ = engine_->LAMB(*model_, LAMBOptions(1e-2).weight_decay(0.1));
    } else if (recipe_.optimizer == "lion") {
      optimizer_ = engine_->Lion(*model_, LionOptions(1e-3).weight_decay(0.1));
    } else {
      const double momentum = recipe_.optimizer == "sgd_momentum" ? 0.9 : 0;
      optimizer_ =
          engine_->SGD(*model_, torch::optim::SGDOptions(0.05).momentum(momentum).nesterov(false));
    }
  }
  void Close() {
    optimizer_.reset();
    rest_.reset();
    engine_.reset();
  }
  // As a program that is started again, with another model.
  void Restart() {
    Close();
    torch::manual_seed(99);
    model_ = MakeModelOf(recipe_);
    Open();
  }

  Tensor Loss(int64_t number) {
    const Tensor tokens = TokensOnStandin(number, kVocabulary, /*sequences=*/2, kLength);
    return NextTokenLoss(model_->forward(tokens.slice(1, 0, kLength - 1)), tokens);
  }

  void Backward(int64_t step) {
    for (int64_t i = 0; i < kMicroBatches; ++i) {
      const Tensor loss = Loss(step * kMicroBatches + i) / kMicroBatches;
      loss.backward();
      See("loss", loss);
    }
  }
  void Step(int64_t step) {
    if (recipe_.has_large_buffer)
      model_->named_buffers()[kBuffer].add_(static_cast<double>(step + 1));
    Backward(step);
    if (step % 2 == 0) See("norm", nn::utils::clip_grad_norm_(model_->parameters(), 0.1));
    optimizer_->step();
    optimizer_->zero_grad(/*set_to_none=*/step % 3 != 0);
    if (rest_ == nullptr) return;
    rest_->step();
    rest_->zero_grad();
  }

  template <typename Value>
  void See(const std::string& what, const Value& value) {
    offload::See(seen, what, value);
  }
  void SeeState() {
    std::vector<std::string> planes = {"weight", "master"};
    if (recipe_.optimizer == "sgd_momentum") planes.push_back("momentum_buffer");
    if (recipe_.optimizer.starts_with("adam") || recipe_.optimizer == "lamb")
      planes.insert(planes.end(), {"exp_avg", "exp_avg_sq"});
    if (recipe_.optimizer == "adam_amsgrad") planes.push_back("max_exp_avg_sq");
    if (recipe_.optimizer == "adagrad") planes.push_back("sum");
    if (recipe_.optimizer == "rmsprop")
      planes.insert(planes.end(), {"square_avg", "momentum_buffer", "grad_avg"});
    if (recipe_.optimizer == "lion") planes.push_back("exp_avg");
    if (recipe_.average != "none") planes.push_back("average");
    for (const auto& item : model_->named_parameters()) {
      for (const std::string& plane : planes)
        See(item.key() + " " + plane, engine_->Gather(item.value(), plane));
      See(item.key() + " on the device", item.value() * 1);
    }
    if (recipe_.has_large_buffer) See(kBuffer, model_->named_buffers()[kBuffer]);
  }

  // Half of the weights that are large enough to stay, however they are named.
  std::vector<Tensor> Large() {
    std::vector<Tensor> large;
    for (const Tensor& parameter : model_->parameters()) {
      if (parameter.numel() > proto::kBundledElementsMax) large.push_back(parameter);
    }
    return large;
  }

  const Recipe& recipe() const { return recipe_; }
  Engine& engine() { return *engine_; }
  Model& model() { return *model_; }
  HostAccelerator& device() { return device_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  Options& options() { return options_; }

  Seen seen;

 private:
  const Recipe recipe_;
  HostAccelerator device_;
  std::shared_ptr<Model> model_;
  Options options_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_, rest_;
};

using Program = std::function<void(Training& run)>;

Seen SeenIn(const Recipe& recipe, bool offloads, const Program& program) {
  Training run(recipe, offloads);
  program(run);
  if (offloads) {
    const Statistics statistics = run.engine().statistics();
    EXPECT_LE(statistics.peak_bytes, statistics.budget_bytes);
    EXPECT_LE(statistics.gpu_peak_bytes, statistics.gpu_ram_bytes);
    const std::string plan = run.engine().plan().text;
    const bool has_tier = plan.find("updated on the device: nothing") == std::string::npos;
    const bool may_have_tier = recipe.average == "none";
    EXPECT_EQ(has_tier, may_have_tier && recipe.room >= Room::kSome) << plan;
    const std::string all =
        "updated on the device: " + std::to_string(run.Large().size()) + " tensors";
    EXPECT_EQ(plan.find(all) != std::string::npos, may_have_tier && recipe.room == Room::kAll)
        << plan;
  }
  return std::exchange(run.seen, {});
}

void ExpectTheSame(const Recipe& recipe, const Program& program) {
  ExpectEqual(SeenIn(recipe, /*offloads=*/false, program),
              SeenIn(recipe, /*offloads=*/true, program));
}

class DeviceTierTest : public testing::TestWithParam<Recipe> {};

// Steps of three intervals, and everything that is kept, inside of one and at its end.
TEST_P(DeviceTierTest, TrainsWithTheBitsOfTheDevicesMemory) {
  ExpectTheSame(GetParam(), [](Training& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Step(step);
      if (step == 1 || step == 5) run.SeeState();
      const at::NoGradGuard no_grad;
      run.See("evaluation", run.Loss(1000));
    }
    run.SeeState();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, DeviceTierTest,
    testing::Values(
        Recipe{.name = "adamw", .pace = Pace::kLate, .queries_are_late = true},
        Recipe{.name = "adamw_bf16", .dtype = at::kBFloat16},
        Recipe{.name = "adamw_some", .room = Room::kSome},
        Recipe{.name = "adamw_bf16_some", .dtype = at::kBFloat16, .room = Room::kSome},
        Recipe{.name = "adamw_none", .room = Room::kNone},
        Recipe{.name = "adamw_bf16_floor", .dtype = at::kBFloat16, .room = Room::kFloor},
        Recipe{.name = "adamw_bf16_spilled",
               .dtype = at::kBFloat16,
               .room = Room::kSome,
               .spills = true},
        Recipe{.name = "adamw_lerp_bf16",
               .dtype = at::kBFloat16,
               .pace = Pace::kEager,
               .flavour = AdamWFlavour::kLerp},
        Recipe{.name = "adamw_fused", .flavour = AdamWFlavour::kFused},
        Recipe{.name = "adamw_fused_bf16", .dtype = at::kBFloat16, .flavour = AdamWFlavour::kFused},
        Recipe{.name = "adam_amsgrad", .optimizer = "adam_amsgrad"},
        Recipe{.name = "adam_amsgrad_bf16",
               .dtype = at::kBFloat16,
               .optimizer = "adam_amsgrad",
               .flavour = AdamWFlavour::kLerp},
        Recipe{.name = "adamw_parts_bf16_some",
               .dtype = at::kBFloat16,
               .optimizer = "adamw_parts",
               .room = Room::kSome},
        Recipe{.name = "adamw_fp16", .dtype = at::kHalf, .pace = Pace::kLate},
        Recipe{.name = "adamw_fp16_some", .dtype = at::kHalf, .room = Room::kSome},
        Recipe{.name = "adamw_fused_fp16", .dtype = at::kHalf, .flavour = AdamWFlavour::kFused},
        Recipe{.name = "adamw_fused_fp64",
               .dtype = at::kDouble,
               .queries_are_late = true,
               .flavour = AdamWFlavour::kFused},
        Recipe{.name = "adamw_fused_fp64_some",
               .dtype = at::kDouble,
               .room = Room::kSome,
               .flavour = AdamWFlavour::kFused},
        Recipe{.name = "adagrad", .optimizer = "adagrad"},
        Recipe{.name = "adagrad_bf16", .dtype = at::kBFloat16, .optimizer = "adagrad"},
        Recipe{.name = "rmsprop", .optimizer = "rmsprop"},
        Recipe{.name = "rmsprop_fp16", .dtype = at::kHalf, .optimizer = "rmsprop"},
        Recipe{.name = "lion_bf16_some",
               .dtype = at::kBFloat16,
               .optimizer = "lion",
               .room = Room::kSome},
        Recipe{.name = "lamb", .optimizer = "lamb"},
        Recipe{.name = "lamb_bf16_some",
               .dtype = at::kBFloat16,
               .optimizer = "lamb",
               .room = Room::kSome},
        Recipe{.name = "lamb_fp64", .dtype = at::kDouble, .optimizer = "lamb"},
        Recipe{.name = "sgd", .optimizer = "sgd"},
        Recipe{.name = "sgd_momentum_fp64", .dtype = at::kDouble, .optimizer = "sgd_momentum"},
        Recipe{.name = "sgd_bf16", .dtype = at::kBFloat16, .optimizer = "sgd"},
        Recipe{.name = "sgd_momentum", .optimizer = "sgd_momentum"},
        Recipe{.name = "sgd_momentum_bf16_some",
               .dtype = at::kBFloat16,
               .optimizer = "sgd_momentum",
               .room = Room::kSome},
        Recipe{.name = "adamw_averaged", .average = "ema:0.9"},
        Recipe{.name = "adamw_bf16_averaged", .dtype = at::kBFloat16, .average = "swa:2:3"},
        Recipe{.name = "sgd_fp16_averaged_floor",
               .dtype = at::kHalf,
               .optimizer = "sgd",
               .room = Room::kFloor,
               .average = "ema:0.9"}),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

// ---- What programs do between two checkpoints ---------------------------------------------------

class DeviceTierProgramTest : public testing::TestWithParam<Recipe> {
 protected:
  Recipe As(const std::string& what) const {
    Recipe recipe = GetParam();
    recipe.name = what + "_" + recipe.name;
    return recipe;
  }
};

TEST_P(DeviceTierProgramTest, WeightsAreWritten) {
  ExpectTheSame(As("writes"), [](Training& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Step(step);
      if (step == kInterval) continue;
      const at::NoGradGuard no_grad;
      std::vector<Tensor> large = run.Large();
      large[step % large.size()].mul_(0.5);
      large.back().slice(0, 1, 3).fill_(0.125);
      run.model().parameters().back().mul_(0.75);
    }
    run.SeeState();
  });
}

// Through data(), for an evaluation: masters and moments go on as if nothing had been.
TEST_P(DeviceTierProgramTest, WeightsAreWrittenAndTakenBack) {
  ExpectTheSame(As("taken_back"), [](Training& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Step(step);
      std::vector<Tensor> parameters = run.model().parameters(), kept;
      if (step % 2 == 0) {
        for (const Tensor& parameter : parameters) parameter.data().clamp_(-100, 100);
        continue;
      }
      for (const Tensor& parameter : parameters) {
        kept.push_back(parameter.detach().clone());
        parameter.data().mul_(0.5);
      }
      const at::NoGradGuard no_grad;
      run.See("evaluation", run.Loss(1000));
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].data().copy_(kept[i]);
    }
    run.SeeState();
  });
}

TEST_P(DeviceTierProgramTest, OptionsChangeAndParametersAreFrozenAndLeftOut) {
  ExpectTheSame(As("options"), [](Training& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      auto& options = run.optimizer().param_groups().front().options();
      options.set_lr(1e-2 / static_cast<double>(step + 1));
      std::vector<Tensor> large = run.Large();
      large[0].requires_grad_(step < 2 || step > 5);
      run.Backward(step);
      if (step % 2 == 1) large[1].mutable_grad().reset();
      if (step == 4) {  // as a trainer that skips a step
        run.optimizer().zero_grad();
        continue;
      }
      run.optimizer().step();
      run.optimizer().zero_grad(/*set_to_none=*/step % 2 == 0);
    }
    run.SeeState();
  });
}

TEST_P(DeviceTierProgramTest, GradientsAreReadWrittenAndKept) {
  ExpectTheSame(As("gradients"), [](Training& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Backward(step);
      const at::NoGradGuard no_grad;
      std::vector<Tensor> large = run.Large();
      for (const Tensor& parameter : large) run.See("gradient", parameter.grad());
      large[0].mutable_grad().mul_(0.5);
      large[1].mutable_grad() = torch::full_like(large[1], 0.01);
      large[2].mutable_grad().zero_();
      const Tensor kept = large[0].grad();
      run.optimizer().step();
      run.See("kept", kept);
      if (step % 2 == 0) run.optimizer().zero_grad(/*set_to_none=*/step % 4 == 0);
    }
    run.SeeState();
  });
}

// In memory a state that was saved on a device is not loaded.
TEST_P(DeviceTierProgramTest, StateIsSavedAndLoaded) {
  const Program program = [](Training& run) {
    std::string saved;
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Step(step);
      if (step == 1) {
        std::ostringstream stream;
        torch::save(run.optimizer(), stream);
        saved = stream.str();
      }
      if (step == 4) {
        std::istringstream stream(saved);
        torch::load(run.optimizer(), stream);
      }
    }
    run.SeeState();
  };
  const Recipe recipe = As("loads");
  Recipe daemon = As("loads_by_the_daemon");
  daemon.room = Room::kFloor;
  ExpectEqual(SeenIn(daemon, /*offloads=*/true, program),
              SeenIn(recipe, /*offloads=*/true, program));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, DeviceTierProgramTest,
    testing::Values(Recipe{.name = "fp32"},
                    Recipe{.name = "bf16",
                           .dtype = at::kBFloat16,
                           .pace = Pace::kLate,
                           .queries_are_late = true},
                    Recipe{.name = "fp16_some", .dtype = at::kHalf, .room = Room::kSome},
                    Recipe{.name = "bf16_some", .dtype = at::kBFloat16, .room = Room::kSome}),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

TEST_P(DeviceTierProgramTest, LargeBuffersChangeWithEveryStep) {
  Recipe recipe = As("buffers");
  recipe.has_large_buffer = true;
  ExpectTheSame(recipe, [](Training& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Step(step);
      if (step == 4) run.SeeState();
    }
    run.SeeState();
  });
}

// ---- Refused steps ------------------------------------------------------------------------------

// `refuse`, after a backward pass, makes no step; the other steps are as if it had not been.
void ExpectARefusedStepChangesNothing(const Recipe& recipe,
                                      const std::function<void(Training& run)>& refuse) {
  const auto train = [&](bool offloads) {
    Training run(recipe, offloads);
    for (int64_t step = 0; step < kSteps; ++step) {
      if (step != 1 && step != 4) {
        run.Step(step);
        continue;
      }
      run.Backward(step);
      if (offloads) {
        const int64_t steps = run.engine().step();
        refuse(run);
        EXPECT_EQ(run.engine().step(), steps);
      }
      run.SeeState();
      run.optimizer().zero_grad();
    }
    run.SeeState();
    return std::exchange(run.seen, {});
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

TEST(DeviceTierStepTest, AGradientThatIsNotFiniteChangesNothing) {
  for (const Room room : {Room::kSome, Room::kAll}) {
    const Recipe recipe = {.name = "non_finite" + std::to_string(static_cast<int>(room)),
                           .dtype = at::kBFloat16,
                           .room = room};
    ExpectARefusedStepChangesNothing(recipe, [](Training& run) {
      for (const Tensor& of : {run.Large().front(), run.Large().back()}) {
        const at::NoGradGuard no_grad;
        const Tensor before = of.grad().clone();
        of.mutable_grad().slice(0, 0, 1).fill_(INFINITY);
        ExpectError(1701, "gradient of parameter", [&] { run.optimizer().step(); });
        of.mutable_grad().copy_(before);
      }
    });
  }
}

TEST(DeviceTierStepTest, AnOptionThatTheJobKeepsNoStateForChangesNothing) {
  ExpectARefusedStepChangesNothing({.name = "amsgrad", .dtype = at::kBFloat16}, [](Training& run) {
    auto& options =
        static_cast<torch::optim::AdamWOptions&>(run.optimizer().param_groups().front().options());
    options.amsgrad(true);
    ExpectError(1604, "max_exp_avg_sq", [&] { run.optimizer().step(); });
    options.amsgrad(false);
  });
  ExpectARefusedStepChangesNothing({.name = "momentum", .optimizer = "sgd"}, [](Training& run) {
    auto& options =
        static_cast<torch::optim::SGDOptions&>(run.optimizer().param_groups().front().options());
    options.momentum(0.9);
    ExpectError(1604, "momentum_buffer", [&] { run.optimizer().step(); });
    options.momentum(0);
  });
}

// The device has updated, the daemon cannot: nobody sees weights of a step that was not taken.
TEST(DeviceTierStepTest, AfterAStepThatFailsMidwayNothingIsUsed) {
  Recipe recipe = {.name = "midway", .dtype = at::kBFloat16, .pace = Pace::kEager};
  const auto train = [&](bool offloads) {
    Training run(recipe, offloads);
    for (int64_t step = 0; step < kInterval + 1; ++step) run.Step(step);
    if (offloads) {
      run.SeeState();  // no step is under way
      run.Backward(kInterval + 1);
      const std::optional<pid_t> daemon = FindDaemon();
      EXPECT_TRUE(daemon.has_value());
      if (daemon.has_value()) kill(*daemon, SIGKILL);
      ExpectError(1801, "", [&] { run.optimizer().step(); });
      EXPECT_EQ(run.engine().step(), kInterval + 1);
      const std::string text = "had updated tensors of it";
      const Tensor weight = run.Large().front();
      ExpectError(1802, text, [&] { (weight * 1).sum(); });
      ExpectError(1802, text, [&] { run.Loss(0); });
      ExpectError(1802, text, [&] { run.engine().Gather(weight); });
      ExpectError(1802, text, [&] { run.engine().WaitDurable(); });
      ExpectError(1802, text, [&] { run.engine().Checkpoint(); });
      ExpectError(1802, text, [&] { run.optimizer().step(); });
      ExpectError(1802, text, [&] {
        const at::NoGradGuard no_grad;
        weight.mul_(2);
      });
      run.Restart();
      run.engine().Seal();
      EXPECT_EQ(run.engine().step(), kInterval);
      run.Step(kInterval);
    }
    for (int64_t step = kInterval + 1; step < kSteps; ++step) run.Step(step);
    run.seen.clear();
    run.SeeState();
    return std::exchange(run.seen, {});
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

// ---- What moves --------------------------------------------------------------------------------

// In an interval nothing of the tier moves, and the host waits for nothing in forward and backward.
TEST(DeviceTierStepTest, InAnIntervalNothingMovesAndTheHostWaitsForNothing) {
  Training run({.name = "still", .dtype = at::kBFloat16, .pace = Pace::kEager}, /*offloads=*/true);
  uint64_t tier_bytes = 0, all_bytes = 0;
  for (const Tensor& parameter : run.Large()) tier_bytes += parameter.nbytes();
  for (const Tensor& parameter : run.model().parameters()) all_bytes += parameter.nbytes();
  ASSERT_GT(tier_bytes, all_bytes / 2);
  for (int64_t step = 0; step < 2 * kInterval; ++step) {
    const bool is_still = step == kInterval + 1;
    if (is_still) run.engine().WaitDurable();  // nothing of an earlier step is on its way
    const HostAccelerator::Counters before = run.device().counters();
    const uint64_t waits_before = step > 0 ? run.engine().statistics().gpu_waits : 0;
    const uint64_t written_before = step > 0 ? run.engine().statistics().bytes_written : 0;
    run.Loss(step).backward();
    if (is_still) {
      EXPECT_EQ(run.device().counters().synchronizes, before.synchronizes);
      EXPECT_EQ(run.engine().statistics().gpu_waits, waits_before);
    }
    run.optimizer().step();
    run.optimizer().zero_grad();
    if (!is_still) continue;
    // The rest is bundled, and stays in ram.
    EXPECT_EQ(run.engine().statistics().bytes_written, written_before);
  }
}

// What a checkpoint brings to the job passes through page-locked memory, several copies at once,
// and the host waits once for a block. Nothing else of a step is copied from or to pageable memory.
TEST(DeviceTierStepTest, CheckpointsCopyNothingPageable) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const bool registers : {true, false}) {
      Training run(
          {.name = std::string("locked_") + c10::toString(dtype) + (registers ? "" : "_ring"),
           .dtype = dtype,
           .pace = Pace::kLate,
           .queries_are_late = true,
           .flavour = AdamWFlavour::kFused,  // fp64 has no other
           .registers_slab = registers},
          /*offloads=*/true);
      for (int64_t step = 0; step < 3 * kInterval; ++step) {
        const Tensor loss = run.Loss(step);
        const HostAccelerator::Counters before = run.device().counters();
        loss.backward();
        nn::utils::clip_grad_norm_(run.model().parameters(), 0.1);
        const HostAccelerator::Counters amid = run.device().counters();
        run.optimizer().step();
        const HostAccelerator::Counters after = run.device().counters();
        run.optimizer().zero_grad();
        if (step < kInterval) continue;
        EXPECT_EQ(after.pageable_copies, before.pageable_copies) << dtype << ", " << step;
        if ((step + 1) % kInterval != 0) continue;
        // Each is shorter than a block: a master and two moments.
        const uint64_t blocks = run.Large().size() * 3;
        EXPECT_GE(after.copies_to_host - amid.copies_to_host, blocks);
        EXPECT_LE(after.synchronizes - amid.synchronizes, blocks + 10) << dtype << ", " << step;
        EXPECT_GT(after.copies_under_way_max, 3);
      }
      run.SeeState();
    }
  }
}

// Another stream reads weights, and nobody waits for it but what overwrites them.
TEST(DeviceTierStepTest, WhatComesBackAndUpdatesWaitForOtherStreams) {
  Training run(
      {.name = "side", .dtype = at::kBFloat16, .pace = Pace::kLate, .queries_are_late = true},
      /*offloads=*/true);
  const c10::Stream side = NewStandinStream();
  for (int64_t step = 0; step < kInterval + 1; ++step) {
    run.Step(step);
    const at::NoGradGuard no_grad;
    if (step % 2 == 0) {
      for (Tensor& weight : run.Large()) weight.mul_(0.5);
    }
    const c10::StreamGuard on_side(side);
    for (const Tensor& weight : run.Large()) weight.sum();
  }
  run.Close();
  EXPECT_TRUE(run.device().StreamDestroy({static_cast<uintptr_t>(side.id())}).ok());
}

TEST(DeviceTierStepTest, ACudaGraphIsRefusedAndSpoilsNothing) {
  Training run({.name = "captured", .pace = Pace::kEager}, /*offloads=*/true);
  const at::NoGradGuard no_grad;
  const Tensor before = run.Loss(0);
  run.device().SetCapturing({}, true);
  ExpectError(2005, "captured", [&] { run.Large().front().sum(); });
  run.device().SetCapturing({}, false);
  EXPECT_TRUE(torch::equal(run.Loss(0), before));
}

// ---- The end -----------------------------------------------------------------------------------

// Steps of a job in another process, which ends as it likes.
int TrainInChild(const std::string& fault, const std::string& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("OFFLOADD_TIER_CHILD", child.c_str(), 1);
    // Of the test that it is a part of.
    for (const char* shard : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) unsetenv(shard);
    if (!fault.empty()) setenv("OFFLOADD_FAULT_POINT", fault.c_str(), 1);
    execl("/proc/self/exe", "device_tier_torch_test", "--gtest_filter=DeviceTierChild.*",
          static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

Recipe ChildRecipe(const std::string& name) {
  return {.name = name,
          .dtype = at::kBFloat16,
          .room = Room::kSome,
          .pace = Pace::kEager,
          .has_large_buffer = name.ends_with("buffers")};
}

// "name:steps": trains, and is killed then, unless it was before.
TEST(DeviceTierChild, Trains) {
  const char* const child = getenv("OFFLOADD_TIER_CHILD");
  if (child == nullptr) GTEST_SKIP() << "the other tests run this one in a process of its own";
  const std::string text = child;
  const size_t colon = text.find(':');
  Training run(ChildRecipe(text.substr(0, colon)), /*offloads=*/true);
  const int64_t steps = std::stoll(text.substr(colon + 1));
  for (int64_t step = 0; step < steps; ++step) run.Step(step);
  raise(SIGKILL);
}

struct Death {
  std::string name;
  int64_t steps = 0;  // that it takes at most
  std::string fault;  // where it dies before
  int64_t resumed = 0;
};

class DeviceTierDeathTest : public testing::TestWithParam<Death> {};

TEST_P(DeviceTierDeathTest, TheJobGoesOnAtTheLastCheckpoint) {
  const Death& death = GetParam();
  const int status = TrainInChild(death.fault, death.name + ":" + std::to_string(death.steps));
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  const Recipe recipe = ChildRecipe(death.name);
  const auto train = [&](bool offloads) {
    Training run(recipe, offloads);
    if (offloads) {
      run.engine().Seal();
      EXPECT_EQ(run.engine().step(), death.resumed);
    }
    const int64_t begin = offloads ? death.resumed : 0;
    for (int64_t step = begin; step < kSteps; ++step) run.Step(step);
    run.seen.clear();
    run.SeeState();
    return std::exchange(run.seen, {});
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

// Five tensors or so are put at a checkpoint.
INSTANTIATE_TEST_SUITE_P(Deaths, DeviceTierDeathTest,
                         testing::Values(Death{"in_the_first_interval", 2, "", 0},
                                         Death{"at_a_checkpoint", kInterval, "", kInterval},
                                         Death{"in_an_interval", kInterval + 2, "", kInterval},
                                         Death{"in_an_interval_with_buffers", kInterval + 2, "",
                                               kInterval},
                                         Death{"amid_the_first_puts", kSteps, "tier.put:2", 0},
                                         Death{"amid_later_puts", kSteps, "tier.put:7", kInterval}),
                         [](const testing::TestParamInfo<Death>& info) { return info.param.name; });

// A program that ends in an interval, as it should, loses nothing; WaitDurable() and Checkpoint()
// make the step before them durable.
TEST(DeviceTierEndTest, ClosingWaitingAndCheckpointsMakeTheLastStepDurable) {
  Recipe recipe = {.name = "ends", .dtype = at::kBFloat16, .room = Room::kSome};
  const auto train = [&](bool offloads) {
    Training run(recipe, offloads);
    for (int64_t step = 0; step < kSteps; ++step) {
      run.Step(step);
      if (!offloads) continue;
      if (step == 1) {
        run.Restart();
        run.engine().Seal();
        EXPECT_EQ(run.engine().step(), 2);
      }
      if (step == 3) {
        run.engine().WaitDurable();
        EXPECT_EQ(run.engine().statistics().durable_step, 4);
      }
      if (step == 4) {
        EXPECT_EQ(run.engine().Checkpoint(), 5);
        run.engine().WaitDurable();
        EXPECT_EQ(run.engine().statistics().durable_step, 5);
      }
    }
    run.seen.clear();
    run.SeeState();
    return std::exchange(run.seen, {});
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

// Weights that are left in memory, and files of them, are those of the last step.
TEST(DeviceTierEndTest, FilesAndWhatIsLeftInMemoryAreOfTheLastStep) {
  Recipe recipe = {.name = "left", .dtype = at::kBFloat16};
  Training run(recipe, /*offloads=*/true);
  run.options().weights_at_close = "memory";
  run.Restart();
  for (int64_t step = 0; step < kInterval + 2; ++step) run.Step(step);
  const std::string folder = Pool() + "/left_files";
  run.engine().SaveWeights(folder);
  std::vector<Tensor> weights;
  for (const Tensor& parameter : run.model().parameters())
    weights.push_back(run.engine().Gather(parameter, "weight"));
  run.Step(kInterval + 2);  // what is put for a file is no checkpoint
  run.engine().LoadWeights(folder);
  size_t i = 0;
  for (const Tensor& parameter : run.model().parameters()) {
    EXPECT_TRUE(torch::equal((parameter * 1).cpu(), weights[i])) << i;
    ++i;
  }
  run.Close();
  i = 0;
  for (const Tensor& parameter : run.model().parameters())
    EXPECT_TRUE(torch::equal(parameter.detach().cpu(), weights[i++])) << i;
}

// Half of what is free is taken, and of that only what is of use.
TEST(DeviceTierEndTest, AutomaticGpuRamIsWithinHalfOfWhatIsFree) {
  for (const uint64_t memory_bytes : {uint64_t{32} << 20, uint64_t{1} << 30}) {
    Training run({.name = "auto" + std::to_string(memory_bytes), .memory_bytes = memory_bytes},
                 /*offloads=*/true);
    run.options().gpu_ram = "auto";
    run.options().job += "_auto";
    run.Close();
    const uint64_t free_bytes = run.device().MemGetInfo()->free_bytes;
    run.Restart();
    run.engine().Seal();
    const Statistics statistics = run.engine().statistics();
    EXPECT_LE(statistics.gpu_ram_bytes, free_bytes / 2);
    EXPECT_LE(statistics.gpu_ram_bytes, uint64_t{32} << 20);
    EXPECT_THAT(run.engine().plan().text, testing::HasSubstr("put into the job at checkpoints"));
    for (int64_t step = 0; step < 2; ++step) run.Step(step);
    EXPECT_LE(run.engine().statistics().gpu_peak_bytes, statistics.gpu_ram_bytes);
  }
}

// Where every step is committed, or by the clock, the daemon updates all.
TEST(DeviceTierEndTest, WithoutIntervalsOfStepsThereIsNone) {
  for (const char* durability : {"step", "checkpoint:10min"}) {
    Training run({.name = "no_tier"}, /*offloads=*/true);
    run.options().durability = durability;
    run.options().job += durability == std::string("step") ? "_steps" : "_time";
    run.Restart();
    run.Step(0);
    EXPECT_THAT(run.engine().plan().text,
                testing::HasSubstr("updated on the device: nothing, since durability is not"));
  }
}

}  // namespace
}  // namespace offload

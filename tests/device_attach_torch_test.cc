// A model on a device trains as the same model in the device's memory does: the same program runs
// twice on the stand-in, once attached and once with OFFLOADD_DISABLE=1, and everything it can see
// is compared bit by bit. The stand-in's checker judges what the attached run did to the device.

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <offload/torch.h>
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "examples/language_model.h"
#include "gmock/gmock.h"
#include "tests/standin_torch.h"
#include "tests/standin_torch_fixture.h"
#include "tests/torch_fixture.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_tensors.h"
#include "zero3/planner.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using accelerator::HostAccelerator;
using accelerator::Pace;
using at::Tensor;
using examples::LanguageModel;
using examples::ModelKind;
using examples::ModelShape;

// Gradients that ram does not hold.
enum class Spills : uint8_t { kNone, kSome, kAll };

constexpr int64_t kSteps = 4, kMicroBatches = 2, kLength = 12, kVocabulary = 200;
constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Recipe {
  std::string name;
  ModelKind kind = ModelKind::kLlama;
  bool tied = false;
  at::ScalarType dtype = at::kFloat;
  double gpu_ram = 1;         // of the smallest that runs; 0: auto
  uint64_t ram_more_mib = 0;  // than the smallest that runs
  std::string weights_home = "nvme";
  bool slab_is_registered = true;
  bool queries_are_late = false;
  Pace pace = Pace::kRandom;
  bool freezes = false;
  bool two_streams = false;
  bool checkpoints = false;  // activations
  Spills spills = Spills::kNone;
};

ModelShape ShapeOf(const Recipe& recipe) {
  return {
      .kind = recipe.kind,
      .layers = 3,
      .hidden = 192,  // the largest tensors pass through the daemon's window, others are bundled
      .heads = 4,
      .key_value_heads = recipe.kind == ModelKind::kLlama ? 2 : 4,
      .head_size = 48,
      .feed_forward = 256,
      .vocabulary = kVocabulary,
      .context = kLength,
      .tied_embedding = recipe.tied || recipe.kind == ModelKind::kGpt2};
}

std::shared_ptr<LanguageModel> MakeModelOf(const Recipe& recipe) {
  torch::manual_seed(11);
  std::shared_ptr<LanguageModel> model = examples::MakeModel(ShapeOf(recipe));
  model->to(recipe.dtype);
  model->to(StandinDevice());
  int64_t number = 0;
  for (Tensor& parameter : model->parameters()) {
    if (recipe.freezes && ++number % 3 == 0) parameter.requires_grad_(false);
  }
  return model;
}

uint64_t GpuFloor(const nn::Module& model) {
  return zero3::MakeGpuPlan(zero3::GpuTensorsOf(TensorsOf(model)), uint64_t{1} << 40)->floor_bytes;
}

uint64_t RamFloor(const nn::Module& model, const std::string& weights_home, Spills spills) {
  zero3::PlanInput input;
  input.catalogue = *proto::BuildCatalogue(TensorsOf(model), kernels::OptimizerSpec());
  input.policy = {.weights = *zero3::ParseHome("weights", weights_home)};
  input.ram_bytes = uint64_t{1} << 40;
  const zero3::Plan plan = *zero3::MakePlan(input);
  if (spills == Spills::kAll) return plan.floor_bytes;
  if (spills == Spills::kSome) return plan.floor_without_spilling_bytes - kMiB / 2;
  return plan.floor_without_spilling_bytes;
}

Options OptionsFor(const nn::Module& model, const Recipe& recipe) {
  const uint64_t ram_bytes =
      RamFloor(model, recipe.weights_home, recipe.spills) + recipe.ram_more_mib * kMiB;
  Options options = PoolOptions(recipe.name, std::to_string(ram_bytes));
  options.weights_home = recipe.weights_home;
  options.spill_gradients = recipe.spills == Spills::kAll;
  if (recipe.gpu_ram > 0) {
    const double gpu_bytes = static_cast<double>(GpuFloor(model)) * recipe.gpu_ram;
    options.gpu_ram = std::to_string(static_cast<uint64_t>(gpu_bytes));
  }
  return options;
}

// As torch.nn.utils.clip_grad_norm_ of Python with foreach=True.
Tensor ClipTogether(const nn::Module& model, double max_norm) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  const Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2)), 2);
  at::_foreach_mul_(gradients, at::clamp(max_norm / (norm + 1e-6), std::nullopt, 1.0));
  return norm;
}

// Forward without a graph, and again in backward: as torch.utils.checkpoint does it.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& anchor,
                        const Tensor& tokens, LanguageModel* model) {
    context->save_for_backward({tokens});
    context->saved_data["model"] = reinterpret_cast<int64_t>(model);
    const at::NoGradGuard no_grad;
    return model->forward(tokens);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const Tensor tokens = context->get_saved_variables().front();
    auto* const model = reinterpret_cast<LanguageModel*>(context->saved_data["model"].toInt());
    const at::AutoGradMode with_grad(true);
    torch::autograd::backward({model->forward(tokens)}, {gradients.front()});
    return {Tensor(), Tensor(), Tensor()};
  }
};

class Training {
 public:
  Training(const Recipe& recipe, bool offloads)
      : recipe_(recipe),
        offloads_(offloads),
        device_({.seed = 3,
                 .pace = recipe.pace,
                 .queries_are_late = recipe.queries_are_late,
                 .registers_read_only = recipe.slab_is_registered}) {
    UseStandin(device_);
    SetOffloading(offloads);
    model_ = MakeModelOf(recipe_);
    options_ = OptionsFor(*model_, recipe_);
    Open();
  }
  ~Training() {
    Close();
    model_.reset();
    seen.clear();
    if (side_.has_value()) {
      const accelerator::Stream side{static_cast<uintptr_t>(side_->id())};
      EXPECT_TRUE(device_.StreamDestroy(side).ok());
    }
    ExpectClean(device_);
  }

  void Open() {
    engine_ = Engine::Open(options_);
    optimizer_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  }
  void Close() {
    optimizer_.reset();
    engine_.reset();
  }

  Tensor Tokens(int64_t number) const {
    return TokensOnStandin(number, kVocabulary, /*sequences=*/2, kLength);
  }

  Tensor Loss(int64_t number) {
    const Tensor tokens = Tokens(number);
    const Tensor input = tokens.slice(1, 0, kLength - 1);
    const Tensor logits =
        recipe_.checkpoints
            ? Checkpointed::apply(
                  torch::zeros({}, at::TensorOptions(StandinDevice()).requires_grad(true)), input,
                  model_.get())
            : model_->forward(input);
    return NextTokenLoss(logits, tokens);
  }

  void Step(int64_t step) {
    for (int64_t i = 0; i < kMicroBatches; ++i) {
      const Tensor loss = InStream([&] { return Loss(step * kMicroBatches + i) / kMicroBatches; });
      loss.backward();
      See(seen, "loss", loss);
    }
    if (step == 2) SeeGradients(seen, *model_, StandinDevice());
    if (step == 1) FailToOverwrite();
    const double max_norm = step % 2 == 0 ? 0.1 : 1e6;
    See(seen, "norm",
        step < 2 ? torch::tensor(nn::utils::clip_grad_norm_(model_->parameters(), max_norm))
                 : ClipTogether(*model_, max_norm));
    if (step == 0) FailToOverwrite();  // clipped
    optimizer_->step();
    if (step % 2 == 0) SeeGradients(seen, *model_, StandinDevice());
    if (step == 1 && !recipe_.two_streams) {
      model_->zero_grad(/*set_to_none=*/false);  // which detaches them
    } else {
      optimizer_->zero_grad(/*set_to_none=*/step % 2 == 0);
    }
    if (step == 1) FailToOverwrite();  // zero
    if (step == 1) WriteWeights(*model_);
    const at::NoGradGuard no_grad;
    See(seen, "evaluation", InStream([&] { return Loss(1000); }));
  }

  // Operators that throw instead of overwriting gradients, which stay what they are.
  void FailToOverwrite() {
    for (Tensor& parameter : model_->parameters()) {
      if (!parameter.grad().defined()) continue;
      EXPECT_ANY_THROW(parameter.mutable_grad().copy_(torch::zeros({3, 3, 3, 3})));
    }
  }

  void SeeState() {
    for (const auto& item : model_->named_parameters()) {
      See(seen, item.key() + " on the device", item.value() * 1);
      for (const char* plane : {"weight", "master", "exp_avg", "exp_avg_sq"}) {
        const bool is_trained = item.value().requires_grad();
        if (!is_trained && plane != std::string("weight")) continue;
        See(seen, item.key() + " " + plane, engine_->Gather(item.value(), plane));
      }
    }
  }

  // ram and gpu_ram are what they say.
  void CheckBudgets() const {
    const Statistics statistics = engine_->statistics();
    EXPECT_LE(statistics.peak_bytes, statistics.budget_bytes);
    EXPECT_GT(statistics.gpu_peak_bytes, 0u);
    EXPECT_LE(statistics.gpu_peak_bytes, statistics.gpu_ram_bytes);
    if (recipe_.gpu_ram > 0) {
      EXPECT_EQ(std::to_string(statistics.gpu_ram_bytes), options_.gpu_ram);
    }
    EXPECT_NE(engine_->plan().text.find("gpu_ram"), std::string::npos) << engine_->plan().text;
    EXPECT_EQ(engine_->plan().gradients_spilled, recipe_.spills != Spills::kNone);
  }

  bool offloads() const { return offloads_; }
  Engine& engine() { return *engine_; }
  LanguageModel& model() { return *model_; }
  HostAccelerator& device() { return device_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  Options& options() { return options_; }

  Seen seen;

 private:
  // On a stream of its own, which begins behind the present one and before what comes next.
  template <typename Work>
  Tensor InStream(const Work& work) {
    if (!recipe_.two_streams) return work();
    if (!side_.has_value()) side_ = NewStandinStream();
    return offload::InStream(*side_, work);
  }

  const Recipe recipe_;
  const bool offloads_;
  HostAccelerator device_;
  std::optional<c10::Stream> side_;
  std::shared_ptr<LanguageModel> model_;
  Options options_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

Seen Train(const Recipe& recipe, bool offloads) {
  Training run(recipe, offloads);
  for (int64_t step = 0; step < kSteps; ++step) run.Step(step);
  run.SeeState();
  if (offloads) run.CheckBudgets();
  return std::exchange(run.seen, {});
}

class DeviceParityTest : public testing::TestWithParam<Recipe> {};

TEST_P(DeviceParityTest, AttachedTrainingIsBitEqual) {
  ExpectEqual(Train(GetParam(), /*offloads=*/false), Train(GetParam(), /*offloads=*/true));
}

constexpr ModelKind kLlama = ModelKind::kLlama, kGpt2 = ModelKind::kGpt2;

INSTANTIATE_TEST_SUITE_P(
    Recipes, DeviceParityTest,
    testing::Values(
        Recipe{.name = "llama", .queries_are_late = true, .pace = Pace::kLate},
        Recipe{.name = "llama_bf16", .dtype = at::kBFloat16, .gpu_ram = 1.3, .ram_more_mib = 1},
        Recipe{.name = "llama_tied", .tied = true, .gpu_ram = 2, .ram_more_mib = 6},
        Recipe{.name = "llama_tied_bf16", .tied = true, .dtype = at::kBFloat16},
        Recipe{.name = "llama_frozen", .gpu_ram = 1.5, .freezes = true},
        Recipe{.name = "llama_frozen_bf16",
               .dtype = at::kBFloat16,
               .ram_more_mib = 200,
               .freezes = true},
        Recipe{.name = "llama_auto",
               .gpu_ram = 0,
               .ram_more_mib = 200,
               .weights_home = "auto",
               .pace = Pace::kEager},
        Recipe{.name = "llama_staged", .slab_is_registered = false},
        Recipe{.name = "llama_two_streams", .gpu_ram = 1.2, .two_streams = true},
        Recipe{.name = "llama_checkpointed", .gpu_ram = 1.2, .checkpoints = true},
        Recipe{.name = "gpt2", .kind = kGpt2, .gpu_ram = 1.1},
        Recipe{.name = "gpt2_bf16",
               .kind = kGpt2,
               .dtype = at::kBFloat16,
               .queries_are_late = true,
               .pace = Pace::kLate},
        Recipe{.name = "gpt2_bf16_staged_two_streams",
               .kind = kGpt2,
               .dtype = at::kBFloat16,
               .gpu_ram = 3,
               .slab_is_registered = false,
               .two_streams = true}),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

// Gradients pass through a window of the region on their way to the scratch file and back.
INSTANTIATE_TEST_SUITE_P(Spilled, DeviceParityTest,
                         testing::Values(Recipe{.name = "spilled_late",
                                                .queries_are_late = true,
                                                .pace = Pace::kLate,
                                                .spills = Spills::kAll},
                                         Recipe{.name = "spilled_bf16_two_streams",
                                                .dtype = at::kBFloat16,
                                                .gpu_ram = 1.2,
                                                .two_streams = true,
                                                .spills = Spills::kAll},
                                         Recipe{.name = "spilled_tied_frozen_checkpointed",
                                                .kind = kGpt2,
                                                .tied = true,
                                                .freezes = true,
                                                .checkpoints = true,
                                                .spills = Spills::kAll},
                                         Recipe{.name = "spilled_and_on_the_device",
                                                .dtype = at::kBFloat16,
                                                .gpu_ram = 6,
                                                .pace = Pace::kEager,
                                                .spills = Spills::kAll},
                                         Recipe{.name = "spilled_in_part",
                                                .gpu_ram = 1.5,
                                                .slab_is_registered = false,
                                                .spills = Spills::kSome}),
                         [](const testing::TestParamInfo<Recipe>& info) {
                           return info.param.name;
                         });

// Four sizes of each budget, from the smallest that run.
INSTANTIATE_TEST_SUITE_P(
    Sizes, DeviceParityTest, testing::ValuesIn([] {
      std::vector<Recipe> recipes;
      const double gpu_ram[] = {1, 1.2, 1.7, 4};
      const uint64_t ram_more_mib[] = {0, 1, 4, 64};
      for (size_t i = 0; i < 4; ++i) {
        for (const size_t j : {i, 3 - i}) {
          recipes.push_back({.name = "gpu_" + std::to_string(i) + "_ram_" + std::to_string(j),
                             .dtype = i % 2 == 0 ? at::kFloat : at::kBFloat16,
                             .gpu_ram = gpu_ram[i],
                             .ram_more_mib = ram_more_mib[j],
                             .queries_are_late = i == 1,
                             .pace = i == 1 ? Pace::kLate : Pace::kRandom});
        }
      }
      return recipes;
    }()),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

// The host waits for nothing in forward and backward, also where gradients find no room and come
// back for the next micro-batch.
TEST(DeviceAttachTest, TheHostWaitsForNothingInSteadyState) {
  for (const auto& [gpu_ram, micro_batches] :
       {std::pair{0.0, 2}, std::pair{1.5, 1}, std::pair{1.5, 3}}) {
    Training run({.name = "steady" + std::to_string(micro_batches),
                  .gpu_ram = gpu_ram,
                  .ram_more_mib = 200,
                  .weights_home = "auto",
                  .pace = Pace::kEager},
                 /*offloads=*/true);
    for (int64_t step = 0; step < 4; ++step) {
      std::vector<Tensor> losses;
      const uint64_t before = run.device().counters().synchronizes;
      const uint64_t waits_before = step > 0 ? run.engine().statistics().gpu_waits : 0;
      for (int64_t i = 0; i < micro_batches; ++i) {
        losses.push_back(run.Loss(step * micro_batches + i));
        losses.back().backward();
      }
      if (step >= 2) {
        EXPECT_EQ(run.device().counters().synchronizes, before) << step;
        EXPECT_EQ(run.engine().statistics().gpu_waits, waits_before) << step;
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  }
}

// Gradients that found no room are on their way back before a further micro-batch is added to them:
// all of them, once a step has shown in which order that is.
std::pair<int, int> FoundIn(const std::string& said, const std::string& text) {
  std::smatch numbers;
  const std::regex line(text);
  if (!std::regex_search(said, numbers, line)) return {0, 0};
  return {std::stoi(numbers[1]), std::stoi(numbers[2])};
}

// Steps of three micro-batches.
void TakeStepsOfThree(Training& run, int64_t steps) {
  for (int64_t i = 0; i < 3 * steps; ++i) {
    run.Loss(i).backward();
    if (i % 3 < 2) continue;
    run.optimizer().step();
    run.optimizer().zero_grad();
  }
}

TEST(DeviceAttachTest, GradientsComeBackAheadOfTheirUse) {
  const auto fetches = [](int64_t steps) {
    testing::internal::CaptureStderr();
    {
      Training run({.name = "ahead" + std::to_string(steps),
                    .gpu_ram = 1.5,
                    .ram_more_mib = 200,
                    .pace = Pace::kEager},
                   /*offloads=*/true);
      TakeStepsOfThree(run, steps);
    }
    return FoundIn(testing::internal::GetCapturedStderr(),
                   "gradients: ([0-9]+) times back .* use, ([0-9]+) times for it");
  };
  const auto [ahead_of_one, needed_of_one] = fetches(1);
  EXPECT_EQ(ahead_of_one, 0);
  EXPECT_GT(needed_of_one, 0);
  const auto [ahead_of_three, needed_of_three] = fetches(3);
  EXPECT_EQ(needed_of_three, needed_of_one);
  EXPECT_GE(ahead_of_three, 2 * needed_of_one);
}

// Those that are on the drive are read ahead of it, too, as soon as there is room.
TEST(DeviceAttachTest, SpilledGradientsAreReadAheadOfTheirUse) {
  const auto reads = [](int64_t steps) {
    testing::internal::CaptureStderr();
    {
      Training run({.name = "read_ahead" + std::to_string(steps),
                    .gpu_ram = 1.1,
                    .ram_more_mib = 8,
                    .pace = Pace::kEager,
                    .spills = Spills::kAll},
                   /*offloads=*/true);
      // A device that computes long enough for a write and a read of the drive.
      for (Tensor& parameter : run.model().parameters()) {
        parameter.register_hook([](const Tensor& gradient) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return gradient;
        });
      }
      TakeStepsOfThree(run, steps);
    }
    return FoundIn(testing::internal::GetCapturedStderr(),
                   "gradients: ([0-9]+) times read .* use, ([0-9]+) times for it");
  };
  const auto [ahead_of_one, needed_of_one] = reads(1);
  EXPECT_EQ(ahead_of_one, 0);
  EXPECT_GT(needed_of_one, 0);
  const auto [ahead_of_three, needed_of_three] = reads(3);
  // A drive that is late once in a while delays the reads behind it.
  EXPECT_LE(needed_of_three - needed_of_one, ahead_of_three / 10);
  EXPECT_GE(ahead_of_three, 3 * needed_of_one / 2);
}

// What an evaluation puts in the weights' place through data(), and takes back, is no edit of the
// fp32 masters, nor is what leaves the bytes as they were; other edits are.
TEST(DeviceAttachTest, MastersStayUnderEditsThatAreTakenBack) {
  const auto train = [](bool offloads) {
    Training run({.name = "taken_back", .dtype = at::kBFloat16}, offloads);
    std::vector<Tensor> parameters = run.model().parameters();
    for (int64_t step = 0; step < 4; ++step) {
      run.Loss(step).backward();
      run.optimizer().step();
      run.optimizer().zero_grad();
      if (step == 0) {
        for (Tensor& parameter : parameters) parameter.data().clamp_(-100, 100);
      } else if (step == 1) {
        std::vector<Tensor> kept;
        for (Tensor& parameter : parameters) {
          kept.push_back(parameter.detach().clone());
          parameter.data().mul_(0.5);
        }
        const at::NoGradGuard no_grad;
        See(run.seen, "evaluation", run.Loss(1000));
        for (size_t i = 0; i < parameters.size(); ++i) parameters[i].data().copy_(kept[i]);
      } else if (step == 2) {
        parameters[0].data().mul_(0.5);
        parameters[1].unsafeGetTensorImpl()->bump_version();
      }
    }
    run.SeeState();
    return std::exchange(run.seen, {});
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

// An operator that takes its time, of a library that torch knows nothing of.
struct Held {
  std::atomic<bool> is_running = false;

  static Held& Instance() {
    static auto* const held = new Held;
    return *held;
  }
};
Tensor Hold(const Tensor& weight) {
  Held::Instance().is_running = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  Held::Instance().is_running = false;
  return weight.clone();
}
TORCH_LIBRARY(device_attach_test, library) { library.def("hold(Tensor weight) -> Tensor"); }
TORCH_LIBRARY_IMPL(device_attach_test, CPU, library) { library.impl("hold", &Hold); }

// A thread is in the middle of an operator over a weight while another one trains: that sees its
// own steps.
TEST(DeviceAttachTest, AStepIsNotTakenUnderTheOperatorsOfAnotherThread) {
  const auto train = [](bool offloads) {
    Training run({.name = "held", .gpu_ram = 0, .ram_more_mib = 200}, offloads);
    const Tensor weight = run.model().parameters()[0];
    const auto hold = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("device_attach_test::hold", "")
                          .typed<Tensor(const Tensor&)>();
    for (int64_t step = 0; step < 2; ++step) {
      run.Loss(step).backward();
      std::thread other([&] {
        const at::NoGradGuard no_grad;
        hold.call(weight);
      });
      while (!Held::Instance().is_running) std::this_thread::yield();
      run.optimizer().step();
      run.optimizer().zero_grad();
      const at::NoGradGuard no_grad;
      See(run.seen, "evaluation", run.Loss(1000));
      other.join();
    }
    return std::exchange(run.seen, {});
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

// With room for all weights they stay on the device: each that was updated is copied once a step,
// however many micro-batches use it, and frozen ones never again.
TEST(DeviceAttachTest, WithRoomOnlyWhatWasUpdatedIsCopiedAgain) {
  Training run({.name = "copied_once",
                .gpu_ram = 0,
                .ram_more_mib = 200,
                .pace = Pace::kEager,
                .freezes = true},
               /*offloads=*/true);
  uint64_t trained_bytes = 0, frozen_bytes = 0;
  for (const Tensor& parameter : run.model().parameters())
    (parameter.requires_grad() ? trained_bytes : frozen_bytes) += parameter.nbytes();
  EXPECT_GT(frozen_bytes, 0u);
  uint64_t before = 0;
  for (int64_t step = 0; step < 5; ++step) {
    for (int64_t i = 0; i < kMicroBatches; ++i) run.Loss(step * kMicroBatches + i).backward();
    const uint64_t now = run.device().counters().bytes_to_device;
    EXPECT_EQ(now - before, step == 0 ? trained_bytes + frozen_bytes : trained_bytes) << step;
    before = now;
    run.optimizer().step();
    run.optimizer().zero_grad();
  }
}

// Norms are taken where a pass leaves the gradients, by the kernel that the program takes: from the
// second step on clipping copies none of those that found no room.
TEST(DeviceAttachTest, ClippingBringsNoGradientBack) {
  const auto copied = [](const std::string& clips) {
    Training run({.name = "clipped_" + clips, .pace = Pace::kEager}, /*offloads=*/true);
    uint64_t before = 0;
    for (int64_t step = 0; step < 4; ++step) {
      if (step == 1) before = run.device().counters().bytes_to_device;
      for (int64_t i = 0; i < kMicroBatches; ++i) run.Loss(step * kMicroBatches + i).backward();
      if (clips == "together") ClipTogether(run.model(), 0.1);
      if (clips == "alone") nn::utils::clip_grad_norm_(run.model().parameters(), 0.1);
      if (clips == "by_sum") nn::utils::clip_grad_norm_(run.model().parameters(), 0.1, 1.0);
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
    return static_cast<double>(run.device().counters().bytes_to_device - before);
  };
  // What is copied ahead differs a little from run to run. A norm of another kind brings them back.
  const double without = copied("not"), back = copied("by_sum") - without;
  EXPECT_GT(back, without / 20);
  EXPECT_NEAR(copied("alone"), without, back / 4);
  EXPECT_NEAR(copied("together"), without, back / 4);
}

TEST(DeviceAttachTest, AJobGoesOnWhereItWas) {
  const Recipe recipe{.name = "goes_on", .gpu_ram = 1.2};
  const Seen expected = Train(recipe, /*offloads=*/false);
  Training run(recipe, /*offloads=*/true);
  run.options().weights_at_close = "memory";
  for (int64_t step = 0; step < kSteps; ++step) {
    // What was written after a step belongs to the next one.
    if (step == 1 || step == 3) {
      run.Close();
      run.Open();
      EXPECT_EQ(run.engine().step(), step);
    }
    run.Step(step);
  }
  run.SeeState();
  ExpectEqual(expected, run.seen);
}

TEST(DeviceAttachTest, WeightsGoToFilesAndComeBack) {
  const std::string folder = Pool() + "/saved";
  Training run({.name = "files"}, /*offloads=*/true);
  run.Step(0);
  run.engine().SaveWeights(folder);
  const Seen saved = WeightsOf(run.model());
  run.Step(2);
  run.engine().LoadWeights(folder);
  ExpectEqual(saved, WeightsOf(run.model()));
}

// Two threads evaluate the model in a window that has room for one of them; both wait, and neither
// sees anything else than when it is alone.
TEST(DeviceAttachTest, ThreadsShareTheWindow) {
  Training run({.name = "threads"}, /*offloads=*/true);
  run.Step(0);
  std::vector<Tensor> inputs;
  for (int64_t i = 0; i < 2; ++i) inputs.push_back(run.Tokens(2000 + i).slice(1, 0, kLength - 1));
  ExpectThreadsSeeWhatOneSees(run.model(), inputs);
}

// What the device holds beside gpu_ram is what an operator uses: here a weight's gradient, a
// product, and numbers.
TEST(DeviceAttachTest, TheDeviceHoldsNoMoreThanGpuRam) {
  constexpr int64_t kMatrices = 24, kWidth = 192;
  constexpr uint64_t kMatrixBytes = kWidth * kWidth * sizeof(float);
  for (const double factor : {1.0, 1.3, 2.0, 3.5}) {
    HostAccelerator device({.pace = Pace::kEager});
    UseStandin(device);
    SetOffloading(true);
    const Recipe recipe{.name = "holds" + std::to_string(factor), .gpu_ram = factor};
    nn::Module model;
    for (int64_t i = 0; i < kMatrices; ++i)
      model.register_parameter("weight" + std::to_string(i), torch::randn({kWidth, kWidth}));
    model.to(StandinDevice());
    const Options options = OptionsFor(model, recipe);
    const auto engine = Engine::Open(options);
    const auto optimizer = engine->AdamW(model, torch::optim::AdamWOptions(1e-2));
    const auto held_bytes = [&] {
      const accelerator::MemoryInfo memory = *device.MemGetInfo();
      return memory.total_bytes - memory.free_bytes;
    };
    uint64_t held_bytes_max = 0;
    for (int step = 0; step < 3; ++step) {
      for (const Tensor& weight : model.parameters()) {
        (weight * 0.5).sum().backward();
        if (step > 0) held_bytes_max = std::max(held_bytes_max, held_bytes());
      }
      optimizer->step();
      optimizer->zero_grad();
    }
    const uint64_t gpu_ram_bytes = std::stoull(options.gpu_ram);
    EXPECT_GT(2 * kMatrices * kMatrixBytes, gpu_ram_bytes);
    EXPECT_GT(held_bytes_max, gpu_ram_bytes / 2);
    EXPECT_LE(held_bytes_max, gpu_ram_bytes + 3 * kMatrixBytes);
    EXPECT_LE(engine->statistics().gpu_peak_bytes, gpu_ram_bytes);
  }
}

// However many small buffers there are, a step waits for one copy of them; all come back. What a
// step copies to the host goes to page-locked memory.
TEST(DeviceAttachTest, BuffersGoToTheHostTogether) {
  const auto waits_of_a_step = [](int64_t count) {
    HostAccelerator device({.pace = Pace::kEager});
    UseStandin(device);
    SetOffloading(true);
    const auto make = [&](int64_t begin) {
      auto model = std::make_shared<nn::Module>();
      model->register_parameter("weight", torch::ones({8, 8}));
      model->register_buffer("table", torch::full({700, 900}, begin, at::kFloat));
      for (int64_t i = 0; i < count; ++i) {
        const std::string number = std::to_string(i);
        model->register_buffer("count" + number, torch::tensor(begin + i));
        model->register_buffer("is_even" + number, torch::full({i % 3}, begin % 2 == 0));
        model->register_buffer("mean" + number, torch::full({3, 5}, begin + i, at::kFloat).t());
      }
      model->to(StandinDevice());
      return model;
    };
    const Options options = PoolOptions("buffers" + std::to_string(count), "64MiB");
    const auto buffers_of = [](const nn::Module& model) {
      Seen seen;
      for (const auto& item : model.named_buffers()) See(seen, item.key(), item.value());
      return seen;
    };
    uint64_t waits = 0;
    for (const int64_t begin : {0, 7}) {
      const std::shared_ptr<nn::Module> model = make(begin);
      const auto engine = Engine::Open(options);
      const auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 2; ++step) {
        model->parameters()[0].sum().backward();
        const HostAccelerator::Counters before = device.counters();
        optimizer->step();
        const HostAccelerator::Counters after = device.counters();
        waits = after.synchronizes - before.synchronizes;
        EXPECT_EQ(after.pageable_copies, before.pageable_copies);
      }
      ExpectEqual(buffers_of(*make(0)), buffers_of(*model));
    }
    return waits;
  };
  EXPECT_EQ(waits_of_a_step(20), waits_of_a_step(1));
}

// ---- What is refused ---------------------------------------------------------------------------

class DeviceErrorTest : public testing::Test {
 protected:
  DeviceErrorTest() : device_(HostAccelerator::Options()) {
    UseStandin(device_);
    SetOffloading(true);
    model_ = MakeModelOf(recipe_);
    options_ = OptionsFor(*model_, recipe_);
  }
  void Attach() {
    engine_ = Engine::Open(options_);
    optimizer_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-2));
  }
  Tensor Forward() {
    return model_->forward(torch::zeros({1, kLength}, at::kLong).to(StandinDevice()));
  }

  const Recipe recipe_{.name = "refused"};
  HostAccelerator device_;
  std::shared_ptr<LanguageModel> model_;
  Options options_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

TEST_F(DeviceErrorTest, ADeviceWithoutAPlugIn) {
  nn::Module module;
  module.register_parameter("weight", torch::empty({3}, at::kMeta));
  engine_ = Engine::Open(options_);
  ExpectError(1601, "accelerator plug-in",
              [&] { engine_->AdamW(module, torch::optim::AdamWOptions(1e-2)); });
}

TEST_F(DeviceErrorTest, ASecondDevice) {
  model_->parameters().back().set_data(model_->parameters().back().cpu());
  ExpectError(1601, "on cpu", [&] { Attach(); });
}

TEST_F(DeviceErrorTest, AGpuRamBelowTheFloor) {
  options_.gpu_ram = "much";
  ExpectError(1002, "much", [&] { Attach(); });
  const std::string floor = std::to_string(GpuFloor(*model_));
  options_.gpu_ram = std::to_string(GpuFloor(*model_) - 1);
  ExpectError(2003, "Set gpu_ram to " + floor + " bytes", [&] { Attach(); });
  engine_.reset();
  options_.gpu_ram = floor;
  Attach();
  Forward();
}

TEST_F(DeviceErrorTest, AMoveWhileAttached) {
  Attach();
  const Tensor before = Forward();
  ExpectError(1601, "cannot move", [&] { model_->to(at::kCPU); });
  EXPECT_TRUE(torch::equal(Forward(), before));
  Forward().sum().backward();
  optimizer_->step();
  EXPECT_EQ(engine_->step(), 1);
}

TEST_F(DeviceErrorTest, ARawPointer) {
  Attach();
  Forward();
  try {
    model_->parameters()[0].data_ptr<float>();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("OFD-1603"));
  }
}

TEST_F(DeviceErrorTest, ACudaGraph) {
  Attach();
  Forward();
  const Tensor tokens = torch::zeros({1, kLength}, at::kLong).to(StandinDevice());
  device_.SetCapturing({}, true);
  ExpectError(2005, "captured", [&] { model_->forward(tokens); });
  device_.SetCapturing({}, false);
  Forward();
}

// One step of a model on random tokens that depend on its number.
void TrainOnce(LanguageModel& model, torch::optim::Optimizer& optimizer, int64_t number) {
  torch::manual_seed(number);
  const Tensor tokens = torch::randint(kVocabulary, {1, kLength}).to(StandinDevice());
  model.forward(tokens).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
}

// Every later call fails, too, and the job goes on from its last step.
TEST(DeviceAttachTest, ADeviceThatFailsEndsTheRunWithItsText) {
  const Recipe recipe{.name = "fails"};
  int64_t steps = 0;
  {
    HostAccelerator device({.failing_copy = 150});
    UseStandin(device);
    SetOffloading(true);
    const std::shared_ptr<LanguageModel> model = MakeModelOf(recipe);
    const auto engine = Engine::Open(OptionsFor(*model, recipe));
    const auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
    // Who meets it first may be an operator of the device itself.
    try {
      for (int64_t step = 0; step < 50; ++step) TrainOnce(*model, *optimizer, step);
      ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("stand-in is broken"));
    }
    ExpectError(2004, "stand-in is broken", [&] { model->parameters()[0].sum(); });
    steps = engine->step();
    EXPECT_GT(steps, 0);
  }
  // `more` steps from where the job is, or all of them in memory.
  const auto train = [&](bool offloads) {
    HostAccelerator device(HostAccelerator::Options{});
    UseStandin(device);
    SetOffloading(offloads);
    const std::shared_ptr<LanguageModel> model = MakeModelOf(recipe);
    const auto engine = Engine::Open(OptionsFor(*model, recipe));
    const auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
    if (offloads) {
      EXPECT_EQ(engine->step(), steps);
    }
    for (int64_t step = offloads ? steps : 0; step < steps + 2; ++step)
      TrainOnce(*model, *optimizer, step);
    Seen seen;
    for (const auto& item : model->named_parameters())
      See(seen, item.key(), engine->Gather(item.value(), "master"));
    return seen;
  };
  ExpectEqual(train(/*offloads=*/false), train(/*offloads=*/true));
}

}  // namespace
}  // namespace offload

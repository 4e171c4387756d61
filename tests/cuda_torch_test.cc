// A model on a GPU trains as the same model in the GPU's memory does, with the arithmetic of the
// processor's optimizer: the same program runs twice on the first device, attached, and in its
// memory with each update made on the host, and everything it can see is compared bit by bit.
//
// Without a GPU these are skipped; the same paths run on the stand-in everywhere
// (device_attach_torch_test.cc, device_from_host_torch_test.cc, device_tier_torch_test.cc).

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <offload/torch.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "examples/language_model.h"
#include "gmock/gmock.h"
#include "tests/device_torch_fixture.h"
#include "tests/torch_fixture.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_tensors.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using examples::LanguageModel;
using examples::ModelKind;
using testing::HasSubstr;

constexpr int64_t kSteps = 5, kMicroBatches = 2, kLength = 48, kVocabulary = 500, kRows = 3;
constexpr int64_t kInterval = 2;  // of checkpoints, of what is updated on the device
const c10::Device kDevice(c10::kCUDA, 0);

bool HasGpu() {
  static const bool kHasGpu = [] {
    // Before anything asks for cuBLAS.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*replace=*/0);
    dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
    if (!at::globalContext().hasCUDA()) return false;
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    // The backward passes of the others add in an order of their own.
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
    return true;
  }();
  return kHasGpu;
}

#define REQUIRE_GPU()                                               \
  if (!HasGpu()) {                                                  \
    if (std::getenv("OFFLOADD_REQUIRE_GPU") != nullptr) FAIL();     \
    GTEST_SKIP() << "torch finds no GPU here (see tools/gpu_test)"; \
  }

enum class Built : uint8_t { kThere, kOnHost, kBorn };

struct Recipe {
  std::string name;
  ModelKind kind = ModelKind::kLlama;
  bool tied = false;
  at::ScalarType dtype = at::kFloat;
  double gpu_ram = 1;  // of the smallest that runs; 0: auto
  std::string ram = "256MiB";
  std::string weights_home = "nvme";
  bool freezes = false;
  bool two_streams = false;
  bool spills = false;
  bool stays = false;  // on the device, and is updated there
  Built built = Built::kThere;
  bool resumes = false;  // after each step
};

void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }

zero3::ModelShape ShapeOf(const Recipe& recipe) {
  return {.kind = recipe.kind,
          .layers = 3,
          .hidden = 256,
          .heads = 4,
          .key_value_heads = recipe.kind == ModelKind::kLlama ? 2 : 4,
          .head_size = 64,
          .feed_forward = 512,
          .vocabulary = kVocabulary,
          .context = kLength,
          .tied_embedding = recipe.tied || recipe.kind == ModelKind::kGpt2};
}

std::shared_ptr<LanguageModel> MakeModelOf(const Recipe& recipe) {
  torch::manual_seed(11);
  std::shared_ptr<LanguageModel> model = examples::MakeModel(ShapeOf(recipe));
  model->to(recipe.dtype);
  int64_t number = 0;
  for (Tensor& parameter : model->parameters()) {
    if (recipe.freezes && ++number % 3 == 0) parameter.requires_grad_(false);
  }
  return model;
}

Options OptionsFor(const nn::Module& model, const Recipe& recipe) {
  Options options = PoolOptions(recipe.name, recipe.ram);
  options.weights_home = recipe.weights_home;
  options.spill_gradients = recipe.spills;
  if (recipe.stays) options.durability = "checkpoint:" + std::to_string(kInterval);
  if (recipe.built != Built::kThere) options.device = kDevice.str();
  if (recipe.gpu_ram > 0) {
    const zero3::GpuPlan plan =
        *zero3::MakeGpuPlan(zero3::GpuTensorsOf(TensorsOf(model)), uint64_t{1} << 40);
    options.gpu_ram = std::to_string(
        static_cast<uint64_t>(static_cast<double>(plan.floor_bytes) * recipe.gpu_ram));
  }
  return options;
}

// A model in the device's memory whose optimizer is the host's, over a copy of it there.
class Resident {
 public:
  Resident(LanguageModel& model, const Recipe& recipe)
      : model_(model), on_host_(MakeModelOf(recipe)) {
    SetOffloading(false);
    engine_ = Engine::Open(OptionsFor(*on_host_, {.name = recipe.name}));
    optimizer_ = engine_->AdamW(*on_host_, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  }

  void Step() {
    const at::NoGradGuard no_grad;
    ForEach([](Tensor& there, Tensor& here) {
      here.mutable_grad() = there.grad().defined() ? there.grad().cpu() : Tensor();
    });
    optimizer_->step();
    ForEach([](Tensor& there, Tensor& here) { there.copy_(here); });
  }
  // The trainer has written weights.
  void TakeWeights() {
    const at::NoGradGuard no_grad;
    ForEach([](Tensor& there, Tensor& here) {
      const Tensor written = there.cpu();
      if (!torch::equal(written, here)) here.copy_(written);
    });
  }
  Tensor Gather(size_t parameter, const std::string& plane) {
    return engine_->Gather(on_host_->parameters()[parameter], plane);
  }

 private:
  template <typename Do>
  void ForEach(const Do& act) {
    std::vector<Tensor> there = model_.parameters(), here = on_host_->parameters();
    for (size_t i = 0; i < there.size(); ++i) act(there[i], here[i]);
  }

  LanguageModel& model_;
  const std::shared_ptr<LanguageModel> on_host_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

class Training {
 public:
  Training(const Recipe& recipe, bool offloads) : recipe_(recipe), offloads_(offloads) {
    if (offloads) {
      Open();
      return;
    }
    model_ = MakeModelOf(recipe_);
    model_->to(kDevice);
    resident_.emplace(*model_, recipe_);
  }

  // With a model made anew: a job that exists has the weights.
  void Open() {
    SetOffloading(true);
    optimizer_.reset();
    engine_.reset();
    options_ = OptionsFor(*MakeModelOf(recipe_), recipe_);
    engine_ = Engine::Open(options_);
    if (recipe_.built == Built::kBorn) {
      const InitGuard guard(engine_);
      model_ = MakeModelOf(recipe_);
    } else {
      model_ = MakeModelOf(recipe_);
    }
    if (recipe_.built == Built::kThere) model_->to(kDevice);
    optimizer_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  }

  Tensor Tokens(int64_t number) const {
    torch::manual_seed(100 + number);
    return torch::randint(kVocabulary, {kRows, kLength}).to(kDevice);
  }
  Tensor Loss(int64_t number) {
    const Tensor tokens = Tokens(number);
    return NextTokenLoss(model_->forward(tokens.slice(1, 0, kLength - 1)), tokens);
  }

  void Step(int64_t step) {
    for (int64_t i = 0; i < kMicroBatches; ++i) {
      const Tensor loss = InStream([&] { return Loss(step * kMicroBatches + i) / kMicroBatches; });
      loss.backward();
      See(seen, "loss", loss);
    }
    if (step == 2) SeeGradients(seen, *model_, kDevice);
    See(seen, "norm", nn::utils::clip_grad_norm_(model_->parameters(), step % 2 == 0 ? 0.1 : 1e6));
    if (offloads_) {
      optimizer_->step();
    } else {
      resident_->Step();
    }
    if (step % 2 == 0) SeeGradients(seen, *model_, kDevice);
    model_->zero_grad(/*set_to_none=*/step % 2 == 0 || recipe_.two_streams);
    if (step == 1) Write();
    const at::NoGradGuard no_grad;
    See(seen, "evaluation", InStream([&] { return Loss(1000); }));
    // What was written after a step belongs to the next one.
    if (offloads_ && recipe_.resumes && step != 1) Open();
  }

  void Write() {
    WriteWeights(*model_);
    if (!offloads_) resident_->TakeWeights();
  }

  void SeeState() {
    size_t number = 0;
    for (const auto& item : model_->named_parameters()) {
      const size_t parameter = number++;
      See(seen, item.key() + " on the device", item.value() * 1);
      for (const char* plane : {"master", "exp_avg", "exp_avg_sq"}) {
        if (!item.value().requires_grad()) continue;
        See(seen, item.key() + " " + plane,
            offloads_ ? engine_->Gather(item.value(), plane) : resident_->Gather(parameter, plane));
      }
    }
  }

  void CheckBudgets() const {
    const Statistics statistics = engine_->statistics();
    EXPECT_LE(statistics.peak_bytes, statistics.budget_bytes);
    EXPECT_GT(statistics.gpu_peak_bytes, 0u);
    EXPECT_LE(statistics.gpu_peak_bytes, statistics.gpu_ram_bytes);
    EXPECT_EQ(engine_->plan().text.find("put into the job at checkpoints") != std::string::npos,
              recipe_.stays)
        << engine_->plan().text;
    EXPECT_EQ(engine_->plan().gradients_spilled, recipe_.spills);
  }

  Engine& engine() { return *engine_; }
  LanguageModel& model() { return *model_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  Seen seen;

 private:
  template <typename Work>
  Tensor InStream(const Work& work) {
    if (!recipe_.two_streams) return work();
    const c10::impl::VirtualGuardImpl guard(kDevice.type());
    return offload::InStream(guard.getStreamFromGlobalPool(kDevice, /*isHighPriority=*/false),
                             work);
  }

  const Recipe recipe_;
  const bool offloads_;
  std::shared_ptr<LanguageModel> model_;
  std::optional<Resident> resident_;
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

class CudaParityTest : public testing::TestWithParam<Recipe> {};

TEST_P(CudaParityTest, AttachedTrainingIsBitEqual) {
  REQUIRE_GPU();
  ExpectEqual(Train(GetParam(), /*offloads=*/false), Train(GetParam(), /*offloads=*/true));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, CudaParityTest,
    testing::Values(
        Recipe{.name = "llama"}, Recipe{.name = "llama_bf16", .dtype = at::kBFloat16},
        Recipe{.name = "llama_tied", .tied = true, .gpu_ram = 1.3},
        Recipe{
            .name = "llama_frozen_bf16", .dtype = at::kBFloat16, .gpu_ram = 1.5, .freezes = true},
        Recipe{.name = "llama_auto", .gpu_ram = 0, .weights_home = "auto"},
        Recipe{.name = "llama_auto_bf16",
               .dtype = at::kBFloat16,
               .gpu_ram = 0,
               .weights_home = "auto"},
        Recipe{.name = "llama_two_streams", .gpu_ram = 1.2, .two_streams = true},
        Recipe{.name = "llama_spilled", .spills = true},
        Recipe{.name = "llama_spilled_bf16", .dtype = at::kBFloat16, .gpu_ram = 2, .spills = true},
        Recipe{.name = "gpt2", .kind = ModelKind::kGpt2, .gpu_ram = 1.1},
        Recipe{.name = "gpt2_bf16_two_streams",
               .kind = ModelKind::kGpt2,
               .dtype = at::kBFloat16,
               .gpu_ram = 3,
               .two_streams = true},
        Recipe{.name = "llama_from_host", .built = Built::kOnHost},
        Recipe{.name = "llama_from_host_bf16", .dtype = at::kBFloat16, .built = Built::kOnHost},
        Recipe{.name = "llama_born", .built = Built::kBorn},
        Recipe{.name = "llama_stays", .gpu_ram = 0, .stays = true},
        Recipe{.name = "llama_stays_bf16", .dtype = at::kBFloat16, .gpu_ram = 0, .stays = true},
        Recipe{.name = "gpt2_stays_bf16",
               .kind = ModelKind::kGpt2,
               .dtype = at::kBFloat16,
               .gpu_ram = 0,
               .stays = true},
        Recipe{.name = "llama_resumes", .gpu_ram = 1.2, .resumes = true},
        Recipe{.name = "llama_resumes_bf16",
               .dtype = at::kBFloat16,
               .gpu_ram = 0,
               .built = Built::kOnHost,
               .resumes = true}),
    [](const testing::TestParamInfo<Recipe>& info) { return info.param.name; });

TEST(CudaAttachTest, TheHostWaitsForNothingInSteadyState) {
  REQUIRE_GPU();
  Training run({.name = "steady", .gpu_ram = 0, .weights_home = "auto"}, /*offloads=*/true);
  for (int64_t step = 0; step < 6; ++step) {
    const uint64_t before = run.engine().statistics().gpu_waits;
    for (int64_t i = 0; i < kMicroBatches; ++i) run.Loss(step * kMicroBatches + i).backward();
    if (step >= 2) {
      EXPECT_EQ(run.engine().statistics().gpu_waits, before) << step;
    }
    run.optimizer().step();
    run.optimizer().zero_grad();
  }
}

TEST(CudaAttachTest, WeightsGoToFilesAndComeBack) {
  REQUIRE_GPU();
  const std::string folder = Pool() + "/saved";
  Training run({.name = "files"}, /*offloads=*/true);
  run.Step(0);
  run.engine().SaveWeights(folder);
  const Seen saved = WeightsOf(run.model());
  run.Step(2);
  run.engine().LoadWeights(folder);
  ExpectEqual(saved, WeightsOf(run.model()));
}

TEST(CudaAttachTest, ThreadsShareTheWindow) {
  REQUIRE_GPU();
  Training run({.name = "threads"}, /*offloads=*/true);
  run.Step(0);
  std::vector<Tensor> inputs;
  for (int64_t i = 0; i < 2; ++i) inputs.push_back(run.Tokens(2000 + i).slice(1, 0, kLength - 1));
  ExpectThreadsSeeWhatOneSees(run.model(), inputs);
}

// ---- What is refused ----------------------------------------------------------------------------

TEST(CudaErrorTest, MoreThanTheDeviceHas) {
  REQUIRE_GPU();
  SetOffloading(true);
  const std::shared_ptr<LanguageModel> model = MakeModelOf({});
  model->to(kDevice);
  Options options = PoolOptions("too_much", "256MiB");
  // The window is as large as the weights at most, so that only a large model asks for so much.
  options.gpu_ram = "100";
  const auto engine = Engine::Open(options);
  ExpectError(2003, "Set gpu_ram to", [&] { engine->AdamW(*model, torch::optim::AdamWOptions()); });
}

TEST(CudaErrorTest, ADeviceThatIsNotThere) {
  REQUIRE_GPU();
  SetOffloading(true);
  const std::shared_ptr<LanguageModel> model = MakeModelOf({});
  Options options = PoolOptions("no_device", "256MiB");
  options.device = "cuda:63";
  ExpectError(2001, "cuda:63", [&] {
    const auto engine = Engine::Open(options);
    engine->AdamW(*model, torch::optim::AdamWOptions());
  });
}

TEST(CudaErrorTest, ARawPointerAndAMove) {
  REQUIRE_GPU();
  Training run({.name = "raw"}, /*offloads=*/true);
  const Tensor before = run.Loss(0);
  try {
    run.model().parameters()[0].data_ptr<float>();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("OFD-1603"));
  }
  ExpectError(1601, "cannot move", [&] { run.model().to(at::kCPU); });
  EXPECT_TRUE(torch::equal(run.Loss(0), before));
}

}  // namespace
}  // namespace offload

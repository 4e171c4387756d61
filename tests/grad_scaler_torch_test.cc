// Scaled losses: a program with GradScaler computes what one computes that calls torch's operators
// itself, in memory, offloaded, and over kills.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <gtest/gtest.h>
#include <offload/grad_scaler.h>
#include <offload/torch.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using torch::optim::Optimizer;
using OptimizerPointer = std::shared_ptr<Optimizer>;

constexpr int64_t kWidth = 200;

Tensor Numbers(int64_t seed, at::IntArrayRef sizes) {
  torch::manual_seed(4000 + seed);
  return torch::randn(sizes);
}

nn::Sequential MakeModel(at::ScalarType dtype) {
  torch::manual_seed(3);
  nn::Sequential model(nn::Linear(kWidth, 700), nn::Tanh(), nn::Linear(700, kWidth));
  model->to(dtype);
  return model;
}

// What torch.amp.GradScaler does, in torch's operators.
class Operators {
 public:
  explicit Operators(const GradScalerOptions& options)
      : options_(options),
        scale_(torch::full({}, options.init_scale, at::kFloat)),
        growth_tracker_(torch::zeros({}, at::kInt)) {}

  Tensor Scale(const Tensor& loss) const { return loss * scale_; }
  void Unscale(Optimizer& optimizer) {
    const at::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    for (const auto& group : optimizer.param_groups()) {
      for (const Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) gradients.push_back(parameter.grad());
      }
    }
    Tensor found = torch::zeros({});
    at::_amp_foreach_non_finite_check_and_unscale_(
        gradients, found, scale_.to(at::kDouble).reciprocal().to(at::kFloat));
    found_[&optimizer] = found;
  }
  bool Step(Optimizer& optimizer) {
    if (!found_.contains(&optimizer)) Unscale(optimizer);
    const bool takes = found_[&optimizer].item<float>() == 0;
    if (takes) optimizer.step();
    return takes;
  }
  void Update() {
    Tensor sum = torch::zeros({});
    for (const auto& [optimizer, found] : found_) sum += found;
    at::_amp_update_scale_(scale_, growth_tracker_, sum, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
    found_.clear();
  }
  double scale() const { return scale_.item<float>(); }
  int64_t growth_tracker() const { return growth_tracker_.item<int32_t>(); }

 private:
  const GradScalerOptions options_;
  Tensor scale_, growth_tracker_;
  std::unordered_map<const Optimizer*, Tensor> found_;
};

struct Recipe {
  std::string name;
  at::ScalarType dtype;
  std::function<OptimizerPointer(Engine&, nn::Module&)> optimizer;
  GradScalerOptions options = {.growth_interval = 3};
  std::set<int64_t> overflows = {2, 6};  // iterations whose loss is infinite
  bool clips = false, sets_to_none = true;
  int64_t micro_batches = 1;
};

enum class Moment { kNever, kAfterBackward, kAfterStep, kAfterUpdate };
struct Death {
  Moment moment = Moment::kNever;
  int64_t iteration = 0;
  bool waits = false;  // until what was stepped is durable
};

constexpr int64_t kIterations = 10;

// What the program sees in each iteration, and at last.
using Seen = std::vector<std::vector<Tensor>>;

template <class Scaler>
Seen Train(const Recipe& recipe, Engine& engine, nn::Sequential& model, Optimizer& optimizer,
           Scaler& scaler, const Death& death = {}) {
  const std::string state = engine.TrainerState();
  Seen seen(kIterations + 1);
  for (int64_t i = state.empty() ? 0 : std::stoll(state); i < kIterations; ++i) {
    const auto may_die = [&](Moment moment) {
      if (death.moment != moment || death.iteration != i) return;
      if (death.waits) engine.WaitDurable();
      kill(getpid(), SIGKILL);
    };
    for (int64_t part = 0; part < recipe.micro_batches; ++part) {
      const Tensor x = Numbers(i * 8 + part, {4, kWidth}).to(recipe.dtype);
      Tensor loss = (model->forward(x) - x).square().mean();
      if (recipe.overflows.contains(i) && part == 0)
        loss = loss * std::numeric_limits<double>::infinity();
      scaler.Scale(loss).backward();
      seen[i].push_back(loss.detach().clone());
    }
    may_die(Moment::kAfterBackward);
    if (recipe.clips) {
      scaler.Unscale(optimizer);
      seen[i].push_back(torch::tensor(nn::utils::clip_grad_norm_(model->parameters(), 0.05)));
    }
    engine.SetTrainerState(std::to_string(i + 1));
    seen[i].push_back(torch::tensor(scaler.Step(optimizer)));
    may_die(Moment::kAfterStep);
    scaler.Update();
    seen[i].push_back(torch::tensor(scaler.scale(), at::kDouble));
    seen[i].push_back(torch::tensor(scaler.growth_tracker()));
    may_die(Moment::kAfterUpdate);
    optimizer.zero_grad(recipe.sets_to_none);
  }
  for (const Tensor& parameter : model->parameters())
    seen.back().push_back(parameter.detach().clone());
  seen.back().push_back(torch::tensor(engine.step()));
  return seen;
}

Seen TrainWithScaler(const Recipe& recipe, const std::string& job, const std::string& ram,
                     const Death& death = {}) {
  nn::Sequential model = MakeModel(recipe.dtype);
  auto engine = Engine::Open(PoolOptions(job, ram));
  const OptimizerPointer optimizer = recipe.optimizer(*engine, *model);
  GradScaler scaler(*engine, recipe.options);
  return Train(recipe, *engine, model, *optimizer, scaler, death);
}

Seen TrainWithOperators(const Recipe& recipe) {
  SetOffloading(false);
  nn::Sequential model = MakeModel(recipe.dtype);
  auto engine = Engine::Open(PoolOptions("none", "1GiB"));
  const OptimizerPointer optimizer = recipe.optimizer(*engine, *model);
  Operators operators(recipe.options);
  return Train(recipe, *engine, model, *optimizer, operators);
}

std::string FloorOf(const Recipe& recipe) {
  SetOffloading(true);
  nn::Sequential model = MakeModel(recipe.dtype);
  auto engine = Engine::Open(PoolOptions(recipe.name + "_floor", "1GiB"));
  const OptimizerPointer optimizer = recipe.optimizer(*engine, *model);
  return std::to_string(engine->plan().floor_bytes);
}

bool IsSame(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
         torch::equal(a.to(at::kDouble).nan_to_num(7.25, 1e300, -1e300),
                      b.to(at::kDouble).nan_to_num(7.25, 1e300, -1e300));
}

// `actual` may begin later.
void ExpectSame(const Seen& expected, const Seen& actual, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i].empty() && i < kIterations) continue;
    ASSERT_EQ(expected[i].size(), actual[i].size()) << what << ", iteration " << i;
    for (size_t k = 0; k < expected[i].size(); ++k) {
      ASSERT_TRUE(IsSame(expected[i][k], actual[i][k]))
          << what << ": number " << k << " of iteration " << i << " differs";
    }
  }
  EXPECT_FALSE(actual[kIterations - 1].empty()) << what;
}

OptimizerPointer FusedAdamW(Engine& engine, nn::Module& module) {
  return engine.AdamW(module, torch::optim::AdamWOptions(1e-2), AdamWFlavour::kFused);
}
OptimizerPointer Sgd(Engine& engine, nn::Module& module) {
  return engine.SGD(module, torch::optim::SGDOptions(0.5).momentum(0.9).nesterov(true));
}
template <class Class, class ItsOptions>
OptimizerPointer OwnOf(Engine& engine, nn::Module& module, const ItsOptions& options) {
  auto own = std::make_shared<Class>(module.parameters(), options);
  engine.Attach(module, *own);
  return own;
}
OptimizerPointer OwnAdam(Engine& engine, nn::Module& module) {
  return OwnOf<torch::optim::Adam>(engine, module, torch::optim::AdamOptions(1e-2));
}
OptimizerPointer OwnSgd(Engine& engine, nn::Module& module) {
  return OwnOf<torch::optim::SGD>(engine, module, torch::optim::SGDOptions(0.5).momentum(0.9));
}

class GradScalerTest : public testing::TestWithParam<Recipe> {};

TEST_P(GradScalerTest, ComputesWhatTorchsOperatorsDo) {
  const Recipe& recipe = GetParam();
  const Seen expected = TrainWithOperators(recipe);
  const auto steps = expected.back().back().item<int64_t>();
  EXPECT_TRUE(steps > 2 && steps < kIterations) << steps << " steps were taken";
  ExpectSame(expected, TrainWithScaler(recipe, "none", "1GiB"), "in memory");
  const std::string floor = FloorOf(recipe);
  ExpectSame(expected, TrainWithScaler(recipe, recipe.name + "_tight", floor), "at the floor");
  ExpectSame(expected, TrainWithScaler(recipe, recipe.name, "256MiB"), "with plenty");
}

TEST_P(GradScalerTest, ARunThatWasKilledGoesOnWithItsScale) {
  const Recipe& recipe = GetParam();
  const Seen expected = TrainWithOperators(recipe);
  const std::string floor = FloorOf(recipe);
  int deaths = 0;
  for (const Death& death :
       {Death{Moment::kAfterStep, 1, true}, Death{Moment::kAfterUpdate, 2, false},
        Death{Moment::kAfterStep, 3, false}, Death{Moment::kAfterBackward, 5, true},
        Death{Moment::kAfterStep, 6, true}, Death{Moment::kAfterUpdate, 8, true}}) {
    SCOPED_TRACE(testing::Message() << "killed in iteration " << death.iteration);
    const std::string job = recipe.name + "_killed" + std::to_string(deaths++);
    SetOffloading(true);
    const pid_t child = fork();
    if (child == 0) {
      TrainWithScaler(recipe, job, floor, death);
      _exit(1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    const Seen resumed = TrainWithScaler(recipe, job, floor);
    // Where the first steps are skipped there is nothing to go on from.
    if (!recipe.overflows.empty()) {
      EXPECT_TRUE(resumed[0].empty()) << "it began anew";
    }
    ExpectSame(expected, resumed, "resumed");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, GradScalerTest,
    testing::Values(
        Recipe{.name = "half_adamw", .dtype = at::kHalf, .optimizer = FusedAdamW},
        // The scale comes down from where every gradient overflows.
        Recipe{.name = "half_sgd_clipped",
               .dtype = at::kHalf,
               .optimizer = Sgd,
               .options = {.init_scale = 0x1p20, .growth_interval = 2},
               .overflows = {},
               .clips = true,
               .micro_batches = 2},
        Recipe{.name = "half_own_adam",
               .dtype = at::kHalf,
               .optimizer = OwnAdam,
               .sets_to_none = false},
        Recipe{.name = "float_own_sgd", .dtype = at::kFloat, .optimizer = OwnSgd, .clips = true},
        Recipe{.name = "brain_adamw", .dtype = at::kBFloat16, .optimizer = FusedAdamW},
        Recipe{.name = "double_adamw",
               .dtype = at::kDouble,
               .optimizer = FusedAdamW,
               .options = {.init_scale = 3,
                           .growth_factor = 1.5,
                           .backoff_factor = 0.3,
                           .growth_interval = 1},
               .clips = true,
               .micro_batches = 2}),
    [](const auto& info) { return info.param.name; });

// One that overflows is skipped, the others step; the scale is of all of them.
template <class Scaler>
std::vector<Tensor> TrainTwo(Scaler& scaler, std::vector<nn::Sequential>& models,
                             const std::vector<OptimizerPointer>& optimizers) {
  std::vector<Tensor> seen;
  for (int64_t i = 0; i < 5; ++i) {
    for (size_t of = 0; of < 2; ++of) {
      const Tensor x = Numbers(i * 2 + static_cast<int64_t>(of), {3, kWidth}).to(at::kHalf);
      Tensor loss = models[of]->forward(x).square().mean();
      if (i == 1 && of == 1) loss = loss * std::numeric_limits<double>::infinity();
      scaler.Scale(loss).backward();
      seen.push_back(loss.detach().clone());
    }
    for (const OptimizerPointer& optimizer : optimizers)
      seen.push_back(torch::tensor(scaler.Step(*optimizer)));
    scaler.Update();
    seen.push_back(torch::tensor(scaler.scale()));
    for (const OptimizerPointer& optimizer : optimizers) optimizer->zero_grad();
  }
  for (const nn::Sequential& model : models) {
    for (const Tensor& parameter : model->parameters()) seen.push_back(parameter.detach().clone());
  }
  return seen;
}

TEST(TwoOptimizersTest, OneIsSkippedAndTheScaleIsOfBoth) {
  std::vector<std::vector<Tensor>> results;
  for (const int run : {0, 1, 2}) {
    SetOffloading(run == 2);
    std::vector<nn::Sequential> models = {MakeModel(at::kHalf), MakeModel(at::kHalf)};
    auto engine = Engine::Open(PoolOptions("two", "256MiB"));
    std::vector<OptimizerPointer> optimizers;
    for (nn::Sequential& model : models) optimizers.push_back(Sgd(*engine, *model));
    const GradScalerOptions options = {.init_scale = 1024, .growth_interval = 2};
    if (run == 0) {
      Operators operators(options);
      results.push_back(TrainTwo(operators, models, optimizers));
    } else {
      GradScaler scaler(*engine, options);
      results.push_back(TrainTwo(scaler, models, optimizers));
    }
    EXPECT_EQ(engine->step(), 9);
  }
  for (const int run : {1, 2}) {
    ASSERT_EQ(results[0].size(), results[run].size());
    for (size_t i = 0; i < results[0].size(); ++i)
      ASSERT_TRUE(IsSame(results[0][i], results[run][i])) << "run " << run << ", number " << i;
  }
}

TEST(ScalersOfAJobTest, EachGoesOnWithItsOwnAndANewOneBegins) {
  SetOffloading(true);
  for (const int run : {0, 1}) {
    nn::Sequential model = MakeModel(at::kHalf);
    auto engine = Engine::Open(PoolOptions("scalers", "256MiB"));
    const OptimizerPointer optimizer = Sgd(*engine, *model);
    GradScaler first(*engine, {.init_scale = 64}), second(*engine, {.init_scale = 32});
    EXPECT_EQ(first.scale(), run == 0 ? 64 : 17);
    EXPECT_EQ(second.scale(), 32);
    EXPECT_EQ(second.growth_tracker(), run);
    if (run == 1) {
      EXPECT_EQ(GradScaler(*engine, {.init_scale = 8}).scale(), 8);
      return;
    }
    first.Update(17);
    second.Scale(model->forward(Numbers(1, {2, kWidth}).to(at::kHalf)).mean()).backward();
    EXPECT_TRUE(second.Step(*optimizer));
  }
}

TEST(ScalerErrorsTest, CallsOutOfOrderAreRefused) {
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    nn::Sequential model = MakeModel(at::kHalf);
    auto engine = Engine::Open(PoolOptions("order", "256MiB"));
    const OptimizerPointer optimizer = Sgd(*engine, *model);
    ExpectError(1002, "growth_factor", [&] { GradScaler(*engine, {.growth_factor = 1}); });
    ExpectError(1002, "backoff_factor", [&] { GradScaler(*engine, {.backoff_factor = 1}); });
    GradScaler scaler(*engine);
    ExpectError(1002, "nothing to go by", [&] { scaler.Update(); });
    ExpectError(1002, "has a gradient", [&] { scaler.Step(*optimizer); });
    scaler.Update(128);
    scaler.Scale(model->forward(Numbers(1, {2, kWidth}).to(at::kHalf)).mean()).backward();
    scaler.Unscale(*optimizer);
    ExpectError(1002, "Unscale() was called", [&] { scaler.Unscale(*optimizer); });
    EXPECT_TRUE(scaler.Step(*optimizer));
    ExpectError(1002, "after Step()", [&] { scaler.Unscale(*optimizer); });
    ExpectError(1002, "Step() was called", [&] { scaler.Step(*optimizer); });
    scaler.Update();
    EXPECT_EQ(scaler.scale(), 128);
    EXPECT_EQ(scaler.growth_tracker(), 1);
    EXPECT_EQ(engine->step(), 1);
  }
}

TEST(ScalerErrorsTest, OneThatIsNotEnabledStepsAndDoesNothingElse) {
  SetOffloading(false);
  nn::Sequential model = MakeModel(at::kFloat);
  auto engine = Engine::Open(PoolOptions("disabled", "256MiB"));
  const OptimizerPointer optimizer = Sgd(*engine, *model);
  GradScaler scaler(*engine, {.enabled = false});
  const Tensor loss = model->forward(Numbers(1, {2, kWidth})).mean();
  EXPECT_TRUE(scaler.Scale(loss).is_same(loss));
  loss.backward();
  scaler.Unscale(*optimizer);
  EXPECT_TRUE(scaler.Step(*optimizer));
  scaler.Update();
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_EQ(engine->step(), 1);
}

}  // namespace
}  // namespace offload

// Every optimizer in its forms: the kernels beside the trainer in memory, which runs torch's own
// operators, and those that torch does not have beside the definition of their authors, over 100
// steps; and the same through the daemon. The same bits.
#include <offload/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/update.h"
#include "zero3/torch/in_memory.h"
#include "zero3/torch/square_roots.h"

namespace offload {
namespace {

using kernels::OptimizerSpec;
using torch::Tensor;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// What an optimizer is that torch does not have, by torch's operators; `step` counts from 1.
using Definition = void (*)(const OptimizerSpec& spec, int64_t step, const Tensor& gradient,
                            Tensor& master, std::array<Tensor, kernels::kStatePlanesMax>& planes);

// The PyTorch program of the authors.
void DefineLion(const OptimizerSpec& spec, int64_t, const Tensor& gradient, Tensor& master,
                std::array<Tensor, kernels::kStatePlanesMax>& planes) {
  const double lr = spec.Get("lr"), beta1 = spec.Get("beta1"), beta2 = spec.Get("beta2");
  Tensor& exp_avg = planes[0];
  master.mul_(1 - lr * spec.Get("weight_decay"));
  const Tensor update = exp_avg * beta1 + gradient * (1 - beta1);
  master.add_(update.sign(), -lr);
  exp_avg.mul_(beta2).add_(gradient, 1 - beta2);
}

// The vector library behind sqrt() is off by one in the last place for some numbers. A double has
// more than twice the digits, so rounding twice changes nothing. Of doubles one by one, which asks
// the processor.
Tensor NearestRoot(const Tensor& values) {
  if (values.scalar_type() != at::kDouble)
    return values.to(at::kDouble).sqrt_().to(values.scalar_type());
  Tensor roots = values.clone();
  double* const data = roots.mutable_data_ptr<double>();
  for (int64_t i = 0; i < roots.numel(); ++i) data[i] = std::sqrt(data[i]);
  return roots;
}

// The sum of squares in the order that kernels::Norms has: eight lanes through a block, pairwise.
double NormOf(const Tensor& values) {
  const Tensor wide = values.to(at::kDouble).contiguous();
  const double* const data = wide.const_data_ptr<double>();
  double sum = 0;
  for (int64_t begin = 0; begin < wide.numel(); begin += 256 * 1024) {
    double lane[8] = {};
    const int64_t end = std::min<int64_t>(begin + 256 * 1024, wide.numel());
    for (int64_t i = begin; i < end; ++i) lane[i % 8] += data[i] * data[i];
    sum +=
        ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  }
  return std::sqrt(sum);
}

// Algorithm 2 of the paper.
void DefineLamb(const OptimizerSpec& spec, int64_t step, const Tensor& gradient, Tensor& master,
                std::array<Tensor, kernels::kStatePlanesMax>& planes) {
  const double beta1 = spec.Get("beta1"), beta2 = spec.Get("beta2");
  const double weight_decay = spec.Get("weight_decay"), count = static_cast<double>(step);
  auto& [exp_avg, exp_avg_sq, unused] = planes;
  exp_avg.mul_(beta1).add_(gradient, 1 - beta1);
  exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const Tensor denominator =
      NearestRoot(exp_avg_sq).div_(std::sqrt(1 - std::pow(beta2, count))).add_(spec.Get("eps"));
  Tensor update = (exp_avg * (1 / (1 - std::pow(beta1, count)))).div_(denominator);
  if (weight_decay != 0) update.add_(master, weight_decay);
  const double weight_norm = NormOf(master), update_norm = NormOf(update);
  const double ratio = weight_norm > 0 && update_norm > 0 ? weight_norm / update_norm : 1;
  master.add_(update, -(spec.Get("lr") * ratio));
}

Definition DefinitionOf(const OptimizerSpec& spec) {
  if (spec.name() == "lion") return DefineLion;
  return spec.name() == "lamb" ? DefineLamb : nullptr;
}

struct Case {
  const char* name;
  OptimizerSpec spec;
  std::function<OptimizerPointer(torch::nn::Module&)> in_memory;
  std::function<OptimizerPointer(Engine&, torch::nn::Module&)> offloaded;
  std::vector<const char*> planes;  // their names
};

template <class Options>
Case MakeCase(const char* name, OptimizerSpec spec, Options options,
              OptimizerPointer (*in_memory)(torch::nn::Module&, Options),
              OptimizerPointer (Engine::*offloaded)(torch::nn::Module&, Options),
              std::vector<const char*> planes) {
  return {name, spec, [=](torch::nn::Module& module) { return in_memory(module, options); },
          [=](Engine& engine, torch::nn::Module& module) {
            return (engine.*offloaded)(module, options);
          },
          std::move(planes)};
}
// Those of the Adam family, in the flavour of the spec.
template <class Options>
Case MakeCase(const char* name, OptimizerSpec spec, Options options,
              OptimizerPointer (*in_memory)(torch::nn::Module&, Options, AdamWFlavour),
              OptimizerPointer (Engine::*offloaded)(torch::nn::Module&, Options, AdamWFlavour),
              std::vector<const char*> planes) {
  const auto flavour = static_cast<AdamWFlavour>(static_cast<int>(spec.Get("flavour")));
  return {name, spec,
          [=](torch::nn::Module& module) { return in_memory(module, options, flavour); },
          [=](Engine& engine, torch::nn::Module& module) {
            return (engine.*offloaded)(module, options, flavour);
          },
          std::move(planes)};
}

std::vector<Case> Cases() {
  return {
      MakeCase("adamw", OptimizerSpec("adamw", {{"lr", 1e-2}, {"weight_decay", 0.1}}),
               torch::optim::AdamWOptions(1e-2).weight_decay(0.1), InMemoryAdamW, &Engine::AdamW,
               {"exp_avg", "exp_avg_sq"}),
      MakeCase("amsgrad", OptimizerSpec("adamw", {{"lr", 1e-2}, {"amsgrad", 1}}),
               torch::optim::AdamWOptions(1e-2).amsgrad(true), InMemoryAdamW, &Engine::AdamW,
               {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
      MakeCase("adamw_of_python", OptimizerSpec("adamw", {{"lr", 1e-2}, {"flavour", 1}}),
               torch::optim::AdamWOptions(1e-2), InMemoryAdamW, &Engine::AdamW,
               {"exp_avg", "exp_avg_sq"}),
      MakeCase("adamw_of_cpp", OptimizerSpec("adamw", {{"lr", 1e-2}, {"flavour", 2}}),
               torch::optim::AdamWOptions(1e-2), InMemoryAdamW, &Engine::AdamW,
               {"exp_avg", "exp_avg_sq"}),
      MakeCase("sgd", OptimizerSpec("sgd", {{"lr", 1e-2}, {"weight_decay", 0.1}}),
               torch::optim::SGDOptions(1e-2).weight_decay(0.1), InMemorySGD, &Engine::SGD, {}),
      MakeCase("momentum",
               OptimizerSpec("sgd", {{"lr", 1e-2}, {"momentum", 0.9}, {"dampening", 0.1}}),
               torch::optim::SGDOptions(1e-2).momentum(0.9).dampening(0.1), InMemorySGD,
               &Engine::SGD, {"momentum_buffer"}),
      MakeCase("nesterov", OptimizerSpec("sgd", {{"lr", 1e-2}, {"momentum", 0.9}, {"nesterov", 1}}),
               torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true), InMemorySGD,
               &Engine::SGD, {"momentum_buffer"}),
      MakeCase("adam", OptimizerSpec("adam", {{"lr", 1e-2}}), torch::optim::AdamOptions(1e-2),
               InMemoryAdam, &Engine::Adam, {"exp_avg", "exp_avg_sq"}),
      MakeCase("adam_l2_amsgrad",
               OptimizerSpec("adam", {{"lr", 1e-2}, {"weight_decay", 0.1}, {"amsgrad", 1}}),
               torch::optim::AdamOptions(1e-2).weight_decay(0.1).amsgrad(true), InMemoryAdam,
               &Engine::Adam, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
      MakeCase("adam_l2_amsgrad_of_python",
               OptimizerSpec("adam",
                             {{"lr", 1e-2}, {"weight_decay", 0.1}, {"amsgrad", 1}, {"flavour", 1}}),
               torch::optim::AdamOptions(1e-2).weight_decay(0.1).amsgrad(true), InMemoryAdam,
               &Engine::Adam, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
      MakeCase("adam_of_cpp", OptimizerSpec("adam", {{"lr", 1e-2}, {"flavour", 2}}),
               torch::optim::AdamOptions(1e-2), InMemoryAdam, &Engine::Adam,
               {"exp_avg", "exp_avg_sq"}),
      MakeCase("adagrad", OptimizerSpec("adagrad", {{"fused", 0}}),
               torch::optim::AdagradOptions(1e-2), InMemoryAdagrad, &Engine::Adagrad, {"sum"}),
      MakeCase("adagrad_in_full",
               OptimizerSpec("adagrad", {{"lr_decay", 0.01},
                                         {"weight_decay", 0.1},
                                         {"initial_accumulator_value", 0.25},
                                         {"fused", 0}}),
               torch::optim::AdagradOptions(1e-2)
                   .lr_decay(0.01)
                   .weight_decay(0.1)
                   .initial_accumulator_value(0.25),
               InMemoryAdagrad, &Engine::Adagrad, {"sum"}),
      MakeCase("rmsprop", OptimizerSpec("rmsprop"), torch::optim::RMSpropOptions(1e-2),
               InMemoryRMSprop, &Engine::RMSprop, {"square_avg"}),
      MakeCase("rmsprop_centered",
               OptimizerSpec("rmsprop", {{"alpha", 0.4}, {"centered", 1}, {"lerp", 0}}),
               torch::optim::RMSpropOptions(1e-2).alpha(0.4).centered(true), InMemoryRMSprop,
               &Engine::RMSprop, {"square_avg", "grad_avg"}),
      MakeCase("rmsprop_momentum", OptimizerSpec("rmsprop", {{"momentum", 0.9}}),
               torch::optim::RMSpropOptions(1e-2).momentum(0.9), InMemoryRMSprop, &Engine::RMSprop,
               {"square_avg", "momentum_buffer"}),
      MakeCase(
          "rmsprop_in_full",
          OptimizerSpec("rmsprop",
                        {{"momentum", 0.9}, {"centered", 1}, {"weight_decay", 0.1}, {"lerp", 0}}),
          torch::optim::RMSpropOptions(1e-2).momentum(0.9).centered(true).weight_decay(0.1),
          InMemoryRMSprop, &Engine::RMSprop, {"square_avg", "momentum_buffer", "grad_avg"}),
      MakeCase("lion", OptimizerSpec("lion"), LionOptions(), InMemoryLion, &Engine::Lion,
               {"exp_avg"}),
      MakeCase("lion_in_full",
               OptimizerSpec("lion", {{"lr", 1e-3}, {"beta1", 0.95}, {"weight_decay", 0.1}}),
               LionOptions(1e-3).betas({0.95, 0.99}).weight_decay(0.1), InMemoryLion, &Engine::Lion,
               {"exp_avg"}),
      MakeCase("lamb", OptimizerSpec("lamb"), LAMBOptions(), InMemoryLAMB, &Engine::LAMB,
               {"exp_avg", "exp_avg_sq"}),
      MakeCase("lamb_in_full",
               OptimizerSpec("lamb", {{"lr", 0.01}, {"beta1", 0.95}, {"weight_decay", 0.1}}),
               LAMBOptions(0.01).betas({0.95, 0.999}).weight_decay(0.1), InMemoryLAMB,
               &Engine::LAMB, {"exp_avg", "exp_avg_sq"}),
  };
}

class OptimizersTest : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(All, OptimizersTest, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.name);
                         });

// ---- The kernels -------------------------------------------------------------------------------

struct OneParameter : torch::nn::Module {
  explicit OneParameter(const Tensor& start) {
    weight = register_parameter("weight", start.clone());
  }
  Tensor weight;
};

const at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
at::ScalarType MasterTypeOf(const Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

kernels::Dtype DtypeOf(const Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kBFloat16:
      return kernels::Dtype::kBFloat16;
    case at::kHalf:
      return kernels::Dtype::kFloat16;
    case at::kDouble:
      return kernels::Dtype::kFloat64;
    default:
      return kernels::Dtype::kFloat32;
  }
}

// The tensor under the kernels: fp32, fp64, bf16 as two halves and tie bits, or fp16 and the rest.
struct Offloaded {
  explicit Offloaded(const Tensor& start) : weight(start.clone()) {
    const size_t count = weight.numel();
    if (weight.scalar_type() == at::kBFloat16) {
      residual.resize(count);
      ties.resize(count / 8 + 1);
    }
    if (weight.scalar_type() == at::kHalf) half_residual.resize(count);
    for (Tensor& plane : state) plane = torch::zeros({weight.numel()}, MasterTypeOf(weight));
  }

  // In pieces, as extents and tiles cut a tensor.
  void Update(const OptimizerSpec& optimizer, int64_t step, const Tensor& gradient) {
    double trust_ratio = 1;
    if (kernels::NeedsNorms(optimizer)) {
      constexpr uint64_t kBlock = kernels::Norms::kBlockElements;
      std::vector<kernels::Norms> blocks(weight.numel() / kBlock + 1);
      ForEachPiece(gradient, [&](const kernels::Run& run) {
        kernels::AddNorms(optimizer, step, run, &blocks[run.begin / kBlock]);
      });
      trust_ratio = kernels::TrustRatio(blocks);
    }
    std::vector<uint8_t> new_ties(ties.size());
    kernels::TieWriter writer{new_ties.data()};
    ForEachPiece(gradient, [&](kernels::Run run) {
      run.ties_out = &writer;
      run.trust_ratio = trust_ratio;
      run.roots = zero3::TorchSquareRoots().corrections();
      kernels::Update(optimizer, step, run);
    });
    ties = new_ties;
  }

  // Pieces end at multiples of a tile, whose size is odd so that most begin within a vector, and of
  // a block.
  void ForEachPiece(const Tensor& gradient, const std::function<void(const kernels::Run&)>& visit) {
    kernels::TieReader reader{ties.data()};
    kernels::TieWriter unused{};
    const kernels::Dtype dtype = DtypeOf(weight);
    const int64_t count = weight.numel(), block = kernels::Norms::kBlockElements, tile = 100003;
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      end = std::min({count, (begin / block + 1) * block, (begin / tile + 1) * tile});
      kernels::Run run;
      run.count = end - begin;
      run.begin = begin;
      run.tensor_count = count;
      run.weight_dtype = run.gradient_dtype = dtype;
      run.weight = static_cast<char*>(weight.data_ptr()) + begin * weight.element_size();
      run.gradient =
          static_cast<const char*>(gradient.const_data_ptr()) + begin * gradient.element_size();
      run.residual = residual.empty() ? nullptr : residual.data() + begin;
      run.half_residual = half_residual.empty() ? nullptr : half_residual.data() + begin;
      run.ties_in = &reader;
      run.ties_out = &unused;
      for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
        if (dtype == kernels::Dtype::kFloat64) {
          run.double_state[i] = state[i].data_ptr<double>() + begin;
        } else {
          run.state[i] = state[i].data_ptr<float>() + begin;
        }
      }
      visit(run);
    }
  }

  Tensor weight, state[kernels::kStatePlanesMax];
  std::vector<int16_t> residual;
  std::vector<uint32_t> half_residual;
  std::vector<uint8_t> ties;
};

// In fp64 the roots of torch's vector library follow no rule: the daemon does without them.
bool IsServed(const Case& one, at::ScalarType dtype) {
  return dtype != at::kDouble || !one.spec.TakesLibraryRoots() ||
         zero3::TorchDoubleRootsAreNearest();
}

// The definition, on a master and planes of its own.
struct Defined {
  explicit Defined(const Tensor& start) : dtype(start.scalar_type()) {
    master = start.to(MasterTypeOf(start), /*non_blocking=*/false, /*copy=*/true);
    for (Tensor& plane : planes) plane = torch::zeros_like(master);
  }
  Tensor weight() const { return master.to(dtype); }

  at::ScalarType dtype;
  Tensor master;
  std::array<Tensor, kernels::kStatePlanesMax> planes;
};

void ExpectSameBits(const Case& one, int64_t count, at::ScalarType dtype, int64_t steps) {
  const Tensor start = (torch::randn({count}, at::kDouble) * 0.02).to(dtype);
  OneParameter model(start);
  Offloaded ours(start);
  Defined defined(start);
  const Definition define = DefinitionOf(one.spec);
  const OptimizerPointer pointer = one.in_memory(model);
  const auto& in_memory = dynamic_cast<const zero3::InMemoryOptimizer&>(*pointer);
  for (int64_t step = 1; step <= steps; ++step) {
    const Tensor gradient = (torch::randn({count}, at::kDouble) * 0.01).to(dtype);
    model.weight.mutable_grad() = gradient;
    ours.Update(one.spec, step, gradient);
    pointer->step();
    if (define != nullptr) {
      define(one.spec, step, gradient.to(defined.master.scalar_type()), defined.master,
             defined.planes);
      ASSERT_TRUE(SameBits(ours.weight, defined.weight())) << count << " elements, step " << step;
    }
    ASSERT_TRUE(SameBits(ours.weight, model.weight.detach()))
        << count << " elements, step " << step;
    for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
      if (one.spec.Plane(i) == nullptr) continue;
      const auto where = [&] {
        return absl::StrCat(one.spec.Plane(i)->name, ", ", count, " elements, step ", step);
      };
      ASSERT_TRUE(SameBits(ours.state[i], in_memory.StateOf(model.weight)->planes[i])) << where();
      ASSERT_TRUE(define == nullptr || SameBits(ours.state[i], defined.planes[i])) << where();
    }
  }
}

TEST_P(OptimizersTest, TheKernelIsTorchsArithmeticBitForBitOverAHundredSteps) {
  torch::manual_seed(17);
  for (const at::ScalarType dtype : kDtypes) {
    if (!IsServed(GetParam(), dtype)) continue;
    for (const int64_t count : {1, 5, 8, 23, 4099}) ExpectSameBits(GetParam(), count, dtype, 100);
    ExpectSameBits(GetParam(), 300007, dtype, 3);
  }
}

// ---- Through the daemon ------------------------------------------------------------------------

// Two extents, two bundles and a frozen tensor.
struct Model : torch::nn::Module {
  explicit Model(at::ScalarType dtype) {
    torch::manual_seed(4);
    big = register_parameter("big", (torch::randn({300, 1001}, at::kDouble) * 0.02).to(dtype));
    small = register_parameter("small", torch::randn({333}, at::kDouble).to(dtype));
    other = register_parameter("other", torch::randn({41000}, at::kDouble).to(dtype));
    frozen = register_parameter("frozen", torch::ones({35000}).to(dtype), /*requires_grad=*/false);
  }
  Tensor Loss(int64_t step) const {
    torch::manual_seed(static_cast<uint64_t>(step));
    Tensor loss = torch::zeros({});
    for (const Tensor& parameter : {big, small, other})
      loss = loss +
             (torch::randn(parameter.sizes()) * parameter.to(MasterTypeOf(parameter))).sin().sum();
    return loss + frozen.sum().to(at::kFloat);
  }
  Tensor big, small, other, frozen;
};

std::shared_ptr<Engine> OpenEngine(bool offload, const std::string& job) {
  setenv("OFFLOADD_DISABLE", offload ? "0" : "1", 1);
  Options options;
  options.nvme_path = getenv("TEST_TMPDIR");
  options.ram = "128MiB";
  options.job = job;
  return Engine::Open(options);
}

using MakeOptimizer = std::function<OptimizerPointer(Engine&, Model&)>;

void TakeSteps(torch::optim::Optimizer& optimizer, Model& model, int64_t begin, int64_t end) {
  for (int64_t step = begin; step < end; ++step) {
    model.Loss(step).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

std::vector<Tensor> StateOf(Engine& engine, const Model& model,
                            const std::vector<const char*>& planes) {
  std::vector<Tensor> state;
  for (const Tensor& parameter : {model.big, model.small, model.other}) {
    state.push_back(engine.Gather(parameter, "weight"));
    state.push_back(engine.Gather(parameter, "master"));
    for (const char* plane : planes) state.push_back(engine.Gather(parameter, plane));
  }
  return state;
}

// Four steps in memory, and two and two through the daemon with a new start in between.
void ExpectParity(const std::string& job, at::ScalarType dtype, const MakeOptimizer& make,
                  const std::vector<const char*>& planes) {
  Model reference(dtype);
  const auto in_memory = OpenEngine(/*offload=*/false, job);
  const OptimizerPointer reference_optimizer = make(*in_memory, reference);
  TakeSteps(*reference_optimizer, reference, 0, 4);
  const std::vector<Tensor> expected = StateOf(*in_memory, reference, planes);

  std::vector<Tensor> found;
  for (const int64_t begin : {0, 2}) {
    Model model(dtype);
    auto engine = OpenEngine(/*offload=*/true, job);
    OptimizerPointer optimizer = make(*engine, model);
    ASSERT_EQ(engine->step(), begin);
    TakeSteps(*optimizer, model, begin, begin + 2);
    found = StateOf(*engine, model, planes);
    optimizer.reset();
  }
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(SameBits(found[i], expected[i])) << i;
}

TEST_P(OptimizersTest, OffloadedTrainingIsBitEqualAcrossARestart) {
  for (const at::ScalarType dtype : kDtypes) {
    if (!IsServed(GetParam(), dtype)) continue;
    ExpectParity(std::string(GetParam().name) + "-" + c10::toString(dtype), dtype,
                 GetParam().offloaded, GetParam().planes);
  }
}

TEST(OptimizerGroupsTest, AGroupMayKeepMoreThanTheDefaults) {
  const MakeOptimizer make = [](Engine& engine, Model& model) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{model.big});
    groups.emplace_back(
        std::vector<Tensor>{model.small, model.other},
        std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.05).momentum(0.9)));
    return engine.SGD(model, std::move(groups), torch::optim::SGDOptions(0.01));
  };
  ExpectParity("groups", at::kBFloat16, make, {"momentum_buffer"});
}

int ErrorOf(const std::function<void()>& call, const std::string& text) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    return error.id();
  }
  return 0;
}

TEST(OptimizerErrorsTest, OptionsThatNeedMoreStateThanTheJobKeepsAreRefusedAtTheStep) {
  Model model(at::kFloat);
  auto engine = OpenEngine(/*offload=*/true, "more");
  OptimizerPointer optimizer = engine->SGD(model, torch::optim::SGDOptions(0.1));
  model.Loss(0).backward();
  auto& options = static_cast<torch::optim::SGDOptions&>(optimizer->param_groups()[0].options());
  options.momentum(0.9);
  EXPECT_EQ(ErrorOf([&] { optimizer->step(); }, "momentum_buffer"), 1604);
  options.momentum(0).lr(std::nan(""));
  EXPECT_EQ(ErrorOf([&] { optimizer->step(); }, "sgd with lr nan, which has to be a finite number"),
            1002);
  options.lr(0.1);
  optimizer->step();
  EXPECT_EQ(engine->step(), 1);
}

TEST(OptimizerErrorsTest, NegativeRatesAreThoseOfLaterOnly) {
  Model model(at::kFloat);
  auto engine = OpenEngine(/*offload=*/true, "rates");
  EXPECT_EQ(
      ErrorOf(
          [&] { engine->SGD(model, torch::optim::SGDOptions(-1)); },
          "sgd with lr -1, which has to be a finite number, not less than 0. Make it with others"),
      1002);
}

TEST(OptimizerErrorsTest, RootsOfFp64ThatFollowNoRuleAreRefusedAtTheAttach) {
  if (zero3::TorchDoubleRootsAreNearest()) GTEST_SKIP() << "they are the nearest";
  Model model(at::kDouble);
  auto engine = OpenEngine(/*offload=*/true, "roots");
  EXPECT_EQ(ErrorOf([&] { engine->AdamW(model, torch::optim::AdamWOptions(0.1)); },
                    "parameter 'big' has dtype Double"),
            1604);
}

TEST(OptimizerErrorsTest, ObjectsOfTorchThatTakeThemRunInThisProcess) {
  std::vector<std::vector<Tensor>> results;
  for (const int run : {0, 1, 2}) {  // plain torch, attached in memory, offloaded
    Model model(at::kDouble);
    std::shared_ptr<Engine> engine;
    torch::optim::AdamW own(model.parameters(), torch::optim::AdamWOptions(0.1).amsgrad(true));
    if (run > 0) {
      engine = OpenEngine(/*offload=*/run == 2, "own-roots");
      engine->Attach(model, own);
    }
    for (int64_t step = 0; step < 4; ++step) {
      own.zero_grad();
      model.Loss(step).backward();
      own.step();
    }
    std::vector<Tensor>& seen = results.emplace_back();
    for (const Tensor& parameter : model.parameters()) seen.push_back(parameter.detach().clone());
    if (run > 0) {
      EXPECT_EQ(engine->step(), 4);
    }
  }
  for (const int run : {1, 2}) {
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_TRUE(torch::equal(results[0][i], results[run][i])) << run << ", parameter " << i;
  }
}

TEST(OptimizerErrorsTest, AJobContinuesWithItsOwnOptimizerOnly) {
  {
    Model model(at::kFloat);
    auto engine = OpenEngine(/*offload=*/true, "own");
    auto optimizer = engine->AdamW(model, torch::optim::AdamWOptions(0.1));
    engine->plan();  // attaches
  }
  Model model(at::kFloat);
  auto engine = OpenEngine(/*offload=*/true, "own");
  auto optimizer = engine->SGD(model, torch::optim::SGDOptions(0.1));
  EXPECT_EQ(ErrorOf([&] { engine->plan(); },
                    "was trained with adamw (exp_avg, exp_avg_sq), the trainer has sgd (no state)"),
            1602);
}

TEST(OptimizerErrorsTest, AParameterHasOnePlaceInTheGroups) {
  Model model(at::kFloat);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (int i = 0; i < 2; ++i) groups.emplace_back(std::vector<Tensor>{model.big});
  auto engine = OpenEngine(/*offload=*/true, "twice");
  EXPECT_EQ(ErrorOf([&] { engine->AdamW(model, groups, torch::optim::AdamWOptions(0.1)); },
                    "in two places"),
            1002);
}

}  // namespace
}  // namespace offload

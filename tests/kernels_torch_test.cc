// The update kernels beside torch's own optimizers: the same bits.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/square_root.h"
#include "kernels/sum.h"
#include "kernels/update.h"
#include "zero3/torch/square_roots.h"

namespace offload::kernels {
namespace {

using torch::Tensor;

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Normal numbers with every 50th element subnormal, zero, tiny or huge.
Tensor RandomTensor(int64_t count, double scale) {
  static const float kRare[] = {0.0f, -0.0f, 1e-40f, -3e-45f, 1e-20f, 1e18f, 1.17549435e-38f};
  Tensor values = torch::randn({count}) * scale;
  float* data = values.data_ptr<float>();
  for (int64_t i = 0; i < count; i += 50) data[i] = kRare[(i / 50) % std::size(kRare)];
  return values;
}

// A tensor under our update: fp32, or bf16 as two halves and tie bits.
struct Offloaded {
  explicit Offloaded(const Tensor& master, bool is_split)
      : weight(master.clone()), is_split(is_split) {
    for (Tensor& plane : state) plane = torch::zeros_like(master);
    if (!is_split) return;
    const size_t count = master.numel();
    residual.resize(count);
    ties.resize(count / 8 + 1);
    weight = torch::empty_like(master, torch::kBFloat16);
    TieWriter writer{ties.data()};
    Split(static_cast<const uint32_t*>(master.const_data_ptr()), count,
          static_cast<uint16_t*>(weight.data_ptr()), residual.data(), &writer);
  }

  void Update(const OptimizerSpec& optimizer, int64_t step, const Tensor& gradient,
              float scale = 1) {
    std::vector<uint8_t> new_ties(ties.size());
    TieReader reader{ties.data()};
    TieWriter writer{new_ties.data()};
    Run run;
    run.count = run.tensor_count = weight.numel();
    run.weight_dtype = is_split ? Dtype::kBFloat16 : Dtype::kFloat32;
    run.weight = weight.data_ptr();
    run.residual = residual.data();
    run.ties_in = &reader;
    run.ties_out = &writer;
    for (size_t i = 0; i < kStatePlanesMax; ++i) run.state[i] = state[i].data_ptr<float>();
    run.gradient_dtype = gradient.dtype() == torch::kBFloat16 ? Dtype::kBFloat16 : Dtype::kFloat32;
    run.gradient = gradient.const_data_ptr();
    run.gradient_scale = scale;
    run.roots = zero3::TorchSquareRoots().corrections();
    kernels::Update(optimizer, step, run);
    ties = new_ties;
    tie_count += writer.position;
  }

  Tensor Master() {
    if (!is_split) return weight;
    Tensor master = torch::empty_like(state[0]);
    TieReader reader{ties.data()};
    Merge(static_cast<const uint16_t*>(weight.const_data_ptr()), residual.data(), weight.numel(),
          static_cast<uint32_t*>(master.data_ptr()), &reader);
    return master;
  }

  Tensor weight, state[kStatePlanesMax];
  bool is_split;
  std::vector<int16_t> residual;
  std::vector<uint8_t> ties;
  size_t tie_count = 0;
};

// The same tensor under at::_fused_adamw_.
struct Fused {
  explicit Fused(const Tensor& master)
      : weight(master.clone()),
        exp_avg(torch::zeros_like(master)),
        exp_avg_sq(torch::zeros_like(master)),
        max_exp_avg_sq(torch::zeros_like(master)) {}

  void Update(const OptimizerSpec& p, int64_t step_number, const Tensor& gradient) {
    const Tensor step = torch::tensor(static_cast<float>(step_number));
    const bool amsgrad = p.Get("amsgrad") != 0;
    const std::vector<Tensor> maximum =
        amsgrad ? std::vector{max_exp_avg_sq} : std::vector<Tensor>();
    at::_fused_adamw_({weight}, {gradient}, {exp_avg}, {exp_avg_sq}, maximum, {step}, p.Get("lr"),
                      p.Get("beta1"), p.Get("beta2"), p.Get("weight_decay"), p.Get("eps"), amsgrad,
                      p.Get("maximize") != 0);
  }

  Tensor weight, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

std::vector<OptimizerSpec> ManyAdamW() {
  return {
      OptimizerSpec("adamw"), OptimizerSpec("adamw", {{"lr", 0.05}, {"weight_decay", 0}}),
      OptimizerSpec(
          "adamw",
          {{"lr", 3e-4}, {"beta1", 0.95}, {"beta2", 0.95}, {"eps", 1e-6}, {"weight_decay", 0.1}}),
      OptimizerSpec("adamw", {{"lr", 2e-3}, {"beta1", 0.3}, {"beta2", 0.4}, {"weight_decay", 0.5}}),
      OptimizerSpec("adamw", {{"beta1", 0.5}, {"maximize", 1}})};
}

void ExpectFusedBits(const OptimizerSpec& optimizer, int64_t count, int step_count) {
  const Tensor start = RandomTensor(count, 0.02);
  Offloaded ours(start, /*is_split=*/false);
  Fused theirs(start);
  for (int64_t step = 1; step <= step_count; ++step) {
    const Tensor gradient = RandomTensor(count, 1e-3);
    ours.Update(optimizer, step, gradient);
    theirs.Update(optimizer, step, gradient);
    ASSERT_TRUE(SameBits(ours.state[0], theirs.exp_avg)) << count << ", step " << step;
    ASSERT_TRUE(SameBits(ours.state[1], theirs.exp_avg_sq)) << count;
    ASSERT_TRUE(SameBits(ours.state[2], theirs.max_exp_avg_sq)) << count;
    ASSERT_TRUE(SameBits(ours.weight, theirs.weight)) << count;
  }
}

TEST(KernelsTorchTest, FusedAdamWIsBitIdenticalOnAMillionElements) {
  torch::manual_seed(1);
  for (const OptimizerSpec& optimizer : ManyAdamW()) ExpectFusedBits(optimizer, 1000003, 4);
}

TEST(KernelsTorchTest, FusedAdamWIsBitIdenticalForEveryLengthOfTail) {
  torch::manual_seed(2);
  for (const OptimizerSpec& optimizer : ManyAdamW()) {
    for (int64_t count = 1; count < 42; ++count) ExpectFusedBits(optimizer, count, 8);
    for (int64_t count = 50000; count < 50008; ++count) ExpectFusedBits(optimizer, count, 2);
  }
}

TEST(KernelsTorchTest, FusedAmsgradIsBitIdentical) {
  torch::manual_seed(9);
  for (OptimizerSpec optimizer : ManyAdamW()) {
    optimizer.Set("amsgrad", 1);
    for (const int64_t count : {1, 7, 8, 13, 100003}) ExpectFusedBits(optimizer, count, 8);
  }
}

TEST(KernelsTorchTest, SplitWeightsAreTheCastOfAnFp32MasterUnderFusedAdamW) {
  torch::manual_seed(3);
  const Tensor start = RandomTensor(500003, 0.02).to(torch::kBFloat16).to(torch::kFloat32);
  Offloaded ours(start, /*is_split=*/true);
  Fused theirs(start);
  const OptimizerSpec optimizer("adamw", {{"lr", 1e-2}});
  for (int64_t step = 1; step <= 8; ++step) {
    const Tensor gradient = RandomTensor(start.numel(), 1e-3).to(torch::kBFloat16);
    ours.Update(optimizer, step, gradient);
    theirs.Update(optimizer, step, gradient.to(torch::kFloat32));
    ASSERT_TRUE(SameBits(ours.weight, theirs.weight.to(torch::kBFloat16))) << step;
    ASSERT_TRUE(SameBits(ours.Master(), theirs.weight)) << step;
    ASSERT_TRUE(SameBits(ours.state[0], theirs.exp_avg)) << step;
    ASSERT_TRUE(SameBits(ours.state[1], theirs.exp_avg_sq)) << step;
  }
  EXPECT_GT(ours.tie_count, 0u);
}

TEST(KernelsTorchTest, ClippingInTheUpdateIsMultiplyingTheGradientInPlace) {
  torch::manual_seed(4);
  const Tensor start = RandomTensor(100003, 0.02).to(torch::kBFloat16).to(torch::kFloat32);
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    Offloaded ours(start, dtype == torch::kBFloat16);
    Fused theirs(start);
    const OptimizerSpec optimizer;
    for (int64_t step = 1; step <= 3; ++step) {
      const Tensor gradient = RandomTensor(start.numel(), 1e-3).to(dtype);
      const Tensor coefficient = torch::tensor(0.3f / step).to(dtype);
      ours.Update(optimizer, step, gradient, coefficient.item<float>());
      theirs.Update(optimizer, step, gradient.clone().mul_(coefficient).to(torch::kFloat32));
      ASSERT_TRUE(SameBits(ours.Master(), theirs.weight)) << dtype;
      ASSERT_TRUE(SameBits(ours.state[1], theirs.exp_avg_sq)) << dtype;
    }
  }
}

TEST(KernelsTorchTest, TheHighHalfIsTorchsCastOfEveryKindOfFiniteValue) {
  torch::manual_seed(5);
  Tensor words = torch::randint(INT32_MIN, INT32_MAX, {1 << 20}, torch::kInt32);
  int32_t* data = words.data_ptr<int32_t>();
  for (int64_t i = 0; i < words.numel(); ++i) {
    if (i % 2 == 0) data[i] = static_cast<int32_t>((data[i] & 0xFFFF0000u) | 0x8000);
    if ((data[i] & 0x7F800000) == 0x7F800000) data[i] &= 0x80FFFFFF;
  }
  const Tensor master = words.view(torch::kFloat32);
  Offloaded ours(master, /*is_split=*/true);
  EXPECT_TRUE(SameBits(ours.weight, master.to(torch::kBFloat16)));
  EXPECT_TRUE(SameBits(ours.Master(), master));
}

// One update of torch: changes the weight and the moments.
using TorchStep =
    std::function<void(const OptimizerSpec&, int64_t step, const Tensor& gradient, Fused*)>;

// Every step starts from the same weights, so that what differs is one step's doing.
void ExpectTorchBits(const OptimizerSpec& p, int64_t count, const TorchStep& torch_step) {
  Fused theirs(RandomTensor(count, 0.02));
  Offloaded ours(theirs.weight, /*is_split=*/false);
  for (int64_t step = 1; step <= 5; ++step) {
    ours.weight.copy_(theirs.weight);
    const Tensor gradient = RandomTensor(count, 1e-3);
    ours.Update(p, step, gradient);
    torch_step(p, step, gradient, &theirs);
    EXPECT_TRUE(SameBits(ours.state[0], theirs.exp_avg)) << step;
    EXPECT_TRUE(SameBits(ours.state[1], theirs.exp_avg_sq)) << step;
    EXPECT_TRUE(SameBits(ours.weight, theirs.weight)) << step;
  }
}

TEST(KernelsTorchTest, SquareRootsAreThoseOfTorchWhereverTheyStand) {
  torch::manual_seed(8);
  const SquareRoots& roots = zero3::TorchSquareRoots();
  std::cout << "torch's square roots are " << (roots.AreNearest() ? "" : "not ") << "the nearest\n";
  for (const int64_t count : {1, 3, 8, 15, 16, 17, 31, 63, 1000, 100003}) {
    const Tensor normal = RandomTensor(count, 1).square() * torch::exp(20 * torch::randn({count}));
    const Tensor subnormal = RandomTensor(count, 1).square() * 1e-39;
    for (const Tensor& values : {normal, subnormal}) {
      const Tensor taken = values.sqrt();
      for (int64_t i = 0; i < count; ++i) {
        const float value = values.const_data_ptr<float>()[i];
        ASSERT_EQ(taken.const_data_ptr<float>()[i],
                  CorrectRoot(value, std::sqrt(value), roots.corrections()))
            << value;
      }
    }
  }
}

TEST(KernelsTorchTest, MulAddAdamWIsTheCppClass) {
  torch::manual_seed(6);
  for (OptimizerSpec parameters : ManyAdamW()) {
    if (parameters.Get("maximize") != 0) continue;  // the C++ class has none
    parameters.Set("flavour", 2);
    Tensor variable = torch::zeros({1000003}).requires_grad_();
    torch::optim::AdamW optimizer({variable},
                                  torch::optim::AdamWOptions(parameters.Get("lr"))
                                      .betas({parameters.Get("beta1"), parameters.Get("beta2")})
                                      .eps(parameters.Get("eps"))
                                      .weight_decay(parameters.Get("weight_decay")));
    const auto step = [&](const OptimizerSpec&, int64_t, const Tensor& gradient, Fused* theirs) {
      variable.data().copy_(theirs->weight);
      variable.mutable_grad() = gradient;
      optimizer.step();
      const auto& state = static_cast<torch::optim::AdamWParamState&>(
          *optimizer.state().at(variable.unsafeGetTensorImpl()));
      theirs->weight = variable.detach().clone();
      theirs->exp_avg = state.exp_avg();
      theirs->exp_avg_sq = state.exp_avg_sq();
    };
    ExpectTorchBits(parameters, variable.numel(), step);
  }
}

// What torch.optim.AdamW (foreach=False) does, by the same operators; its maximize negates the
// gradient first.
void LerpAdamW(const OptimizerSpec& p, int64_t step_number, const Tensor& gradient, Fused* state) {
  const Tensor g = p.Get("maximize") != 0 ? gradient.neg() : gradient;
  const double step = static_cast<double>(step_number), lr = p.Get("lr");
  const double beta1 = p.Get("beta1"), beta2 = p.Get("beta2");
  state->weight.mul_(1 - lr * p.Get("weight_decay"));
  state->exp_avg.lerp_(g, 1 - beta1);
  state->exp_avg_sq.mul_(beta2).addcmul_(g, g, 1 - beta2);
  const double root = std::pow(1 - std::pow(beta2, step), 0.5);
  const Tensor denominator = (state->exp_avg_sq.sqrt() / root).add_(p.Get("eps"));
  state->weight.addcdiv_(state->exp_avg, denominator, -(lr / (1 - std::pow(beta1, step))));
}

TEST(KernelsTorchTest, LerpAdamWIsThePythonDefault) {
  torch::manual_seed(7);
  for (OptimizerSpec parameters : ManyAdamW()) {
    parameters.Set("flavour", 1);
    for (const int64_t count : {1, 7, 13, 100003}) ExpectTorchBits(parameters, count, LerpAdamW);
  }
}

std::vector<OptimizerSpec> ManySgd() {
  return {OptimizerSpec("sgd", {{"lr", 0.1}}),
          OptimizerSpec("sgd", {{"lr", 0.1}, {"weight_decay", 0.01}}),
          OptimizerSpec("sgd", {{"lr", 0.03}, {"momentum", 0.9}}),
          OptimizerSpec(
              "sgd", {{"lr", 0.03}, {"momentum", 0.9}, {"dampening", 0.3}, {"weight_decay", 0.1}}),
          OptimizerSpec("sgd", {{"lr", 0.03}, {"momentum", 0.95}, {"nesterov", 1}}),
          OptimizerSpec(
              "sgd", {{"lr", 0.03}, {"momentum", 0.95}, {"weight_decay", 1e-4}, {"nesterov", 1}})};
}

void ExpectSgdBits(const OptimizerSpec& p, int64_t count) {
  Tensor theirs = RandomTensor(count, 0.02).requires_grad_();
  Offloaded ours(theirs.detach(), /*is_split=*/false);
  torch::optim::SGD optimizer({theirs}, torch::optim::SGDOptions(p.Get("lr"))
                                            .momentum(p.Get("momentum"))
                                            .dampening(p.Get("dampening"))
                                            .weight_decay(p.Get("weight_decay"))
                                            .nesterov(p.Get("nesterov") != 0));
  for (int64_t step = 1; step <= 4; ++step) {
    const Tensor gradient = RandomTensor(count, 1e-2);
    // The C++ class cannot maximize: it gets the negative gradient, as the Python one gives itself.
    theirs.mutable_grad() = p.Get("maximize") != 0 ? gradient.neg() : gradient.clone();
    ours.Update(p, step, gradient);
    optimizer.step();
    ASSERT_TRUE(SameBits(ours.weight, theirs.detach())) << count << ", step " << step;
  }
}

TEST(KernelsTorchTest, SgdIsBitIdenticalToTheCppClass) {
  torch::manual_seed(8);
  for (OptimizerSpec parameters : ManySgd()) {
    for (const int maximize : {0, 1}) {
      parameters.Set("maximize", maximize);
      for (const int64_t count : {1, 5, 31, 40, 300007}) ExpectSgdBits(parameters, count);
    }
  }
}

TEST(KernelsTorchTest, AllFiniteIsTorchsIsfinite) {
  for (const double value : {1.0, 3e38, 1e-45, double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
      const Tensor values = torch::full({100}, value, dtype);
      EXPECT_EQ(AllFinite(dtype == torch::kFloat32 ? Dtype::kFloat32 : Dtype::kBFloat16,
                          values.const_data_ptr(), 100),
                torch::isfinite(values).all().item<bool>())
          << value;
    }
  }
}

// Gradients with everything that a sum may meet, in the dtype.
Tensor RareTensor(int64_t count, torch::Dtype dtype, bool with_nan) {
  static const float kRare[] = {0.0f,   -0.0f, 1e-40f,     -3e-45f,  1.17549435e-38f, 3e38f,
                                -3e38f, 1.0f,  1.0078125f, INFINITY, -INFINITY,       NAN};
  Tensor values = torch::randn({count});
  const Tensor chosen =
      torch::randint(static_cast<int64_t>(std::size(kRare)) - (with_nan ? 0 : 3), {count});
  for (int64_t i = 0; i < count; i += 3) {
    values.data_ptr<float>()[i] = kRare[chosen.const_data_ptr<int64_t>()[i]];
  }
  return values.to(dtype);
}

// Adds the parts as a trainer does that scales each and accumulates, and by the kernel.
void ExpectSumBits(torch::Dtype dtype, int64_t count, int64_t ranks, SumStart start, bool scaled,
                   bool with_nan) {
  std::vector<Tensor> parts;
  std::vector<const void*> pointers;
  for (int64_t i = 0; i < ranks; ++i) {
    parts.push_back(RareTensor(count, dtype, with_nan));
    pointers.push_back(parts.back().const_data_ptr());
  }
  const Tensor before = RareTensor(count, dtype, with_nan);
  Tensor theirs = start == SumStart::kSum ? before.clone() : torch::zeros({count}, dtype);
  for (int64_t i = 0; i < ranks; ++i) {
    const Tensor part = scaled ? parts[i] * (1.0 / static_cast<double>(ranks)) : parts[i].clone();
    if (i == 0 && start == SumStart::kNothing) {
      theirs = part;
    } else {
      theirs.add_(part);
    }
  }
  Tensor ours = before.clone();
  const bool finite =
      AddParts({.dtype = dtype == torch::kFloat32 ? Dtype::kFloat32 : Dtype::kBFloat16,
                .count = static_cast<size_t>(count),
                .sum = ours.data_ptr(),
                .start = start,
                .parts = pointers.data(),
                .part_count = pointers.size(),
                .factor = scaled ? 1.0f / static_cast<float>(ranks) : 1.0f});
  EXPECT_EQ(finite, torch::isfinite(theirs).all().item<bool>());
  ASSERT_TRUE(torch::equal(ours.isnan(), theirs.isnan()));
  if (with_nan && (dtype == torch::kFloat32 || count % 32 != 0)) {
    // Which NaN it is depends on the order of operands (fp32) and on torch's scalar rest (bf16).
    ours.nan_to_num_(7), theirs.nan_to_num_(7);
  }
  ASSERT_TRUE(SameBits(ours, theirs)) << dtype << ", " << count << " elements, " << ranks
                                      << " ranks, start " << static_cast<int>(start);
}

TEST(KernelsTorchTest, TheOrderedSumIsTorchsMulAndAdd) {
  torch::manual_seed(9);
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    for (const int64_t count : {1, 13, 4096}) {
      for (const int64_t ranks : {1, 2, 3, 4, 8}) {
        for (const SumStart start : {SumStart::kNothing, SumStart::kZeros, SumStart::kSum}) {
          for (const bool scaled : {false, true}) {
            for (const bool with_nan : {false, true})
              ExpectSumBits(dtype, count, ranks, start, scaled, with_nan);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace offload::kernels

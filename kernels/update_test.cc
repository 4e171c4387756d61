#include "kernels/update.h"

#include <bit>
#include <clocale>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/environment.h"
#include "base/random.h"
#include "gtest/gtest.h"
#include "kernels/adversarial.h"
#include "kernels/square_root.h"

namespace offload::kernels {
namespace {

// Calls check(update) for a tensor's first update and later ones, where update(isa, run) is one of
// the updates.
template <class Check>
void ForEveryUpdate(const Check& check) {
  for (const OptimizerSpec& optimizer : ManyOptimizers()) {
    for (const int64_t step : kStepsOfRoots) {
      SCOPED_TRACE(std::string(optimizer.name()));
      check([&](Isa isa, Run run) {
        run.roots = RootsOfStep(step);
        Update(isa, optimizer, step, run);
      });
    }
  }
}

class UpdateTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsSupported(GetParam())) GTEST_SKIP() << "this processor lacks " << IsaName(GetParam());
  }
};

std::string ParameterName(const testing::TestParamInfo<Isa>& info) { return IsaName(info.param); }
INSTANTIATE_TEST_SUITE_P(EveryIsa, UpdateTest,
                         testing::Values(Isa::kReference, Isa::kAvx2, Isa::kAvx512), ParameterName);

class VectorUpdateTest : public UpdateTest {};
INSTANTIATE_TEST_SUITE_P(EveryVectorIsa, VectorUpdateTest,
                         testing::Values(Isa::kAvx2, Isa::kAvx512), ParameterName);

TEST_P(VectorUpdateTest, IsTheReferenceBitForBit) {
  Random random(1);
  for (const Shape shape : kShapes) {
    for (const float scale : {1.0f, 0.37f}) {
      for (const size_t count : {0, 1, 7, 8, 15, 16, 17, 31, 33, 67, 1003}) {
        ForEveryUpdate([&](const auto& update) {
          Tensor tensor(shape, count, &random);
          Tensor expected = tensor;
          for (int step = 0; step < 2; ++step) {
            tensor.Apply({}, scale, [&](const auto& run) { update(GetParam(), run); });
            expected.Apply({}, scale, [&](const auto& run) { update(Isa::kReference, run); });
          }
          ASSERT_EQ(tensor.Bits(), expected.Bits()) << count << " elements, scale " << scale;
        });
      }
    }
  }
}

TEST_P(UpdateTest, DoesNotDependOnWhereTheTensorIsCut) {
  Random random(2);
  for (size_t count = 0; count <= 67; ++count) {
    const Shape shape = kShapes[count % std::size(kShapes)];
    for (size_t cut = 0; cut <= count; ++cut) {
      const size_t second_cut = cut + random.Below(count - cut + 1);
      Tensor whole(shape, count, &random);
      Tensor parts = whole;
      const auto update = [&](const auto& run) { Update(GetParam(), OptimizerSpec(), 2, run); };
      whole.Apply({}, 0.9f, update);
      parts.Apply({cut, second_cut}, 0.9f, update);
      ASSERT_EQ(parts.Bits(), whole.Bits()) << count << " cut at " << cut << ", " << second_cut;
    }
  }
}

// Norms of a tensor, added in the pieces that the cuts make, as bits where NaN is one value. The
// sweep writes no tie bits, so the tensor is of no use afterwards if it is split.
std::vector<uint64_t> NormsInPieces(Isa isa, Tensor* tensor, const std::vector<size_t>& cuts) {
  Norms norms;
  tensor->Apply(cuts, 0.9f,
                [&](const auto& run) { AddNorms(isa, OptimizerSpec("lamb"), 2, run, &norms); });
  std::vector<uint64_t> bits;
  for (const auto& lanes : {norms.weight, norms.update}) {
    for (size_t i = 0; i < Norms::kLanes; ++i)
      bits.push_back(std::isnan(lanes[i]) ? 1 : std::bit_cast<uint64_t>(lanes[i]));
  }
  return bits;
}

TEST_P(UpdateTest, NormsDependOnNeitherIsaNorCutsAndChangeNothing) {
  Random random(4);
  for (size_t count = 0; count <= 67; ++count) {
    const Shape shape = kShapes[count % std::size(kShapes)];
    const Tensor tensor(shape, count, &random);
    Tensor whole = tensor;
    const std::vector<uint64_t> expected = NormsInPieces(Isa::kReference, &whole, {});
    for (size_t cut = 0; cut <= count; ++cut) {
      Tensor parts = tensor;
      ASSERT_EQ(NormsInPieces(GetParam(), &parts, {cut}), expected) << count << " cut at " << cut;
      if (shape.weight_dtype == Dtype::kFloat32) {
        ASSERT_EQ(parts.Bits(), tensor.Bits());
      }
    }
  }
}

// Whether the roots of the run change what an optimizer computes.
bool FollowsRoots(const OptimizerSpec& optimizer) {
  Random random(5);
  Tensor nearest(kShapes[0], 100, &random);
  Tensor others = nearest;
  nearest.Apply({}, 1, [&](const Run& run) { Update(optimizer, 3, run); });
  others.Apply({}, 1, [&](Run run) {
    run.roots = RootsOfStep(3);
    Update(optimizer, 3, run);
  });
  return nearest.Bits() != others.Bits();
}

TEST(UpdateTest, TakesTheRootsOfALibraryWhereTheOptimizerSaysSo) {
  for (const OptimizerSpec& optimizer : ManyOptimizers()) {
    if (optimizer.Get("lr") == 0) continue;
    EXPECT_EQ(FollowsRoots(optimizer), optimizer.TakesLibraryRoots()) << optimizer.name();
  }
}

TEST(TrustRatioTest, IsOneWhereANormIsZero) {
  Norms norms;
  EXPECT_EQ(TrustRatio({&norms, 1}), 1);
  norms.weight[3] = 16;
  EXPECT_EQ(TrustRatio({&norms, 1}), 1);
  norms.update[0] = 4;
  EXPECT_EQ(TrustRatio({&norms, 1}), 2);
}

TEST_P(UpdateTest, TheLastElementsOfATensorRoundTheMomentumOfFusedSgdInAnotherOrder) {
  for (const double fused : {0, 1}) {
    float gradient[8], buffer[8], other[8], weight[8] = {};
    Random random(3);
    for (size_t i = 0; i < 8; ++i) {
      gradient[i] = static_cast<float>(random.Unit());
      other[i] = buffer[i] = static_cast<float>(random.Unit());
    }
    const OptimizerSpec sgd("sgd", {{"momentum", 0.9}, {"dampening", 0.3}, {"fused", fused}});
    kernels::Run run{
        .count = 7, .begin = 8, .tensor_count = 15, .weight = weight, .state = {buffer}};
    run.gradient = gradient;
    Update(GetParam(), sgd, 2, run);
    run.tensor_count = 16;  // the same elements, no longer in the tail
    run.state[0] = other;
    Update(GetParam(), sgd, 2, run);
    size_t differing_count = 0;
    for (size_t i = 0; i < 7; ++i) differing_count += buffer[i] != other[i];
    EXPECT_EQ(differing_count > 0, fused == 1);
  }
}

TEST_P(UpdateTest, TheLastElementsOfATensorRoundInAnotherOrder) {
  size_t differing_count = 0;
  Random random(3);
  for (int trial = 0; trial < 100; ++trial) {
    float gradient[8], exp_avg[8] = {}, exp_avg_sq[8], other[8], weight[8] = {};
    for (size_t i = 0; i < 8; ++i) {
      gradient[i] = static_cast<float>(random.Unit());
      other[i] = exp_avg_sq[i] = static_cast<float>(random.Unit());
    }
    kernels::Run run{
        .count = 7, .begin = 8, .tensor_count = 15, .weight = weight, .state = {exp_avg}};
    run.state[1] = exp_avg_sq;
    run.gradient = gradient;
    Update(GetParam(), OptimizerSpec(), 1, run);
    run.tensor_count = 16;  // the same elements, no longer in the tail
    run.state[1] = other;
    Update(GetParam(), OptimizerSpec(), 1, run);
    for (size_t i = 0; i < 7; ++i) {
      differing_count += exp_avg_sq[i] != other[i];
      EXPECT_NEAR(exp_avg_sq[i], other[i], 2e-7);
    }
  }
  EXPECT_GT(differing_count, 0u);
}

TEST_P(UpdateTest, AHalfGradientIsScaledInItsOwnPrecision) {
  const uint16_t gradient = 0x3F81;  // 1 + 2^-7
  const float scale = 1.0f - 0x1p-9f;
  float weight = 0;
  kernels::Run run{
      .count = 1, .tensor_count = 1, .weight = &weight, .gradient_dtype = Dtype::kBFloat16};
  run.gradient = &gradient;
  run.gradient_scale = scale;
  Update(GetParam(), OptimizerSpec("sgd", {{"lr", 1}}), 1, run);
  // The product 1.00584... rounds to 1 + 2^-7 again.
  EXPECT_EQ(weight, -(1.0f + 0x1p-7f));
}

TEST_P(UpdateTest, SubnormalNumbersAreKept) {
  float weight = 0, gradient = 1e-40f;
  kernels::Run run{.count = 1, .tensor_count = 1, .weight = &weight, .gradient = &gradient};
  Update(GetParam(), OptimizerSpec("sgd", {{"lr", 1}}), 1, run);
  EXPECT_EQ(weight, -1e-40f);
}

TEST_P(UpdateTest, MaximizingIsMinimizingTheNegative) {
  const float start[4] = {1, -2, 0.5f, 3}, gradient[4] = {0.1f, -0.2f, 5, -7};
  float negative[4];
  for (size_t i = 0; i < 4; ++i) negative[i] = -gradient[i];
  std::vector<float> up(start, start + 4), down(start, start + 4);
  kernels::Run run{.count = 4, .tensor_count = 4, .weight = up.data(), .gradient = gradient};
  Update(GetParam(), OptimizerSpec("sgd", {{"lr", 0.1}, {"maximize", 1}}), 1, run);
  run.weight = down.data();
  run.gradient = negative;
  Update(GetParam(), OptimizerSpec("sgd", {{"lr", 0.1}}), 1, run);
  EXPECT_EQ(up, down);
  EXPECT_GT(up[0], start[0]);
}

TEST_P(UpdateTest, OneNonFiniteElementIsFoundAnywhere) {
  std::vector<float> floats(300, 3.4028235e38f);
  std::vector<uint16_t> halves(300, 0x7F7F);
  const auto is_finite = [&](size_t begin) {
    return std::pair(AllFinite(GetParam(), Dtype::kFloat32, floats.data() + begin, 300 - begin),
                     AllFinite(GetParam(), Dtype::kBFloat16, halves.data() + begin, 300 - begin));
  };
  EXPECT_EQ(is_finite(0), std::pair(true, true));
  for (const uint32_t bad : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFFFFFFFu, 0x7F810000u}) {
    for (size_t i = 1; i < 300; ++i) {
      floats[i] = std::bit_cast<float>(bad);
      halves[i] = static_cast<uint16_t>(bad >> 16);
      ASSERT_EQ(is_finite(1), std::pair(false, false)) << i;
      floats[i] = -0.0f;
      halves[i] = 0x8000;
    }
  }
  EXPECT_EQ(is_finite(1), std::pair(true, true));
}

TEST(OptimizerSpecTest, ValuesOutsideTheirRangeAreNamed) {
  EXPECT_EQ(OptimizerSpec("adamw", {{"unscale", -1}}).Violation(),
            "adamw with unscale -1, which has to be a finite number, not less than 0");
  EXPECT_EQ(OptimizerSpec("sgd", {{"dampening", NAN}}).Violation(),
            "sgd with dampening nan, which has to be a finite number");
  for (const std::string_view name : OptimizerNames())
    EXPECT_EQ(OptimizerSpec(name).Violation(), "") << name;
}

TEST(OptimizerSpecTest, MoreIsDemandedOfANewOne) {
  const auto when_new = [](const OptimizerSpec& spec) {
    EXPECT_EQ(spec.Violation(), "");
    return spec.ViolationWhenNew();
  };
  EXPECT_EQ(when_new(OptimizerSpec("adamw", {{"beta2", 1}})),
            "adamw with beta2 1, which has to be at least 0 and less than 1");
  EXPECT_EQ(when_new(OptimizerSpec("adamw", {{"lr", -1}})),
            "adamw with lr -1, which has to be a finite number, not less than 0");
  EXPECT_EQ(when_new(OptimizerSpec("adagrad", {{"lr_decay", -1}})),
            "adagrad with lr_decay -1, which has to be a finite number, not less than 0");
  EXPECT_EQ(when_new(OptimizerSpec("sgd", {{"nesterov", 1}})),
            "sgd: nesterov needs momentum and no dampening");
  EXPECT_EQ(when_new(OptimizerSpec("sgd", {{"dampening", -1}})), "");
  for (const std::string_view name : OptimizerNames())
    EXPECT_EQ(when_new(OptimizerSpec(name)), "") << name;
}

TEST(OptimizerSpecTest, WhatComesFromAMessageIsChecked) {
  OptimizerSpec spec;
  EXPECT_EQ(OptimizerSpec::Read("adamwx", {}, &spec), "unknown optimizer \"adamwx\"");
  EXPECT_EQ(OptimizerSpec::Read("sgd", {}, &spec), "sgd with 0 parameters");
  const std::vector<double> values = {0.1, 0.9, 0, 0, 2, 0, 0, 1};
  EXPECT_EQ(OptimizerSpec::Read("sgd", values, &spec),
            "sgd with nesterov 2, which has to be 0 or 1");
  const OptimizerSpec sent("adamw", {{"lr", 0.25}});
  EXPECT_EQ(OptimizerSpec::Read(sent.name(), sent.values(), &spec), "");
  EXPECT_EQ(spec.Get("lr"), 0.25);
  EXPECT_EQ(spec.name(), "adamw");
}

TEST(OptimizerSpecTest, NumbersAreToldTheSameInEveryLocale) {
  const std::string before = std::setlocale(LC_NUMERIC, nullptr);
  if (std::setlocale(LC_NUMERIC, "de_DE.utf8") == nullptr)
    GTEST_SKIP() << "the locale de_DE.utf8 is not there";
  const std::vector<double> values = {0.1, 0.9, 0, 0, 0.5, 0, 0, 1};
  OptimizerSpec spec;
  EXPECT_EQ(OptimizerSpec::Read("sgd", values, &spec),
            "sgd with nesterov 0.5, which has to be 0 or 1");
  std::setlocale(LC_NUMERIC, before.c_str());
}

TEST(OptimizerSpecTest, WhatIsKeptFollowsTheParameters) {
  EXPECT_STREQ(OptimizerSpec().Plane(1)->name, "exp_avg_sq");
  EXPECT_EQ(OptimizerSpec().Plane(2), nullptr);
  EXPECT_STREQ(OptimizerSpec("adamw", {{"amsgrad", 1}}).Plane(2)->name, "max_exp_avg_sq");
  EXPECT_FALSE(OptimizerSpec("sgd").KeepsAnything());
  EXPECT_TRUE(OptimizerSpec("sgd", {{"momentum", 0.9}}).KeepsAnything());
}

TEST(OptimizerSpecTest, ASpecMayKeepWhatItDoesNotNeedItself) {
  OptimizerSpec spec("sgd");
  spec.KeepToo(OptimizerSpec("sgd", {{"momentum", 0.5}}));
  EXPECT_TRUE(spec.KeepsAnything());
  spec.KeepToo(OptimizerSpec("sgd"));
  EXPECT_TRUE(spec.KeepsAnything());
}

TEST(BestIsaTest, IsSupportedAndNamed) {
  EXPECT_TRUE(IsSupported(BestIsa()));
  EXPECT_STREQ(IsaName(Isa::kAvx512), "avx512");
}

TEST(BestIsaTest, NamesAreThoseThatTheVariableMayHave) {
  std::string names;
  for (const Isa isa : {Isa::kReference, Isa::kAvx2, Isa::kAvx512})
    names += (names.empty() ? "" : "|") + std::string(IsaName(isa));
  EXPECT_EQ(names, kIsaChoices);
}

}  // namespace
}  // namespace offload::kernels

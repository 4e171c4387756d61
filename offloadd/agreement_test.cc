#include "offloadd/agreement.h"

#include <functional>

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using proto::v1::SealRequest;
using Tensors = std::vector<proto::Tensor>;

Tensors Model() { return {{.name = "embedding", .shape = {3, 4}}, {.name = "head", .shape = {4}}}; }

void ExpectDifference(const absl::Status& status, const std::string& text) {
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kRanksDiffer) << status;
  EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
}

void ExpectOther(const std::function<void(Tensors&)>& change, const std::string& text) {
  const Tensors model = Model();
  Tensors other = Model();
  change(other);
  ExpectDifference(CompareTensors({0, model}, {3, other}), text);
}

TEST(AgreementTest, TheFirstTensorThatDiffersIsNamedAndHow) {
  const Tensors model = Model(), same = Model();
  EXPECT_TRUE(CompareTensors({0, model}, {1, same}).ok());
  ExpectOther([](Tensors& other) { other[0].name = "tokens"; },
              "tensor 0 is \"embedding\" in rank 0 and \"tokens\" in rank 3");
  ExpectOther(
      [](Tensors& other) {
        other[1].shape = {2, 2};
      },
      "\"head\" is fp32 of shape [4], trainable in rank 0 and fp32 of shape [2, 2]");
  ExpectOther([](Tensors& other) { other[1].dtype = proto::Dtype::kBFloat16; }, "bf16");
  ExpectOther([](Tensors& other) { other[0].trainable = false; }, "frozen in rank 3");
  ExpectOther(
      [](Tensors& other) {
        other[0].dimension_order = {1, 0};
      },
      "trainable, dimensions in memory in the order 1, 0 in rank 3");
  ExpectOther([](Tensors& other) { other.pop_back(); }, "2 tensors in rank 0 and 1 in rank 3");
}

TEST(AgreementTest, PlansAreEqualHoweverTheyAreCutIntoMessages) {
  std::vector<SealRequest> whole(1), parts(2);
  whole[0].set_window_bytes(4096);
  parts[0].set_window_bytes(4096);
  for (const uint32_t home : {1u, 2u}) whole[0].add_gradient_home(home);
  parts[0].add_gradient_home(1);
  parts[1].add_gradient_home(2);
  EXPECT_TRUE(ComparePlans({0, whole}, {1, parts}).ok());
}

TEST(AgreementTest, TheFirstFieldThatDiffersIsNamed) {
  std::vector<SealRequest> plan(1), other(1);
  plan[0].set_window_bytes(4096);
  other[0].set_window_bytes(8192);
  ExpectDifference(ComparePlans({0, plan}, {2, other}), "ranks 0 and 2");
  ExpectDifference(ComparePlans({0, plan}, {2, other}), "window_bytes");
  other = plan;
  other[0].add_gradient_home(1);
  ExpectDifference(ComparePlans({0, plan}, {2, other}), "gradient_home");
}

TEST(AgreementTest, AnOptimizersParameterIsNamedAsTorchDoes) {
  std::vector<SealRequest> plan(1), other(1);
  proto::v1::Optimizer& optimizer = *plan[0].mutable_optimizer();
  optimizer.set_name("adamw");
  for (const double value : {1e-3, 0.9, 0.999}) optimizer.add_parameters(value);
  plan[0].set_window_bytes(4096);
  other[0] = plan[0];
  other[0].mutable_optimizer()->set_parameters(0, 0.5);
  ExpectDifference(ComparePlans({0, plan}, {1, other}), "lr is 0.001 in rank 0 and 0.5 in rank 1");
  other[0] = plan[0];
  other[0].mutable_optimizer()->set_parameters(2, 0.9990000000000001);
  ExpectDifference(ComparePlans({0, plan}, {1, other}),
                   "beta2 is 0.999 in rank 0 and 0.9990000000000001 in rank 1");
  other[0].mutable_optimizer()->set_name("lion");
  ExpectDifference(ComparePlans({0, plan}, {1, other}),
                   "optimizer is adamw in rank 0 and lion in rank 1");
  other[0] = plan[0];
  other[0].mutable_optimizer()->add_parameters(1);
  ExpectDifference(ComparePlans({0, plan}, {1, other}), "number of parameters of adamw is 3");
}

// What a daemon of another release may be told; a difference is one whatever it is called.
TEST(AgreementTest, OptimizersThatNobodyKnowsAreComparedToo) {
  proto::v1::Optimizer a, b;
  for (proto::v1::Optimizer* optimizer : {&a, &b}) optimizer->set_name("unknown");
  EXPECT_EQ(DifferenceOf({0, a}, {1, b}), "");
  a.add_parameters(0.0);
  b.add_parameters(-0.0);
  EXPECT_EQ(DifferenceOf({0, a}, {1, b}), "parameter 0 is 0 in rank 0 and -0 in rank 1");
}

}  // namespace
}  // namespace offload::daemon

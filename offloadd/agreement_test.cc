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

}  // namespace
}  // namespace offload::daemon

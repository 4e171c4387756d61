#include "offloadd/job_catalogue.h"

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using proto::Dtype;
using proto::OptimizerState;

std::vector<proto::Tensor> Tensors() {
  return {{.name = "embedding", .shape = {300, 1000}, .dtype = Dtype::kBFloat16},
          {.name = "norm", .shape = {64}, .dtype = Dtype::kBFloat16},
          {.name = "frozen", .shape = {50000}, .dtype = Dtype::kBFloat16, .trainable = false}};
}

// The refusal when a store of Tensors() meets a model of `tensors`.
absl::Status Compare(std::vector<proto::Tensor> tensors,
                     OptimizerState optimizer = OptimizerState::kAdam) {
  const proto::Catalogue before = *proto::BuildCatalogue(Tensors());
  const auto stored = DecodeCatalogue(EncodeCatalogue(before, OptimizerState::kAdam));
  if (!stored.ok()) return stored.status();
  return CompareWithStored("job", *stored, *proto::BuildCatalogue(std::move(tensors)), optimizer);
}

void ExpectRefusal(const absl::Status& status, const std::string& text) {
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kOtherModel) << status;
  EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status;
}

TEST(JobCatalogueTest, SameModelIsAccepted) {
  EXPECT_TRUE(Compare(Tensors()).ok()) << Compare(Tensors());
}

TEST(JobCatalogueTest, FirstDifferenceIsNamed) {
  std::vector<proto::Tensor> tensors = Tensors();
  tensors[1].name = "scale";
  tensors[2].shape = {40000};
  ExpectRefusal(Compare(tensors), "\"norm\" [64] bfloat16 as parameter 1, the model has \"scale\"");
  tensors = Tensors();
  tensors[0].shape = {1000, 300};
  ExpectRefusal(Compare(tensors), "[300, 1000]");
  tensors = Tensors();
  tensors[0].dtype = Dtype::kFloat32;
  ExpectRefusal(Compare(tensors), "float32");
  tensors = Tensors();
  tensors[2].trainable = true;
  ExpectRefusal(Compare(tensors), "frozen");
}

TEST(JobCatalogueTest, MissingAndAdditionalParametersAreNamed) {
  std::vector<proto::Tensor> tensors = Tensors();
  tensors.pop_back();
  ExpectRefusal(Compare(tensors), "the model has only 2 parameters");
  tensors = Tensors();
  tensors.push_back({.name = "head", .shape = {10}, .dtype = Dtype::kBFloat16});
  ExpectRefusal(Compare(tensors), "\"head\"");
}

TEST(JobCatalogueTest, OtherOptimizerIsRefused) {
  ExpectRefusal(Compare(Tensors(), OptimizerState::kMomentum), "SGD with momentum");
  ExpectRefusal(Compare(Tensors(), OptimizerState::kNone),
                "the trainer has an optimizer without state");
}

TEST(JobCatalogueTest, DamagedListIsDataLoss) {
  EXPECT_EQ(ErrorIdOf(DecodeCatalogue("").status()), ErrorId::kStoreDamaged);
  EXPECT_EQ(ErrorIdOf(DecodeCatalogue(std::string("\x07", 1)).status()), ErrorId::kStoreDamaged);
  EXPECT_EQ(ErrorIdOf(DecodeCatalogue(std::string("\x02\xff\xff", 3)).status()),
            ErrorId::kStoreDamaged);
}

TEST(JobCatalogueTest, StoreHasThePlanesOfTheOptimizer) {
  const proto::Catalogue catalogue = *proto::BuildCatalogue(Tensors());
  const swap::StoreSpec adam = MakeStoreSpec("job", catalogue, OptimizerState::kAdam);
  ASSERT_EQ(adam.tensors.size(), 3u);
  EXPECT_EQ(adam.tensors[0].planes.size(), 5u);  // weight, residual, two moments, ties
  EXPECT_EQ(adam.tensors[2].planes.size(), 1u) << "frozen: the weight alone";
  const swap::StoreSpec none = MakeStoreSpec("job", catalogue, OptimizerState::kNone);
  EXPECT_EQ(none.tensors[0].planes.size(), 3u);
}

TEST(JobCatalogueTest, PlanIsJoinedFromItsMessages) {
  std::vector<proto::v1::SealRequest> messages(2);
  messages[0].set_optimizer_state(2);
  messages[0].set_window_bytes(8192);
  messages[0].add_weight_resident(true);
  messages[0].add_gradient_home(1);
  messages[0].add_gradient_offset(4096);
  messages[1].add_weight_resident(false);
  messages[1].add_gradient_home(2);
  messages[1].add_gradient_offset(0);
  const auto sealed = PlanFromMessages(messages);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(sealed->optimizer, OptimizerState::kAdam);
  EXPECT_EQ(sealed->plan.weight_resident, (std::vector<bool>{true, false}));
  ASSERT_EQ(sealed->plan.gradients.size(), 2u);
  EXPECT_EQ(sealed->plan.gradients[0].home, proto::GradientHome::kRegion);
  EXPECT_EQ(sealed->plan.gradients[1].home, proto::GradientHome::kScratch);
}

TEST(JobCatalogueTest, NonsensePlansAreViolations) {
  EXPECT_EQ(ErrorIdOf(PlanFromMessages({}).status()), ErrorId::kProtocol);
  std::vector<proto::v1::SealRequest> messages(1);
  messages[0].set_optimizer_state(3);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages(messages).status()), ErrorId::kProtocol);
  messages[0].set_optimizer_state(0);
  messages[0].add_gradient_home(1);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages(messages).status()), ErrorId::kProtocol);
  messages[0].add_gradient_offset(0);
  messages[0].set_gradient_home(0, 9);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages(messages).status()), ErrorId::kProtocol);
}

TEST(JobCatalogueTest, ATensorOfAnotherDtypeIsRefusedAsMessageAndInAStore) {
  proto::v1::DeclareTensorsRequest message;
  message.add_tensors()->set_name("weight");
  message.mutable_tensors(0)->set_dtype(static_cast<proto::v1::Dtype>(2));
  const absl::Status refused = TensorFromMessage(message.tensors(0)).status();
  EXPECT_EQ(ErrorIdOf(refused), ErrorId::kUnsupportedModel) << refused;
  EXPECT_NE(refused.message().find("\"weight\" has the unknown dtype 2"), absl::string_view::npos);
  std::string stored(1, '\0');
  message.AppendToString(&stored);
  EXPECT_EQ(ErrorIdOf(DecodeCatalogue(stored).status()), ErrorId::kUnsupportedModel);
}

TEST(JobCatalogueTest, APlanForMoreTensorsThanAnyJobHasIsRefusedBeforeItIsKept) {
  proto::v1::SealRequest message;
  for (uint32_t i = 0; i <= proto::kTensorsMax; ++i) message.add_weight_resident(false);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages({message}).status()), ErrorId::kProtocol);
}

}  // namespace
}  // namespace offload::daemon

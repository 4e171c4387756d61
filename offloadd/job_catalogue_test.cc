#include "offloadd/job_catalogue.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using kernels::OptimizerSpec;
using proto::Dtype;

std::vector<proto::Tensor> Tensors() {
  return {{.name = "embedding", .shape = {300, 1000}, .dtype = Dtype::kBFloat16},
          {.name = "norm", .shape = {64}, .dtype = Dtype::kBFloat16},
          {.name = "frozen", .shape = {50000}, .dtype = Dtype::kBFloat16, .trainable = false}};
}

// The refusal when a store of Tensors() meets a model of `tensors`.
absl::Status Compare(std::vector<proto::Tensor> tensors,
                     const OptimizerSpec& optimizer = OptimizerSpec()) {
  const proto::Catalogue before = *proto::BuildCatalogue(Tensors());
  const auto stored = DecodeCatalogue(EncodeCatalogue(before, OptimizerSpec()));
  if (!stored.ok()) return stored.status();
  return CompareWithStored("job", *stored, *proto::BuildCatalogue(std::move(tensors), optimizer),
                           optimizer);
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
}

TEST(JobCatalogueTest, FrozenTensorsMayBeTrainedLaterAndNotTheOtherWayRound) {
  const auto stored =
      DecodeCatalogue(EncodeCatalogue(*proto::BuildCatalogue(Tensors()), OptimizerSpec()));
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_FALSE(HasThawed(*stored, *proto::BuildCatalogue(Tensors())));
  std::vector<proto::Tensor> tensors = Tensors();
  tensors[2].trainable = true;
  EXPECT_TRUE(Compare(tensors).ok()) << Compare(tensors);
  EXPECT_TRUE(HasThawed(*stored, *proto::BuildCatalogue(tensors)));
  tensors = Tensors();
  tensors[0].trainable = false;
  ExpectRefusal(Compare(tensors), "the model has \"embedding\" [300, 1000] bfloat16 frozen");
}

TEST(JobCatalogueTest, OtherOrderInMemoryIsRefusedInBothDirections) {
  std::vector<proto::Tensor> tensors = Tensors();
  tensors[0].dimension_order = {1, 0};
  ExpectRefusal(
      Compare(tensors),
      "\"embedding\" lies in memory with its dimensions in the order 1, 0, in job \"job\" "
      "it lies row by row");
  const proto::Catalogue ordered = *proto::BuildCatalogue(tensors);
  const auto stored = DecodeCatalogue(EncodeCatalogue(ordered, OptimizerSpec()));
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_TRUE(CompareWithStored("job", *stored, ordered, OptimizerSpec()).ok());
  ExpectRefusal(
      CompareWithStored("job", *stored, *proto::BuildCatalogue(Tensors()), OptimizerSpec()),
      "lies in memory row by row");
}

TEST(JobCatalogueTest, MissingAndAdditionalParametersAreNamed) {
  std::vector<proto::Tensor> tensors = Tensors();
  tensors.pop_back();
  ExpectRefusal(Compare(tensors), "the model has only 2 parameters");
  tensors = Tensors();
  tensors.push_back({.name = "head", .shape = {10}, .dtype = Dtype::kBFloat16});
  ExpectRefusal(Compare(tensors), "\"head\"");
}

TEST(JobCatalogueTest, StoredTensorsAreFoundByTheNamesThatAreGiven) {
  const auto stored =
      DecodeCatalogue(EncodeCatalogue(*proto::BuildCatalogue(Tensors()), OptimizerSpec()));
  ASSERT_TRUE(stored.ok()) << stored.status();
  std::vector<proto::Tensor> tensors = Tensors();
  std::swap(tensors[0], tensors[1]);
  tensors[2] = {.name = "further", .shape = {10}, .dtype = Dtype::kBFloat16};
  const auto find = [&](const std::vector<std::string>& names) {
    return FindSources("job", *stored, *proto::BuildCatalogue(tensors), OptimizerSpec(), names);
  };
  const auto sources = find({"norm", "embedding", ""});
  ASSERT_TRUE(sources.ok()) << sources.status();
  EXPECT_EQ(*sources, (std::vector<std::optional<uint32_t>>{1, 0, std::nullopt}));
  EXPECT_EQ(ErrorIdOf(find({"norm", "embedding"}).status()), ErrorId::kProtocol);
  EXPECT_EQ(ErrorIdOf(find({"norm", "nobody", ""}).status()), ErrorId::kProtocol);
  EXPECT_EQ(ErrorIdOf(find({"norm", "norm", ""}).status()), ErrorId::kProtocol);
  ExpectRefusal(find({"embedding", "norm", ""}).status(), "the model has \"norm\" [64]");
}

TEST(JobCatalogueTest, OtherOptimizerIsRefused) {
  ExpectRefusal(Compare(Tensors(), OptimizerSpec("sgd", {{"momentum", 0.9}})),
                "was trained with adamw (exp_avg, exp_avg_sq), the trainer has sgd "
                "(momentum_buffer)");
  ExpectRefusal(Compare(Tensors(), OptimizerSpec("sgd")), "the trainer has sgd (no state)");
  ExpectRefusal(Compare(Tensors(), OptimizerSpec("adamw", {{"amsgrad", 1}})),
                "the trainer has adamw (exp_avg, exp_avg_sq, max_exp_avg_sq)");
}

TEST(JobCatalogueTest, OtherParametersOfTheSameOptimizerAreAccepted) {
  EXPECT_TRUE(Compare(Tensors(), OptimizerSpec("adamw", {{"lr", 0.5}})).ok());
}

TEST(JobCatalogueTest, DamagedListIsDataLoss) {
  const std::string good = EncodeCatalogue(*proto::BuildCatalogue(Tensors()), OptimizerSpec());
  EXPECT_TRUE(DecodeCatalogue(good).ok());
  for (const std::string& bad : {std::string(), std::string("\x07"), good.substr(0, 7),
                                 "X" + good.substr(1), good.substr(0, 8) + "\xff\xff"}) {
    EXPECT_EQ(ErrorIdOf(DecodeCatalogue(bad).status()), ErrorId::kStoreDamaged) << bad.size();
  }
}

TEST(JobCatalogueTest, TheListOfAnotherReleaseIsRefusedWithTheWayOut) {
  const auto expect_refused = [](const std::string& stored, const std::string& text) {
    const absl::Status status = DecodeCatalogue(stored).status();
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kStoreVersion) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find("start a new job"), absl::string_view::npos) << status;
  };
  // As the first release wrote it: AdamW, and no tensors.
  expect_refused(std::string(1, '\x02'), "has version 1, this release writes and reads versions 2");
  std::string later = EncodeCatalogue(*proto::BuildCatalogue(Tensors()), OptimizerSpec());
  later[4] = 4;
  expect_refused(later, "has version 4");
}

TEST(JobCatalogueTest, StoreHasThePlanesOfTheOptimizer) {
  const auto spec = [](const OptimizerSpec& optimizer) {
    return MakeStoreSpec("job", *proto::BuildCatalogue(Tensors(), optimizer), optimizer);
  };
  const swap::StoreSpec adam = spec(OptimizerSpec());
  ASSERT_EQ(adam.tensors.size(), 3u);
  EXPECT_EQ(adam.tensors[0].planes, (std::vector<swap::PlaneSpec>{{swap::Plane::kWeight, 16},
                                                                  {swap::Plane::kResidual, 16},
                                                                  {swap::Plane::kState0, 32},
                                                                  {swap::Plane::kState1, 32},
                                                                  {swap::Plane::kTies, 1}}));
  EXPECT_EQ(adam.tensors[2].planes.size(), 1u) << "frozen: the weight alone";
  EXPECT_EQ(spec(OptimizerSpec("sgd")).tensors[0].planes.size(), 3u);
  const swap::StoreSpec amsgrad = spec(OptimizerSpec("adamw", {{"amsgrad", 1}}));
  EXPECT_EQ(amsgrad.tensors[0].planes[4], (swap::PlaneSpec{swap::Plane::kState2, 32}));
  EXPECT_EQ(amsgrad.tensors[0].planes[5].plane, swap::Plane::kTies) << "last";
}

void SetOptimizer(proto::v1::SealRequest& message) {
  const OptimizerSpec sgd("sgd");
  message.mutable_optimizer()->set_name(std::string(sgd.name()));
  message.mutable_optimizer()->mutable_parameters()->Add(sgd.values().begin(), sgd.values().end());
}

TEST(JobCatalogueTest, PlanIsJoinedFromItsMessages) {
  std::vector<proto::v1::SealRequest> messages(2);
  SetOptimizer(messages[0]);
  messages[0].set_window_bytes(8192);
  messages[0].add_weight_resident(true);
  messages[0].add_gradient_home(1);
  messages[0].add_gradient_offset(4096);
  messages[1].add_weight_resident(false);
  messages[1].add_gradient_home(2);
  messages[1].add_gradient_offset(0);
  const auto sealed = PlanFromMessages(messages);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(sealed->optimizer.name(), "sgd");
  EXPECT_EQ(sealed->plan.weight_resident, (std::vector<bool>{true, false}));
  ASSERT_EQ(sealed->plan.gradients.size(), 2u);
  EXPECT_EQ(sealed->plan.gradients[0].home, proto::GradientHome::kRegion);
  EXPECT_EQ(sealed->plan.gradients[1].home, proto::GradientHome::kScratch);
}

TEST(JobCatalogueTest, NonsensePlansAreViolations) {
  EXPECT_EQ(ErrorIdOf(PlanFromMessages({}).status()), ErrorId::kProtocol);
  std::vector<proto::v1::SealRequest> messages(1);
  messages[0].mutable_optimizer()->set_name("newton");
  EXPECT_EQ(ErrorIdOf(PlanFromMessages(messages).status()), ErrorId::kProtocol);
  messages[0].Clear();
  SetOptimizer(messages[0]);
  messages[0].add_gradient_home(1);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages(messages).status()), ErrorId::kProtocol);
  messages[0].add_gradient_offset(0);
  messages[0].set_gradient_home(0, 9);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages(messages).status()), ErrorId::kProtocol);
}

TEST(JobCatalogueTest, ATensorOfAnotherDtypeIsRefusedAsMessageAndInAStore) {
  proto::v1::DeclareTensorsRequest message;
  message.add_tensors()->set_name("weight");
  message.mutable_tensors(0)->set_dtype(static_cast<proto::v1::Dtype>(4));
  const absl::Status refused = TensorFromMessage(message.tensors(0)).status();
  EXPECT_EQ(ErrorIdOf(refused), ErrorId::kUnsupportedModel) << refused;
  EXPECT_NE(refused.message().find("\"weight\" has the unknown dtype 4"), absl::string_view::npos);
  std::string stored = EncodeCatalogue(*proto::BuildCatalogue({}), OptimizerSpec());
  message.AppendToString(&stored);  // the tensors of both messages have the same field
  EXPECT_EQ(ErrorIdOf(DecodeCatalogue(stored).status()), ErrorId::kUnsupportedModel);
}

TEST(JobCatalogueTest, APlanForMoreTensorsThanAnyJobHasIsRefusedBeforeItIsKept) {
  proto::v1::SealRequest message;
  SetOptimizer(message);
  for (uint32_t i = 0; i <= proto::kTensorsMax; ++i) message.add_weight_resident(false);
  EXPECT_EQ(ErrorIdOf(PlanFromMessages({message}).status()), ErrorId::kProtocol);
}

}  // namespace
}  // namespace offload::daemon

#include "offloadd/step_plan.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "offloadd/limits.h"

namespace offload::daemon {
namespace {

using kernels::OptimizerSpec;
using proto::v1::StepRequest;

constexpr uint64_t kGradientOffset = 1 << 20;

// Two bundled tensors, a frozen one, and a large one whose gradient is spilled.
enum Tensor : uint32_t { kBias, kFrozen, kScale, kWeight };

class StepPlanTest : public testing::Test {
 protected:
  StepPlanTest() : region_(kGradientOffset + 8192) {
    context_.catalogue =
        *proto::BuildCatalogue({{.name = "bias", .shape = {10}},
                                {.name = "frozen", .shape = {9}, .trainable = false},
                                {.name = "scale", .shape = {20}},
                                {.name = "weight", .shape = {70000}}});
    context_.plan.gradients = {
        {.home = proto::GradientHome::kRegion, .offset_bytes = kGradientOffset},
        {},
        {.home = proto::GradientHome::kRegion, .offset_bytes = kGradientOffset + 4096},
        {.home = proto::GradientHome::kScratch, .offset_bytes = 8192}};
    context_.ranks = {{.region = region_.data()}};
  }
  // Of the first group, which there is afterwards.
  static void SetOptimizer(StepRequest& message, const OptimizerSpec& optimizer) {
    message.clear_groups();
    proto::v1::Optimizer& group = *message.add_groups();
    group.set_name(std::string(optimizer.name()));
    group.mutable_parameters()->Add(optimizer.values().begin(), optimizer.values().end());
  }
  static void AddTensor(StepRequest& message, uint32_t tensor, uint32_t group = 0,
                        uint64_t update_count = 1) {
    message.add_tensors(tensor);
    message.add_group_of(group);
    message.add_update_count(update_count);
    message.add_gradient_scale(0.5f);
  }
  // A step of all trainable tensors, the members of the bundle not in their order.
  static StepRequest Good() {
    StepRequest message;
    message.set_step(3);
    SetOptimizer(message, OptimizerSpec("adamw", {{"lr", 0.5}}));
    AddTensor(message, kScale);
    AddTensor(message, kWeight, 0, 7);
    AddTensor(message, kBias);
    message.set_tensor_count(3);
    return message;
  }
  absl::StatusOr<StepPlan> Plan(const std::vector<StepRequest>& messages) const {
    return MakeStepPlan(messages, context_);
  }
  // A good step that `spoil` has changed is refused, and the text tells why.
  void ExpectRefused(const std::function<void(StepRequest&)>& spoil, const std::string& text,
                     ErrorId id = ErrorId::kProtocol) const {
    StepRequest message = Good();
    spoil(message);
    const absl::Status status = Plan({message}).status();
    EXPECT_EQ(ErrorIdOf(status), id) << status << " for " << text;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status << " for " << text;
  }

  std::vector<std::byte> region_;
  JobContext context_;
};

TEST_F(StepPlanTest, TensorsAreGatheredInTheirStoreTensorsAndSortedByPlace) {
  StepRequest first = Good(), second;
  first.set_has_trainer_state(true);
  first.set_trainer_state("here");
  const auto plan = Plan({first, second});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->step, 3u);
  EXPECT_EQ(plan->trainer_state, "here");
  ASSERT_EQ(plan->tasks.size(), 2u);
  const TaskPlan& bundle = plan->tasks[0];
  EXPECT_EQ(bundle.tensors, (std::vector<uint32_t>{kBias, kScale}));
  EXPECT_EQ(bundle.members[0].gradient, region_.data() + kGradientOffset);
  EXPECT_EQ(bundle.members[0].optimizer->Get("lr"), 0.5);
  EXPECT_EQ(bundle.members[0].step, 1);
  EXPECT_FALSE(bundle.spilled);
  const TaskPlan& weight = plan->tasks[1];
  EXPECT_TRUE(weight.spilled);
  EXPECT_EQ(weight.scratch_offset, 8192u);
  EXPECT_EQ(weight.members[0].step, 7);
  EXPECT_EQ(weight.members[0].gradient_scale, 0.5f);
}

TEST_F(StepPlanTest, AStepMayUpdateNothingAndKeepTheTrainersState) {
  const auto plan = Plan({StepRequest()});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->tasks.empty());
  EXPECT_FALSE(plan->trainer_state.has_value());
}

TEST_F(StepPlanTest, PartialStepsAreOfOneRankInAnInterval) {
  StepRequest partial = Good();
  partial.set_partial(true);
  const std::string text = "a partial step of several ranks, or outside of an interval";
  ExpectRefused([](StepRequest& step) { step.set_partial(true); }, text);
  context_.durability = {.steps = 2};
  EXPECT_TRUE(Plan({partial})->is_partial);
  EXPECT_FALSE(Plan({Good()})->is_partial);
  context_.ranks.push_back(context_.ranks.front());
  ExpectRefused([](StepRequest& step) { step.set_partial(true); }, text);
}

TEST_F(StepPlanTest, ListsThatDoNotFitTogetherAreRefused) {
  EXPECT_EQ(ErrorIdOf(Plan({}).status()), ErrorId::kProtocol);
  const std::string differ = "lists differ in length";
  ExpectRefused([](StepRequest& step) { step.add_tensors(kBias); }, differ);
  ExpectRefused([](StepRequest& step) { step.add_group_of(0); }, differ);
  ExpectRefused([](StepRequest& step) { step.add_update_count(1); }, differ);
  ExpectRefused([](StepRequest& step) { step.add_gradient_scale(1); }, differ);
}

TEST_F(StepPlanTest, TensorsThatCannotBeUpdatedAreRefused) {
  ExpectRefused([](StepRequest& step) { AddTensor(step, 4); }, "tensor 4");
  ExpectRefused([](StepRequest& step) { step.set_group_of(1, 1); }, "group 1");
  ExpectRefused([](StepRequest& step) { step.set_update_count(1, 0); }, "update 0");
  constexpr uint64_t kMostUpdates = uint64_t{1} << 53;  // a double counts so far
  ExpectRefused([](StepRequest& step) { step.set_update_count(1, kMostUpdates + 1); }, "update 9");
  ExpectRefused([](StepRequest& step) { AddTensor(step, kFrozen); }, "frozen");
  ExpectRefused([](StepRequest& step) { AddTensor(step, kBias); }, "named twice");
  StepRequest most = Good();
  most.set_update_count(1, kMostUpdates);
  EXPECT_TRUE(Plan({most}).ok());
}

TEST_F(StepPlanTest, ATensorNamedInTwoMessagesIsRefused) {
  StepRequest second;
  AddTensor(second, kBias);
  EXPECT_EQ(ErrorIdOf(Plan({Good(), second}).status()), ErrorId::kProtocol);
}

// A rank is killed between two messages: the daemon sees the end of the stream.
TEST_F(StepPlanTest, AListThatEndsEarlyIsNoStep) {
  StepRequest first = Good(), rest;
  first.set_tensor_count(4);
  EXPECT_EQ(ErrorIdOf(Plan({first}).status()), ErrorId::kProtocol);
  context_.catalogue = *proto::BuildCatalogue({{.name = "bias", .shape = {10}},
                                               {.name = "more", .shape = {9}},
                                               {.name = "scale", .shape = {20}},
                                               {.name = "weight", .shape = {70000}}});
  AddTensor(rest, 1);
  EXPECT_TRUE(Plan({first, rest}).ok());
}

TEST_F(StepPlanTest, AnOptimizerThatCannotBeIsRefused) {
  for (const double wrong : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    ExpectRefused(
        [=](StepRequest& step) {
          SetOptimizer(step, OptimizerSpec("adamw", {{"beta1", wrong}}));
        },
        "adamw with beta1");
  }
  ExpectRefused(
      [](StepRequest& step) {
        SetOptimizer(step, OptimizerSpec("adamw", {{"unscale", -1}}));
      },
      "adamw with unscale -1");
  ExpectRefused(
      [](StepRequest& step) {
        SetOptimizer(step, OptimizerSpec("adamw", {{"flavour", 3}}));
      },
      "flavour 3");
  ExpectRefused([](StepRequest& step) { step.mutable_groups(0)->add_parameters(1); },
                "adamw with 11 parameters");
  ExpectRefused([](StepRequest& step) { step.mutable_groups(0)->set_name("newton"); }, "newton");
  ExpectRefused([](StepRequest& step) { step.mutable_groups(0)->Clear(); }, "unknown optimizer");
}

TEST_F(StepPlanTest, AnOptimizerNeedsTheStateThatTheJobWasSealedWith) {
  const OptimizerSpec plain("sgd"), momentum("sgd", {{"momentum", 0.9}});
  const auto step_of = [](const OptimizerSpec& optimizer) {
    return [optimizer](StepRequest& step) { SetOptimizer(step, optimizer); };
  };
  ExpectRefused(step_of(OptimizerSpec("lamb")),
                "a step of lamb for a job that was sealed for adamw",
                ErrorId::kUnsupportedOptimizer);
  const auto seal_for = [this](const OptimizerSpec& optimizer) {
    context_.optimizer = optimizer;
    context_.catalogue = *proto::BuildCatalogue(context_.catalogue.tensors, optimizer);
  };
  seal_for(momentum);
  StepRequest sgd = Good();
  for (const OptimizerSpec& optimizer : {plain, momentum}) {
    SetOptimizer(sgd, optimizer);
    EXPECT_TRUE(Plan({sgd}).ok()) << Plan({sgd}).status();
  }
  seal_for(plain);
  ExpectRefused(step_of(momentum), "needs momentum_buffer of \"scale\"",
                ErrorId::kUnsupportedOptimizer);
  SetOptimizer(sgd, plain);
  EXPECT_TRUE(Plan({sgd}).ok()) << Plan({sgd}).status();
  ExpectRefused(step_of(OptimizerSpec("adagrad")), "needs sum of \"scale\"",
                ErrorId::kUnsupportedOptimizer);
}

// Each has its planes at the same places, whatever the job calls them.
TEST_F(StepPlanTest, OptimizersOfSeveralKindsTrainPartsOfAJob) {
  const OptimizerSpec adamw("adamw"), sgd("sgd", {{"momentum", 0.9}}), rmsprop("rmsprop");
  StepRequest step = Good();
  SetOptimizer(step, adamw);
  for (const OptimizerSpec& other : {sgd, rmsprop}) {
    proto::v1::Optimizer& group = *step.add_groups();
    group.set_name(std::string(other.name()));
    group.mutable_parameters()->Add(other.values().begin(), other.values().end());
  }
  step.set_group_of(0, 1);
  step.set_group_of(1, 2);
  const absl::StatusOr<StepPlan> plan = Plan({step});
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<std::string> names;
  for (const TaskPlan& task : plan->tasks) {
    for (const MemberUpdate& member : task.members) names.emplace_back(member.optimizer->name());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"adamw", "sgd", "rmsprop"}));
  ExpectRefused(
      [](StepRequest& step) {
        SetOptimizer(step, OptimizerSpec("rmsprop", {{"centered", 1}}));
      },
      "needs grad_avg of \"scale\"", ErrorId::kUnsupportedOptimizer);
}

TEST_F(StepPlanTest, MoreThanTheLimitsIsRefused) {
  ExpectRefused(
      [](StepRequest& step) {
        while (step.groups_size() <= static_cast<int>(kLimits.groups_max)) step.add_groups();
      },
      "4097 groups");
  ExpectRefused(
      [](StepRequest& step) {
        step.set_trainer_state(std::string(kLimits.trainer_state_bytes_max + 1, 'x'));
      },
      "a trainer state of 1048577 bytes");
}

}  // namespace
}  // namespace offload::daemon

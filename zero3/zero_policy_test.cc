#include "zero3/zero_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "zero3/planner.h"
#include "zero3/zero_stages.h"

namespace offload::zero3 {
namespace {

using proto::Dtype;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kEndless = uint64_t{1} << 40;

// Tensors of so many elements, bf16.
PlanInput Of(const std::vector<int64_t>& sizes, uint32_t world_size = 1) {
  std::vector<proto::Tensor> tensors;
  for (const int64_t elements : sizes) {
    tensors.push_back({.name = absl::StrCat("t", tensors.size()),
                       .shape = {elements},
                       .dtype = Dtype::kBFloat16});
  }
  auto catalogue = proto::BuildCatalogue(std::move(tensors));
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  return {.catalogue = *catalogue, .world_size = world_size};
}
// 64 of a mebi: 128 MiB of weights, 640 of state.
PlanInput Equal(uint32_t world_size = 1) {
  return Of(std::vector<int64_t>(64, 1 << 20), world_size);
}

Plan PlanFor(PlanInput input, uint64_t ram_bytes, const ZeroPolicy& policy = {}) {
  input.ram_bytes = ram_bytes;
  input.policy = policy;
  auto plan = MakePlan(input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : Plan();
}
uint64_t FloorOf(const PlanInput& input, const ZeroPolicy& policy = {}) {
  return PlanFor(input, kEndless, policy).floor_without_spilling_bytes;
}

TEST(ZeroPolicyTest, HomesAndStagesAreReadAndDescribed) {
  EXPECT_EQ(*ParseHome("x", "auto"), Home());
  EXPECT_EQ(*ParseHome("x", "ram"), Home(1.0));
  EXPECT_EQ(*ParseHome("x", "nvme"), Home(0.0));
  EXPECT_EQ(*ParseHome("x", "0.25"), Home(0.25));
  for (const char* text : {"", "gpu", "1.5", "-0.1", "nan", "0.5x"}) {
    const absl::Status status = ParseHome("state_home", text).status();
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kBadValue) << text;
    EXPECT_TRUE(absl::StrContains(status.message(), "state_home")) << status;
  }
  EXPECT_EQ(*CheckStage(-1), std::nullopt);
  EXPECT_EQ(*CheckStage(3), std::optional(3));
  for (const int64_t stage : {-2, 4}) EXPECT_FALSE(CheckStage(stage).ok());
  EXPECT_EQ(DescribePolicy({}), "");
  EXPECT_EQ(DescribePolicy({.stage = 3, .weights = 0.0, .state = 0.25, .max_live = 2000}),
            "ZeRO stage 3, weights nvme, state 0.25, max_live 2000");
}

TEST(ZeroPolicyTest, WithoutOneNothingChanges) {
  const PlanInput input = Equal();
  for (const uint64_t ram : {FloorOf(input), 400 * kMiB, 800 * kMiB, kEndless}) {
    const Plan plan = PlanFor(input, ram), same = PlanFor(input, ram, {.stage = 2});
    EXPECT_EQ(plan.memory.weight_resident, same.memory.weight_resident);
    EXPECT_EQ(plan.memory.state_resident, same.memory.state_resident);
    EXPECT_EQ(plan.total_bytes, same.total_bytes);
  }
}

TEST(ZeroPolicyTest, StageThreeSpendsMemoryOnTheStateFirst) {
  const PlanInput input = Equal();
  const uint64_t ram = FloorOf(input) + 120 * kMiB;
  const Plan plan = PlanFor(input, ram), third = PlanFor(input, ram, {.stage = 3});
  EXPECT_GT(plan.resident_weight_bytes, 0u);
  EXPECT_EQ(plan.resident_state_bytes, 0u);
  EXPECT_EQ(third.resident_weight_bytes, 0u);
  EXPECT_GT(third.resident_state_bytes, 40 * kMiB);
  // With room for all of the state weights follow, and with more everything stays.
  const Plan more = PlanFor(input, FloorOf(input) + 950 * kMiB, {.stage = 3});
  EXPECT_EQ(more.resident_state_bytes, 640 * kMiB);
  EXPECT_GT(more.resident_weight_bytes, 0u);
  EXPECT_EQ(PlanFor(input, kEndless, {.stage = 3}).read_bytes_per_parameter, 0);
}

TEST(ZeroPolicyTest, StagesOfRanksDifferInTheirRings) {
  const PlanInput input = Equal(/*world_size=*/4);
  EXPECT_EQ(PlanFor(input, kEndless).ring_bytes, 128 * kMiB);
  for (const int stage : {0, 1, 2, 3}) {
    const Plan rich = PlanFor(input, kEndless, {.stage = stage});
    EXPECT_EQ(rich.ring_bytes, stage < 2 ? 128 * kMiB : 8 * kMiB) << stage;
    EXPECT_EQ(rich.read_bytes_per_parameter, 0) << stage;
    EXPECT_EQ(rich.floor_bytes, PlanFor(input, kEndless).floor_bytes) << "never refused";
  }
  // Whole rings come before weights.
  const uint64_t ram = FloorOf(input) + 400 * kMiB;
  EXPECT_EQ(PlanFor(input, ram, {.stage = 1}).resident_weight_bytes, 0u);
  EXPECT_GT(PlanFor(input, ram, {.stage = 2}).resident_weight_bytes, 0u);
}

TEST(ZeroPolicyTest, WhatMustStayInMemoryIsPartOfTheFloor) {
  const PlanInput input = Equal();
  const uint64_t floor = FloorOf(input);
  // Without a window of three slots.
  EXPECT_EQ(FloorOf(input, {.weights = 1.0}), floor + 128 * kMiB - 6 * kMiB);
  EXPECT_EQ(FloorOf(input, {.weights = 0.5}), floor + 64 * kMiB);
  EXPECT_EQ(FloorOf(input, {.state = 1.0}), floor + 640 * kMiB);
  EXPECT_EQ(FloorOf(input, {.state = 0.25}), floor + 160 * kMiB);
  for (const ZeroPolicy& policy :
       {ZeroPolicy{.weights = 1.0}, ZeroPolicy{.weights = 0.5, .state = 0.25}}) {
    const Plan plan = PlanFor(input, FloorOf(input, policy), policy);
    EXPECT_EQ(plan.resident_weight_bytes, *policy.weights * 128 * kMiB);
    EXPECT_EQ(plan.resident_state_bytes, policy.state.value_or(0) * 640 * kMiB);
  }
  PlanInput refused = input;
  refused.policy.state = 1.0;
  refused.always_spill_gradients = true;
  refused.ram_bytes = 600 * kMiB;
  const absl::Status status = MakePlan(refused).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kBudgetTooSmall);
  EXPECT_TRUE(absl::StrContains(status.message(), "optimizer state 640.0 MiB")) << status;
}

TEST(ZeroPolicyTest, WhatMayNotStayPassesThroughWhateverRamThereIs) {
  const PlanInput input = Equal();
  const Plan weights = PlanFor(input, kEndless, {.weights = 0.0});
  EXPECT_EQ(weights.resident_weight_bytes, 0u);
  EXPECT_EQ(weights.resident_state_bytes, 640 * kMiB) << "and leaves room to what may";
  EXPECT_EQ(weights.read_bytes_per_parameter, 0) << "in a window that holds all of them";
  const Plan bounded = PlanFor(input, kEndless, {.weights = 0.0, .max_live = 1});
  EXPECT_NEAR(bounded.read_bytes_per_parameter, 4, 0.6) << "but for what it holds at the turns";
  const Plan state = PlanFor(input, kEndless, {.state = 0.0});
  EXPECT_EQ(state.resident_state_bytes, 0u);
  EXPECT_DOUBLE_EQ(state.read_bytes_per_parameter, 10);
  const Plan share = PlanFor(input, kEndless, {.weights = 0.25, .state = 0.5});
  EXPECT_EQ(share.resident_weight_bytes, 32 * kMiB);
  EXPECT_EQ(share.resident_state_bytes, 320 * kMiB);
}

// 64 MiB that pass need a window of 192.
TEST(ZeroPolicyTest, WhatAWindowWouldCostMoreThanStaysEvenWhenItMayNot) {
  std::vector<int64_t> sizes(29, 1 << 20);
  sizes.push_back(32 << 20);
  const PlanInput input = Of(sizes);
  const Plan plan = PlanFor(input, kEndless, {.weights = 0.0});
  EXPECT_EQ(plan.resident_weight_bytes, 64 * kMiB);
  EXPECT_EQ(plan.floor_bytes, PlanFor(input, kEndless).floor_bytes);
}

TEST(ZeroPolicyTest, PersistentWeightsAreTheFirstToStay) {
  std::vector<int64_t> sizes(40, 1 << 20);
  sizes.insert(sizes.end(), 40, 100'000);  // 195.3 KiB, in the store 196
  const PlanInput input = Of(sizes);
  const uint64_t ram = FloorOf(input) + 65 * kMiB;
  const Plan plan = PlanFor(input, ram), hinted = PlanFor(input, ram, {.persistence = 100'000});
  for (size_t i = 40; i < 80; ++i) {
    EXPECT_FALSE(plan.memory.weight_resident[i]) << i;
    EXPECT_TRUE(hinted.memory.weight_resident[i]) << i;
  }
  EXPECT_EQ(plan.floor_bytes, hinted.floor_bytes);
  const Plan paged = PlanFor(input, kEndless, {.weights = 0.0, .persistence = 100'000});
  EXPECT_EQ(paged.resident_weight_bytes, 40 * 196 * 1024u);
}

TEST(ZeroPolicyTest, TheWindowReadsAheadWhatIsAskedFor) {
  const PlanInput input = Equal();
  const uint64_t ram = FloorOf(input) + 80 * kMiB;
  EXPECT_EQ(PlanFor(input, ram, {.prefetch = 20 << 20}).memory.window_bytes, 40 * kMiB);
  EXPECT_EQ(PlanFor(input, ram, {.prefetch = 1}).memory.window_bytes, 6 * kMiB) << "three slots";
  EXPECT_LE(PlanFor(input, ram, {.prefetch = uint64_t{1} << 40}).memory.window_bytes, ram / 4);
}

TEST(ZeroPolicyTest, LiveWeightsAreBoundedAndTheStateGetsTheRest) {
  const PlanInput input = Equal();
  const Plan plan = PlanFor(input, kEndless, {.max_live = 20 << 20});
  EXPECT_LE(plan.resident_weight_bytes + plan.memory.window_bytes, 40 * kMiB);
  EXPECT_GE(plan.resident_weight_bytes, 30 * kMiB);
  EXPECT_EQ(plan.resident_state_bytes, 640 * kMiB);
  EXPECT_EQ(PlanFor(input, kEndless, {.max_live = 1}).memory.window_bytes, 6 * kMiB);
}

TEST(ZeroPolicyTest, ADeeperPipelineIsBoughtBeforeWeights) {
  PlanInput input = Equal();
  input.good_pipeline_blocks = 40;
  EXPECT_EQ(PlanFor(input, kEndless).memory.pipeline_blocks, 40u);
  EXPECT_EQ(PlanFor(input, FloorOf(input)).memory.pipeline_blocks, 2u);
  const Plan plan = PlanFor(input, FloorOf(input) + 20 * kMiB);
  EXPECT_EQ(plan.memory.pipeline_blocks, 10u);
  EXPECT_EQ(plan.resident_weight_bytes, 0u);
}

ZeroPolicy RandomPolicy(Random& random) {
  const Home homes[] = {Home(), Home(), 0.0, 1.0, random.Unit()};
  const uint64_t elements[] = {0, 0, 40'000, 1 << 20, 100 << 20};
  ZeroPolicy policy;
  if (!random.OneIn(3)) policy.stage = static_cast<int>(random.Below(4));
  policy.weights = homes[random.Below(5)];
  policy.state = homes[random.Below(5)];
  policy.persistence = elements[random.Below(5)];
  policy.prefetch = elements[random.Below(5)];
  policy.max_live = elements[random.Below(5)];
  return policy;
}

TEST(ZeroPolicyTest, SumsHoldFloorsAreExactAndMoreRamNeverMeansMoreTraffic) {
  Random random(11);
  const int64_t sizes[] = {1, 1000, 32769, 300'000, 1 << 20, 3 << 20, 10'000'019};
  for (int model = 0; model < 120; ++model) {
    std::vector<int64_t> chosen(1 + random.Below(20));
    for (int64_t& size : chosen) size = sizes[random.Below(7)];
    PlanInput input = Of(chosen, static_cast<uint32_t>(1 + random.Below(3)));
    input.always_spill_gradients = random.OneIn(4);
    const ZeroPolicy policy = RandomPolicy(random);
    SCOPED_TRACE(absl::StrCat("model ", model, ": ", DescribePolicy(policy)));
    const Plan rich = PlanFor(input, kEndless, policy);
    input.policy = policy;
    input.ram_bytes = rich.floor_bytes - 1;
    EXPECT_EQ(ErrorIdOf(MakePlan(input).status()), ErrorId::kBudgetTooSmall);
    double last = 1e9;
    for (int step = 0; step <= 60; ++step) {
      const uint64_t ram =
          rich.floor_bytes + (rich.total_bytes * 5 / 4 - rich.floor_bytes) * step / 60;
      const Plan plan = PlanFor(input, ram, policy);
      EXPECT_LE(plan.total_bytes, ram);
      const double traffic = plan.read_bytes_per_parameter + plan.write_bytes_per_parameter;
      // What a window saves at the turns is counted, but not planned for: where homes are demanded
      // one that holds nearly all may give way to weights that stay and a smaller one.
      EXPECT_LE(traffic, 1.25 * last) << "step " << step;
      last = traffic;
      if (HasFailure()) return;
    }
  }
}

// ---- What the stages save ----------------------------------------------------------------------

TEST(ZeroStagesTest, WhatAStageDividesIsThereOnce) {
  PlanInput input = Equal(/*world_size=*/4);
  input.ram_bytes = kEndless;
  const auto costs = CompareStages(input);
  // Weights and gradients 128 MiB each, state 640.
  EXPECT_EQ(costs[0].unshared_bytes, 4 * (128 + 128 + 640) * kMiB);
  EXPECT_EQ(costs[1].unshared_bytes, (4 * (128 + 128) + 640) * kMiB);
  EXPECT_EQ(costs[2].unshared_bytes, (4 * 128 + 128 + 640) * kMiB);
  EXPECT_EQ(costs[3].unshared_bytes, (128 + 128 + 640) * kMiB);
  EXPECT_EQ(costs[0].whole_bytes, costs[1].whole_bytes);
  EXPECT_EQ(costs[1].whole_bytes - costs[2].whole_bytes, 4 * (128 - 8) * kMiB) << "the rings";
  EXPECT_LT(costs[0].whole_bytes, costs[0].unshared_bytes);
}

TEST(ZeroStagesTest, TheTableShowsWhatEachMovesWithinTheBudget) {
  PlanInput input = Equal(/*world_size=*/2);
  input.ram_bytes = FloorOf(input) + 300 * kMiB;
  const auto costs = CompareStages(input);
  EXPECT_LT(costs[2].read_bytes, costs[1].read_bytes) << "the rings take memory from weights";
  EXPECT_LT(costs[2].read_bytes, costs[3].read_bytes) << "a byte of weights is read twice";
  const std::string text = DescribeStages(input);
  EXPECT_TRUE(absl::StrContains(text, "2 ranks of one node")) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 6);
  input.ram_bytes = 1;
  EXPECT_TRUE(absl::StrContains(DescribeStages(input), "too small"));
}

}  // namespace
}  // namespace offload::zero3

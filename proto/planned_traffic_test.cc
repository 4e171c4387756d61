#include "proto/planned_traffic.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace offload::proto {
namespace {

constexpr uint64_t kElements = 2 * kExtentElements;
constexpr uint64_t kWeight = kElements * 2;  // bytes of a bf16 tensor
constexpr uint64_t kState = kElements * 10;  // residual and moments

// Equal bf16 tensors that all pass through a window of `slots` of them.
struct Model {
  explicit Model(uint32_t count, uint64_t slots, bool trainable = true) {
    std::vector<Tensor> tensors;
    for (uint32_t i = 0; i < count; ++i) {
      tensors.push_back({.name = absl::StrCat("t", i),
                         .shape = {static_cast<int64_t>(kElements)},
                         .dtype = Dtype::kBFloat16,
                         .trainable = trainable || i == 0});
    }
    catalogue = *BuildCatalogue(std::move(tensors), kernels::OptimizerSpec());
    plan.window_bytes = slots * kWeight;
    plan.weight_resident.assign(count, false);
    plan.state_resident.assign(count, 0);
    plan.gradients.resize(count);
  }
  StepTraffic Traffic(const std::vector<uint32_t>& touches) const {
    return PlanTraffic(catalogue, plan, touches);
  }
  Catalogue catalogue;
  MemoryPlan plan;
};

// Forward and backward, so often.
std::vector<uint32_t> Passes(uint32_t tensors, uint32_t passes) {
  std::vector<uint32_t> touches;
  for (uint32_t pass = 0; pass < passes; ++pass) {
    for (uint32_t i = 0; i < tensors; ++i) touches.push_back(i);
    for (uint32_t i = tensors; i-- > 0;) touches.push_back(i);
  }
  return touches;
}

TEST(PlannedTrafficTest, WithoutAnOrderForwardAndBackwardReadEveryWeight) {
  const StepTraffic traffic = Model(10, 3).Traffic({});
  EXPECT_FALSE(traffic.order_known);
  EXPECT_EQ(traffic.weight_read_bytes, 10 * 2 * kWeight);
  EXPECT_EQ(traffic.state_read_bytes, 10 * kState);
  EXPECT_EQ(traffic.WrittenBytes(), 10 * (kWeight + kState));
  EXPECT_EQ(traffic.checkpoint_bytes, 0u);
}

TEST(PlannedTrafficTest, WhatTheWindowStillHoldsWhereTheOrderTurnsIsNotReadAgain) {
  const StepTraffic traffic = Model(10, 3).Traffic(Passes(10, 1));
  EXPECT_TRUE(traffic.order_known);
  // At each of the two turns three tensors are still there.
  EXPECT_EQ(traffic.weight_read_bytes, (20 - 2 * 3) * kWeight);
  EXPECT_EQ(traffic.state_read_bytes, 10 * kState);
  EXPECT_EQ(traffic.passes, 1u);
}

TEST(PlannedTrafficTest, MicroBatchesReadWeightsAgainAndBlocksInTurnDoNot) {
  const StepTraffic ordinary = Model(10, 3).Traffic(Passes(10, 4));
  EXPECT_EQ(ordinary.passes, 4u);
  EXPECT_EQ(ordinary.weight_read_bytes, (80 - 8 * 3) * kWeight);
  std::vector<uint32_t> vertical;  // blocks of two, four micro-batches each
  for (const bool backward : {false, true}) {
    for (uint32_t block = 0; block < 5; ++block) {
      const uint32_t first = 2 * (backward ? 4 - block : block);
      for (uint32_t batch = 0; batch < 4; ++batch)
        vertical.insert(vertical.end(), {first, first + 1, first + 1, first});
    }
  }
  const StepTraffic traffic = Model(10, 3).Traffic(vertical);
  EXPECT_EQ(traffic.passes, 1u);
  EXPECT_EQ(traffic.weight_read_bytes, (20 - 2 * 3) * kWeight);
}

TEST(PlannedTrafficTest, WhatStaysIsWrittenByCheckpointsOnly) {
  Model model(10, 3);
  model.plan.weight_resident[4] = true;
  model.plan.state_resident[4] = 2;
  model.plan.state_resident[5] = 1;
  const StepTraffic traffic = model.Traffic({});
  EXPECT_EQ(traffic.weight_read_bytes, 9 * 2 * kWeight);
  EXPECT_EQ(traffic.state_read_bytes, 17 * kState / 2);
  EXPECT_EQ(traffic.checkpoint_bytes, kWeight + 3 * kState / 2);
  EXPECT_EQ(traffic.WrittenBytes() + traffic.checkpoint_bytes, 10 * (kWeight + kState));
  model.plan.weight_resident.assign(10, true);
  model.plan.state_resident.assign(10, 2);
  const StepTraffic none = model.Traffic({});
  EXPECT_TRUE(none.order_known);
  EXPECT_EQ(none.ReadBytes() + none.WrittenBytes(), 0u);
}

TEST(PlannedTrafficTest, SpilledGradientsCrossTheDriveTwiceAPass) {
  Model model(10, 3);
  for (GradientPlacement& gradient : model.plan.gradients) gradient.home = GradientHome::kScratch;
  EXPECT_EQ(model.Traffic({}).gradient_read_bytes, 10 * kWeight);
  const StepTraffic traffic = model.Traffic(Passes(10, 4));
  EXPECT_EQ(traffic.gradient_read_bytes, 40 * kWeight);
  EXPECT_EQ(traffic.gradient_written_bytes, 40 * kWeight);
}

TEST(PlannedTrafficTest, WhatIsFrozenOrNotTouchedIsNotUpdated) {
  const StepTraffic frozen = Model(10, 3, /*trainable=*/false).Traffic({});
  EXPECT_EQ(frozen.weight_read_bytes, 20 * kWeight);
  EXPECT_EQ(frozen.state_read_bytes, kState);
  EXPECT_EQ(frozen.WrittenBytes(), kWeight + kState);
  const StepTraffic half = Model(10, 3).Traffic(Passes(5, 1));
  EXPECT_EQ(half.state_read_bytes, 5 * kState);
  EXPECT_EQ(half.weight_read_bytes, (10 - 2 * 3) * kWeight);
}

}  // namespace
}  // namespace offload::proto

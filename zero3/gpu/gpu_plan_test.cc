#include "zero3/gpu/gpu_plan.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// Ten weights of 10 MiB, of which one is frozen, and one of 20.
std::vector<GpuTensor> Model() {
  std::vector<GpuTensor> tensors(10, {10 * kMiB, 10 * kMiB});
  tensors[0].gradient_bytes = 0;
  tensors.push_back({20 * kMiB, 20 * kMiB});
  return tensors;
}

TEST(GpuPlanTest, TheFloorIsAWindowOfThreeAndTwoGradients) {
  const auto plan = MakeGpuPlan(Model(), 100 * kMiB);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->floor_bytes, 100 * kMiB);
  EXPECT_EQ(plan->window_bytes, 60 * kMiB);
  EXPECT_EQ(plan->gradient_bytes, 40 * kMiB);
  EXPECT_EQ(plan->lookahead_bytes, 20 * kMiB);
}

TEST(GpuPlanTest, BelowTheFloorItIsRefusedWithTheSum) {
  const absl::Status status = MakeGpuPlan(Model(), 100 * kMiB - 1).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kGpuMemory);
  EXPECT_THAT(status.ToString(), testing::HasSubstr("it takes 100.0 MiB: 60.0 MiB for a window"));
  EXPECT_THAT(status.ToString(), testing::HasSubstr("Set gpu_ram to 104857600 bytes or more"));
}

TEST(GpuPlanTest, TheSumNeverExceedsGpuRamAndMoreIsNeverLess) {
  GpuPlan last;
  for (uint64_t gpu_ram_bytes = 100 * kMiB; gpu_ram_bytes < 300 * kMiB; gpu_ram_bytes += 777777) {
    const GpuPlan plan = *MakeGpuPlan(Model(), gpu_ram_bytes);
    EXPECT_LE(plan.window_bytes + plan.gradient_bytes, gpu_ram_bytes);
    EXPECT_GE(plan.window_bytes, last.window_bytes);
    EXPECT_GE(plan.gradient_bytes, last.gradient_bytes);
    EXPECT_EQ(plan.window_bytes % kDeviceAlignment, 0u);
    EXPECT_LE(plan.lookahead_bytes, plan.window_bytes);
    last = plan;
  }
  // Everything fits, and nothing takes more than there is.
  EXPECT_EQ(last.window_bytes, 120 * kMiB);
  EXPECT_EQ(last.lookahead_bytes, 120 * kMiB);
  EXPECT_EQ(last.gradient_bytes, 110 * kMiB);
  EXPECT_EQ(MakeGpuPlan(Model(), 230 * kMiB)->gradient_bytes, 110 * kMiB);
}

// The same, of which all but the frozen one could be updated there.
std::vector<GpuTensor> ModelWithState() {
  std::vector<GpuTensor> tensors = Model();
  for (GpuTensor& tensor : tensors) tensor.state_bytes = 5 * tensor.gradient_bytes;
  return tensors;
}

TEST(GpuPlanTest, TheTierBeginsWhereAllWeightsAndGradientsFit) {
  struct Case {
    uint64_t rest_bytes;  // beside those
    size_t tensors;
    uint64_t weight_bytes, state_bytes;
  };
  const Case cases[] = {
      {0, 0, 0, 0},
      {50 * kMiB, 0, 0, 0},  // the window keeps a place
      {50 * kMiB + kDeviceAlignment, 1, 10 * kMiB, 50 * kMiB},
      {149 * kMiB, 2, 20 * kMiB, 100 * kMiB},
      {500 * kMiB, 9, 90 * kMiB, 450 * kMiB},  // the largest does not fit into what is left
      {551 * kMiB, 10, 110 * kMiB, 550 * kMiB},
  };
  const uint64_t without = 120 * kMiB + 110 * kMiB;
  for (const Case& expected : cases) {
    const uint64_t gpu_ram_bytes = without + expected.rest_bytes;
    const GpuPlan plan = *MakeGpuPlan(ModelWithState(), gpu_ram_bytes);
    EXPECT_EQ(std::count(plan.stays.begin(), plan.stays.end(), true),
              static_cast<int64_t>(expected.tensors))
        << expected.rest_bytes;
    EXPECT_EQ(plan.tier_weight_bytes, expected.weight_bytes);
    EXPECT_EQ(plan.tier_state_bytes, expected.state_bytes);
    EXPECT_EQ(plan.window_bytes + plan.tier_weight_bytes, 120 * kMiB);
    EXPECT_EQ(plan.lookahead_bytes, plan.window_bytes);
    EXPECT_EQ(plan.gradient_bytes, 110 * kMiB);
    EXPECT_EQ(plan.state_bytes, 550 * kMiB);
    EXPECT_LE(plan.total_bytes(), gpu_ram_bytes);
    EXPECT_FALSE(plan.Stays(0)) << "it is frozen";
    EXPECT_FALSE(plan.Stays(11)) << "there is none";
  }
  const GpuPlan less = *MakeGpuPlan(ModelWithState(), without - kMiB);
  EXPECT_TRUE(less.stays.empty());
}

TEST(GpuPlanTest, ATableOfTheUpdatesHasItsRoomInTheTier) {
  const uint64_t without = 120 * kMiB + 110 * kMiB + kDeviceAlignment;
  EXPECT_TRUE(MakeGpuPlan(ModelWithState(), without + 54 * kMiB - 1, 4 * kMiB)->stays.empty());
  const GpuPlan plan = *MakeGpuPlan(ModelWithState(), without + 54 * kMiB, 4 * kMiB);
  EXPECT_EQ(plan.tier_state_bytes, 54 * kMiB);
  EXPECT_EQ(plan.total_bytes(), 120 * kMiB + 110 * kMiB + 54 * kMiB);
}

TEST(GpuPlanTest, WhereAllStaysTheWindowHasAPlace) {
  const std::vector<GpuTensor> tensors(3, {kMiB, kMiB, 4 * kMiB});
  const GpuPlan plan = *MakeGpuPlan(tensors, 18 * kMiB + kDeviceAlignment);
  EXPECT_EQ(plan.tier_bytes(), 15 * kMiB);
  EXPECT_EQ(plan.window_bytes, kDeviceAlignment);
  EXPECT_EQ(plan.total_bytes(), 18 * kMiB + kDeviceAlignment);
}

TEST(GpuPlanTest, ThePlanSaysWhatIsUpdatedThereOrWhyNothingIs) {
  EXPECT_THAT(DescribeGpuPlan(*MakeGpuPlan(ModelWithState(), 400 * kMiB), 400 * kMiB),
              testing::HasSubstr("updated on the device: 3 tensors, 30.0 MiB of weights with "
                                 "150.0 MiB of optimizer state; put into the job at checkpoints"));
  EXPECT_THAT(DescribeGpuPlan(*MakeGpuPlan(ModelWithState(), 200 * kMiB), 200 * kMiB),
              testing::HasSubstr("updated on the device: nothing, since gpu_ram has no room"));
  EXPECT_THAT(DescribeGpuPlan(*MakeGpuPlan(Model(), 200 * kMiB), 200 * kMiB, "it rains"),
              testing::HasSubstr("updated on the device: nothing, since it rains"));
}

TEST(GpuPlanTest, ASmallModelNeedsNoMoreThanItself) {
  const std::vector<GpuTensor> tensors = {{100, 100}};
  const GpuPlan plan = *MakeGpuPlan(tensors, kMiB);
  EXPECT_EQ(plan.floor_bytes, 2 * kDeviceAlignment);
  EXPECT_EQ(plan.window_bytes, kDeviceAlignment);
  EXPECT_THAT(DescribeGpuPlan(plan, kMiB), testing::StartsWith("gpu_ram: 1.0 MiB, window"));
}

}  // namespace
}  // namespace offload::zero3

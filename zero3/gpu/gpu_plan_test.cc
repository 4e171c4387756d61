#include "zero3/gpu/gpu_plan.h"

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

TEST(GpuPlanTest, ASmallModelNeedsNoMoreThanItself) {
  const std::vector<GpuTensor> tensors = {{100, 100}};
  const GpuPlan plan = *MakeGpuPlan(tensors, kMiB);
  EXPECT_EQ(plan.floor_bytes, 2 * kDeviceAlignment);
  EXPECT_EQ(plan.window_bytes, kDeviceAlignment);
  EXPECT_THAT(DescribeGpuPlan(plan, kMiB), testing::StartsWith("gpu_ram: 1.0 MiB, window"));
}

}  // namespace
}  // namespace offload::zero3

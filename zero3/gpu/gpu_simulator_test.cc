#include "zero3/gpu/gpu_simulator.h"

#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kSeeds = 5000, kSeedsOfMistakes = 500;

TEST(GpuSimulatorTest, EverythingHoldsForThousandsOfSeeds) {
  GpuSimulationResult sum;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const GpuSimulationResult result = SimulateGpu({.seed = seed});
    ASSERT_EQ(result.violation, "") << "seed " << seed;
    sum.Add(result);
  }
  // What is not met is not tested.
  EXPECT_GT(sum.misses, kSeeds);
  EXPECT_GT(sum.prefetches, kSeeds);
  EXPECT_GT(sum.gradients, kSeeds);
  EXPECT_GT(sum.side_streams, kSeeds);
  EXPECT_GT(sum.refused_captures, kSeeds);
  EXPECT_GT(sum.staged_runs, kSeeds / 10);
  EXPECT_GT(sum.broken_devices, kSeeds / 10);
}

TEST(GpuSimulatorTest, ASeedIsAlwaysTheSameRun) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    EXPECT_EQ(SimulateGpu({.seed = seed}).trace_hash, SimulateGpu({.seed = seed}).trace_hash);
  }
}

class MistakeTest : public testing::TestWithParam<Mistake> {};
INSTANTIATE_TEST_SUITE_P(Every, MistakeTest, testing::ValuesIn(kMistakes),
                         [](const testing::TestParamInfo<Mistake>& info) {
                           std::string name = MistakeName(info.param);
                           std::erase_if(name, [](char c) { return c == ' ' || c == '_'; });
                           return name;
                         });

TEST_P(MistakeTest, IsFoundInEveryRun) {
  uint64_t runs_with_wrong_bytes = 0;
  for (uint64_t seed = 0; seed < kSeedsOfMistakes; ++seed) {
    const GpuSimulationResult result = SimulateGpu({.seed = seed, .mistake = GetParam()});
    ASSERT_NE(result.violation, "") << "seed " << seed;
    runs_with_wrong_bytes += result.wrong_weights + result.wrong_gradients > 0 ? 1 : 0;
  }
  // It is a mistake, and one that the bytes alone do not always show.
  EXPECT_GT(runs_with_wrong_bytes, 0u);
  EXPECT_LT(runs_with_wrong_bytes, kSeedsOfMistakes);
}

}  // namespace
}  // namespace offload::zero3

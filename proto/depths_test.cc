#include "proto/depths.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace offload::proto {
namespace {

MachineRates Rates(double read_gbps, double write_gbps, double latency_us, uint32_t cores) {
  return {.read_bytes_per_second = read_gbps * 1e9,
          .write_bytes_per_second = write_gbps * 1e9,
          .latency_seconds = latency_us * 1e-6,
          .cores = cores};
}

TEST(DepthsTest, OneDriveAndFewCoresHaveTheFloors) {
  const Depths floors{.update_threads = 1};
  for (const double gbps : {0.1, 0.5, 1.0, 2.0})
    EXPECT_EQ(ChooseDepths(Rates(gbps, gbps, 100, 2)), floors) << gbps;
  EXPECT_EQ(ChooseDepths(Rates(2, 2, 100, 1)), floors);
}

TEST(DepthsTest, WhatIsNotMeasuredHasTheFloorsAndHalfOfTheCoresUpToFour) {
  for (const auto& [cores, threads] :
       {std::pair{0u, 1u}, {1u, 1u}, {2u, 1u}, {4u, 2u}, {8u, 4u}, {128u, 4u}}) {
    const Depths depths = ChooseDepths({.cores = cores});
    EXPECT_EQ(depths.update_threads, threads) << cores;
    EXPECT_EQ(depths.loads, Depths().loads);
    EXPECT_EQ(depths.write_backs, Depths().write_backs);
  }
}

// 14 bytes read for each element at 28 GB/s are two elements a nanosecond, of 9.1 ns each.
TEST(DepthsTest, ThreadsFollowTheSlowerDirectionUpToHalfOfTheCores) {
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 100, 128)).update_threads, 19u);
  EXPECT_EQ(ChooseDepths(Rates(100, 24, 100, 128)).update_threads, 19u);
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 100, 16)).update_threads, 8u);
  EXPECT_EQ(ChooseDepths(Rates(7, 6, 100, 128)).update_threads, 5u);
}

TEST(DepthsTest, AWrittenByteCostsAsManyAsAreReadMeanwhile) {
  EXPECT_EQ(WriteCost(Rates(6, 2, 100, 8)), 3);
  EXPECT_EQ(WriteCost(Rates(2, 6, 100, 8)), 1);
  EXPECT_EQ(WriteCost(Rates(1000, 1, 100, 8)), kWriteCostMax);
  EXPECT_EQ(WriteCost({.cores = 8}), kWriteCost) << "not measured";
}

TEST(DepthsTest, ThreadsThatWereAskedForAreTaken) {
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 100, 128), 3).update_threads, 3u);
  EXPECT_EQ(ChooseDepths(Rates(1, 1, 100, 2), 40).update_threads, 40u);
}

// 19 threads with two extents each and two on the way in each direction, which 500 us of latency
// make more: 28 GB/s are 7629 extents a second.
TEST(DepthsTest, ThePipelineHoldsWhatItsThreadsAndTheLatencyTake) {
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 100, 128)).pipeline_blocks, 2 * 19 + 2 * (1 + 1));
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 500, 128)).pipeline_blocks, 2 * 19 + 2 * (1 + 4));
  // Seven threads cannot use what the drive feeds: 7 / 2.4 ms are 2934 extents a second.
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 500, 128), 7).pipeline_blocks, 2 * 7 + 2 * (1 + 2));
  EXPECT_EQ(ChooseDepths(Rates(28, 100, 500, 128), 3).pipeline_blocks, Depths().pipeline_blocks);
}

// 28 GB/s and 1.1 ms are 30.8 MB, in weights of 512 KiB 59.
TEST(DepthsTest, LoadsAreTwiceTheBytesOfALatency) {
  EXPECT_EQ(ChooseDepths(Rates(28, 28, 100, 64)).loads, 2 * 59u);
  EXPECT_EQ(ChooseDepths(Rates(28, 28, 100, 64)).transfers, 59u);
  EXPECT_EQ(ChooseDepths(Rates(28, 28, 2000, 64)).loads, 2 * 161u);
  EXPECT_EQ(ChooseDepths(Rates(28, 28, 2000, 64)).write_backs, 2 * 27u);
}

TEST(DepthsTest, NothingGrowsWithoutEnd) {
  const Depths depths = ChooseDepths(Rates(1e6, 1e6, 1e6, 4096));
  EXPECT_EQ(depths.update_threads, 2048u);
  EXPECT_EQ(depths.pipeline_blocks, kPipelineBlocksGoodMax);
  EXPECT_EQ(depths.loads, 512u);
  EXPECT_EQ(depths.transfers, 256u);
  EXPECT_EQ(depths.write_backs, 128u);
}

TEST(DepthsTest, AFasterDriveIsNeverServedByLess) {
  Depths last = ChooseDepths({.cores = 64});
  for (double gbps = 0.25; gbps < 300; gbps *= 2) {
    const Depths depths = ChooseDepths(Rates(gbps, gbps, 80, 64));
    EXPECT_GE(depths.update_threads, last.update_threads);
    EXPECT_GE(depths.pipeline_blocks, last.pipeline_blocks);
    EXPECT_GE(depths.loads, last.loads);
    EXPECT_GE(depths.write_backs, last.write_backs);
    last = depths;
  }
}

}  // namespace
}  // namespace offload::proto

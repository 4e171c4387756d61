#include "offloadd/plan_depths.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

proto::MachineRates Cores(uint32_t cores) {
  return {.read_bytes_per_second = 1e9,
          .write_bytes_per_second = 1e9,
          .latency_seconds = 1e-4,
          .cores = cores};
}

// A trained tensor of so many extents, and a frozen one, which keeps nothing.
proto::Catalogue Model(int64_t extents) {
  return *proto::BuildCatalogue(
      {{.name = "trained", .shape = {extents, proto::kExtentElements}},
       {.name = "frozen", .shape = {extents, proto::kExtentElements}, .trainable = false}});
}

proto::MemoryPlan Keeping(const proto::Catalogue& catalogue, uint32_t extents) {
  proto::MemoryPlan plan;
  for (const proto::StoreTensor& tensor : catalogue.store_tensors)
    plan.state_resident.push_back(tensor.trainable ? extents : 0);
  return plan;
}

uint32_t Threads(uint32_t cores, uint32_t extents, uint32_t kept, uint32_t asked = 0) {
  const proto::Catalogue catalogue = Model(extents);
  return DepthsOfPlan(Cores(cores), asked, catalogue, Keeping(catalogue, kept)).update_threads;
}

TEST(PlanDepthsTest, WhatIsUpdatedFromMemoryTakesAllOfAFewCores) {
  for (const auto& [cores, threads] :
       {std::pair{1u, 1u}, {2u, 2u}, {3u, 3u}, {4u, 4u}, {6u, 4u}, {8u, 4u}, {128u, 4u}})
    EXPECT_EQ(Threads(cores, 100, 100), threads) << cores;
}

TEST(PlanDepthsTest, EveryThreadHasExtentsOfItsOwn) {
  EXPECT_EQ(Threads(4, 1, 1), 2u) << "half of the cores, as ever";
  EXPECT_EQ(Threads(2, 15, 15), 1u);
  EXPECT_EQ(Threads(2, 16, 16), 2u);
  EXPECT_EQ(Threads(4, 24, 24), 3u);
}

TEST(PlanDepthsTest, WhereOneExtentIsReadTheDrivePacesTheUpdate) {
  EXPECT_EQ(Threads(2, 100, 99), 1u);
  EXPECT_EQ(Threads(4, 100, 0), 2u);
}

TEST(PlanDepthsTest, ThreadsThatWereAskedForAreTaken) {
  EXPECT_EQ(Threads(4, 100, 100, 1), 1u);
  EXPECT_EQ(Threads(2, 100, 100, 7), 7u);
}

// Blocks would be taken from the state that stays.
TEST(PlanDepthsTest, NothingElseIsDeeper) {
  const proto::Catalogue catalogue = Model(100);
  proto::Depths depths = DepthsOfPlan(Cores(4), 0, catalogue, Keeping(catalogue, 100));
  proto::Depths usual = proto::ChooseDepths(Cores(4));
  depths.update_threads = usual.update_threads;
  EXPECT_EQ(depths, usual);
}

}  // namespace
}  // namespace offload::daemon

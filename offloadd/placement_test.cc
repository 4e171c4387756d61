#include "offloadd/placement.h"

#include <gtest/gtest.h>

namespace offload::daemon {
namespace {

const std::vector<NumaNode> kTwo = {{0, {0, 1, 4, 5}}, {1, {2, 3, 6, 7}}};
const CpuList kAll = {0, 1, 2, 3, 4, 5, 6, 7};

Placement OfAdministrator(const CpuList& own, const CpuList& processors) {
  return Place(kTwo, own, processors, /*is_private=*/false);
}
Placement OfRanks(const CpuList& own, const CpuList& processors) {
  return Place(kTwo, own, processors, /*is_private=*/true);
}

TEST(PlacementTest, MemoryOfOneNodeIsNotPlaced) {
  for (const std::vector<NumaNode>& nodes :
       {std::vector<NumaNode>{}, std::vector<NumaNode>{{0, kAll}}}) {
    for (const bool is_private : {false, true})
      EXPECT_TRUE(Place(nodes, kAll, {0, 1}, is_private).nodes.empty());
    EXPECT_TRUE(Place(nodes, kAll, {0, 1}, /*is_private=*/false).processors.empty());
  }
}

TEST(PlacementTest, WhoComputesAnywhereHasMemoryOnAllNodes) {
  for (const CpuList& processors : {CpuList{}, kAll}) {
    for (const Placement& placement :
         {OfAdministrator(kAll, processors), OfRanks(kAll, processors)}) {
      EXPECT_EQ(placement.nodes, (CpuList{0, 1}));
      EXPECT_TRUE(placement.processors.empty());
    }
  }
  EXPECT_EQ(OfAdministrator(kAll, {1, 2}).nodes, (CpuList{0, 1}));
}

TEST(PlacementTest, WhoComputesOnOneNodeHasMemoryAndUpdatesThere) {
  const Placement placement = OfAdministrator(kAll, {6, 7});
  EXPECT_EQ(placement.nodes, CpuList{1});
  EXPECT_EQ(placement.processors, (CpuList{2, 3, 6, 7}));
}

TEST(PlacementTest, AnAdministratorsDaemonStaysWhereItWasStarted) {
  EXPECT_EQ(OfAdministrator({0, 1, 2}, {2, 3}).processors, CpuList{2});
  // It may only be elsewhere.
  EXPECT_EQ(OfAdministrator({0, 1}, {2, 3}).nodes, CpuList{1});
  EXPECT_TRUE(OfAdministrator({0, 1}, {2, 3}).processors.empty());
}

TEST(PlacementTest, AnOwnDaemonRunsWhereItsRanksDo) {
  EXPECT_EQ(OfRanks({4}, {4, 5, 6}).processors, (CpuList{4, 5, 6}));
  EXPECT_EQ(OfRanks({4}, {4, 5, 6}).nodes, (CpuList{0, 1}));
  EXPECT_EQ(OfRanks(kAll, {2, 3}).processors, (CpuList{2, 3}));
  EXPECT_TRUE(OfRanks({2, 3}, {2, 3}).processors.empty());
  EXPECT_TRUE(OfRanks({4}, {}).processors.empty());
  EXPECT_EQ(Place({}, {0}, {0, 1}, /*is_private=*/true).processors, (CpuList{0, 1}));
}

TEST(PlacementTest, ProcessorsOfNoNodeAreNobodys) {
  const Placement placement = OfAdministrator(kAll, {8});
  EXPECT_TRUE(placement.nodes.empty());
  EXPECT_TRUE(placement.processors.empty());
}

}  // namespace
}  // namespace offload::daemon

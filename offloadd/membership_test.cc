#include "offloadd/membership.h"

#include <functional>

#include "base/error.h"
#include "gtest/gtest.h"
#include "offloadd/limits.h"

namespace offload::daemon {
namespace {

using proto::v1::OpenJobRequest;
using proto::v1::World;

World WorldOfRank(uint32_t rank, uint32_t world_size) {
  World world;
  world.set_run_id("launch");
  world.set_rank(rank);
  world.set_world_size(world_size);
  world.set_local_world_size(world_size);
  world.set_library_version("1");
  return world;
}

OpenJobRequest RequestOf(const World& world) {
  OpenJobRequest request;
  request.set_ram_bytes(1 << 30);
  *request.mutable_world() = world;
  return request;
}

void ExpectError(const absl::Status& status, ErrorId id, const std::string& text) {
  EXPECT_EQ(ErrorIdOf(status), id) << status;
  EXPECT_NE(status.message().find(text), absl::string_view::npos) << status << " for " << text;
}

// ---- Worlds ------------------------------------------------------------------------------------

TEST(WorldTest, WhoSaysNothingIsAlone) {
  const auto world = WorldOf(OpenJobRequest());
  ASSERT_TRUE(world.ok()) << world.status();
  EXPECT_EQ(world->world_size(), 1u);
  EXPECT_EQ(world->rank(), 0u);
}

TEST(WorldTest, WorldsThatCannotBeAreRefusedWithTheWayOut) {
  const struct {
    std::function<void(World&)> spoil;
    const char* text;
  } kCases[] = {
      {[](World& world) { world.set_world_size(0); }, "a world of 0 ranks"},
      {[](World& world) { world.set_world_size(kLimits.ranks_max + 1); }, "a world of 65 ranks"},
      {[](World& world) { world.set_rank(4); }, "rank 4 in a world of 4 ranks"},
      {[](World& world) { world.set_local_world_size(2); }, "several nodes are not supported"},
      {[](World& world) { world.set_run_id(""); }, "a launch without an id"},
  };
  for (const auto& bad : kCases) {
    World world = WorldOfRank(1, 4);
    bad.spoil(world);
    ExpectError(WorldOf(RequestOf(world)).status(), ErrorId::kBadValue, bad.text);
  }
  EXPECT_TRUE(WorldOf(RequestOf(WorldOfRank(1, 4))).ok());
}

TEST(WorldTest, RanksAreNamedAsPeopleDo) {
  EXPECT_EQ(NameRanks({2}), "rank 2");
  EXPECT_EQ(NameRanks({0, 3}), "ranks 0 and 3");
  EXPECT_EQ(NameRanks({0, 3, 4}), "ranks 0, 3 and 4");
}

// ---- Members -----------------------------------------------------------------------------------

class MembershipTest : public testing::Test {
 protected:
  absl::Status Add(uint32_t rank, pid_t pid = 100,
                   const std::function<void(World&, OpenJobRequest&)>& change = {}) {
    World world = WorldOfRank(rank, 4);
    OpenJobRequest request = RequestOf(world);
    if (change) change(world, request);
    return membership_.Add(world, request, pid);
  }

  Membership membership_;
};

TEST_F(MembershipTest, AJobIsCompleteWhenEveryNumberIsThereInAnyOrder) {
  EXPECT_FALSE(membership_.IsComplete());
  for (const uint32_t rank : {2, 0}) EXPECT_TRUE(Add(rank).ok());
  EXPECT_EQ(membership_.world_size(), 4u);
  EXPECT_EQ(membership_.DescribeMissing(), "ranks 1 and 3 of 4");
  for (const uint32_t rank : {3, 1}) {
    EXPECT_FALSE(membership_.IsComplete());
    EXPECT_TRUE(Add(rank).ok());
  }
  EXPECT_TRUE(membership_.IsComplete());
}

TEST_F(MembershipTest, TwoRanksWithOneNumberAreToldBothProcesses) {
  EXPECT_TRUE(Add(1, 100).ok());
  ExpectError(Add(1, 200), ErrorId::kRanksDiffer, "processes 100 and 200 both are rank 1 of 4");
  EXPECT_EQ(membership_.Missing().size(), 3u) << "the first one stays";
}

TEST_F(MembershipTest, TheFirstTermThatDiffersIsNamedAndWhoDiffersIsNoMember) {
  ASSERT_TRUE(Add(2).ok());
  const struct {
    std::function<void(World&, OpenJobRequest&)> change;
    const char* text;
  } kCases[] = {
      {[](World& world, OpenJobRequest&) { world.set_world_size(2); },
       "world size is 4 in rank 2 and 2 in rank 1"},
      {[](World& world, OpenJobRequest&) { world.set_library_version("2"); },
       "library version is 1 in rank 2 and 2 in rank 1"},
      {[](World&, OpenJobRequest& request) { request.set_ram_bytes(7); },
       "ram is 1073741824 bytes in rank 2 and 7 bytes in rank 1"},
      {[](World&, OpenJobRequest& request) { request.set_pool("/nvme1"); },
       "pool is the default in rank 2 and /nvme1 in rank 1"},
      {[](World&, OpenJobRequest& request) { request.set_io_engine("threads"); }, "io_engine"},
      {[](World&, OpenJobRequest& request) { request.set_durability("checkpoint:2"); },
       "durability"},
      {[](World&, OpenJobRequest& request) { request.set_update_in_backward("never"); },
       "update_in_backward"},
      {[](World&, OpenJobRequest& request) { request.set_update_threads(3); }, "update_threads"},
      {[](World&, OpenJobRequest& request) { request.set_generations(3); }, "generations"},
      {[](World& world, OpenJobRequest&) { world.set_gradient_sum(true); }, "gradient sum"},
      {[](World& world, OpenJobRequest&) { world.set_gradients_reduced(true); },
       "gradients reduced by the trainer"},
  };
  for (const auto& bad : kCases)
    ExpectError(Add(1, 200, bad.change), ErrorId::kRanksDiffer, bad.text);
  EXPECT_EQ(membership_.Missing(), (std::vector<uint32_t>{0, 1, 3}));
  EXPECT_TRUE(Add(1).ok());
}

}  // namespace
}  // namespace offload::daemon

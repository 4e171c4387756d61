#include "base/numa.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "base/mapped_region.h"

namespace offload {
namespace {

namespace fs = std::filesystem;

// A machine as the kernel describes it, in a folder.
class NumaTest : public testing::Test {
 protected:
  NumaTest() : folder_(testing::TempDir() + "/node") { fs::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    const fs::path path = fs::path(folder_) / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  const std::string folder_;
};

// Of a mapped place; -1 where the kernel knows of no nodes.
int ModeAt(void* place) {
  int mode = -1;
  ::syscall(SYS_get_mempolicy, &mode, nullptr, 0, place, MPOL_F_ADDR);
  return mode;
}

TEST_F(NumaTest, TellsNodesWithProcessorsAndMemory) {
  Write("has_memory", "0,2-3\n");
  Write("node0/cpulist", "0-3,8\n");
  Write("node1/cpulist", "4-7\n");
  Write("node2/cpulist", "\n");
  Write("node3/cpulist", "9\n");
  const std::vector<NumaNode> nodes = ReadNumaNodes(folder_);
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[0].number, 0u);
  EXPECT_EQ(nodes[0].processors, (CpuList{0, 1, 2, 3, 8}));
  EXPECT_EQ(nodes[1].number, 3u);
  EXPECT_EQ(nodes[1].processors, CpuList{9});
}

TEST_F(NumaTest, WhatIsNotThereOrNotReadableIsNoNode) {
  EXPECT_TRUE(ReadNumaNodes(folder_).empty());
  Write("has_memory", "0-1\n");
  Write("node0/cpulist", "none\n");
  EXPECT_TRUE(ReadNumaNodes(folder_).empty());
}

TEST_F(NumaTest, ThisMachinesNodesAreToldWithThisThreadsProcessors) {
  CpuList of_nodes;
  for (const NumaNode& node : ReadNumaNodes()) of_nodes = Union(of_nodes, node.processors);
  if (of_nodes.empty()) GTEST_SKIP() << "the kernel tells of no nodes";
  EXPECT_EQ(Intersection(ProcessorsOf(0), of_nodes), ProcessorsOf(0));
}

TEST_F(NumaTest, MemoryLiesWhereItIsPut) {
  const std::vector<NumaNode> nodes = UsableNumaNodes();
  if (nodes.empty()) GTEST_SKIP() << "the kernel tells of no nodes";
  absl::StatusOr<MappedRegion> region = MappedRegion::Anonymous(1 << 20);
  ASSERT_TRUE(region.ok());
  ASSERT_EQ(ModeAt(region->data()), MPOL_DEFAULT);
  ASSERT_TRUE(PlaceMemory(region->data(), region->size(), {nodes[0].number}).ok());
  EXPECT_EQ(ModeAt(region->data()), MPOL_PREFERRED);
  EXPECT_EQ(ModeAt(region->data() + region->size() - 1), MPOL_PREFERRED);
  // Of several, those that are there.
  ASSERT_TRUE(PlaceMemory(region->data(), region->size(), {nodes[0].number, 900}).ok());
  EXPECT_EQ(ModeAt(region->data()), MPOL_INTERLEAVE);
  EXPECT_EQ(ErrorIdOf(PlaceMemory(region->data(), region->size(), {900})), ErrorId::kSharedMemory);
}

TEST_F(NumaTest, APolicyOfTheUsersIsSeen) {
  if (UsableNumaNodes().empty()) GTEST_SKIP() << "the kernel tells of no nodes";
  std::thread([] {
    EXPECT_FALSE(HasMemoryPolicy());
    unsigned long mask = 1ul << UsableNumaNodes()[0].number;
    ASSERT_EQ(::syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, &mask, 64), 0);
    EXPECT_TRUE(HasMemoryPolicy());
  }).join();
}

}  // namespace
}  // namespace offload

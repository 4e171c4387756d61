#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "proto/shared_memory.h"

namespace offload::proto {
namespace {

// What the kernel tells, as files.
class AvailableMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(root_);
    Write("/proc/meminfo", "MemTotal: 16000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB\n");
  }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  void Unified(const std::string& group, const std::string& shown) {
    Write("/proc/self/cgroup", "3:cpu:/elsewhere\n0::" + group + "\n");
    Write("/proc/self/mountinfo",
          "22 1 0:20 / /proc rw - proc proc rw\n"
          "30 22 0:26 " +
              shown + " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }

  void Group(const std::string& folder, const std::string& max, const std::string& high,
             uint64_t used) {
    Write(folder + "/memory.max", max + "\n");
    Write(folder + "/memory.high", high + "\n");
    Write(folder + "/memory.current", std::to_string(used) + "\n");
    Write(folder + "/memory.stat", "anon 5\nfile 900\ninactive_file 300\nactive_file 100\n");
  }

  AvailableMemory Find() {
    const std::optional<AvailableMemory> found = FindAvailableMemory(root_);
    EXPECT_TRUE(found.has_value());
    return found.value_or(AvailableMemory());
  }

  const std::string root_ = ::testing::TempDir() + "/root";
};

TEST_F(AvailableMemoryTest, TheMachinesWithoutControlGroups) {
  EXPECT_EQ(Find().bytes, 8000u << 10);
  EXPECT_EQ(Find().limit_file, "");
  EXPECT_EQ(Find().Describe(), "7.8 MiB");
}

TEST_F(AvailableMemoryTest, IsUnknownWhereNothingTells) {
  std::filesystem::remove_all(root_);
  EXPECT_FALSE(FindAvailableMemory(root_).has_value());
}

TEST_F(AvailableMemoryTest, ALimitOfTheGroupLeavesWhatIsNotUsedAndWhatCanBeDropped) {
  Unified("/", "/");
  Group("/sys/fs/cgroup", "5000", "max", 4000);
  EXPECT_EQ(Find().bytes, 1400u);
  EXPECT_EQ(Find().limit_file, "/sys/fs/cgroup/memory.max");
  EXPECT_NE(Find().Describe().find("/sys/fs/cgroup/memory.max"), std::string::npos);
}

TEST_F(AvailableMemoryTest, TheLeastOfAllGroupsAboveCounts) {
  Unified("/user/job/step", "/");
  Group("/sys/fs/cgroup/user/job/step", "max", "max", 4000);
  Group("/sys/fs/cgroup/user/job", "9000", "6000", 4000);
  Group("/sys/fs/cgroup/user", "7000", "max", 6000);
  EXPECT_EQ(Find().bytes, 1400u);
  EXPECT_EQ(Find().limit_file, "/sys/fs/cgroup/user/memory.max");
  Group("/sys/fs/cgroup/user", "max", "max", 6000);
  EXPECT_EQ(Find().bytes, 2400u);
  EXPECT_EQ(Find().limit_file, "/sys/fs/cgroup/user/job/memory.high");
}

TEST_F(AvailableMemoryTest, AGroupThatUsesAllOfItLeavesNothing) {
  Unified("/", "/");
  Group("/sys/fs/cgroup", "5000", "max", 9000);
  EXPECT_EQ(Find().bytes, 0u);
}

TEST_F(AvailableMemoryTest, AContainerSeesOnlyItsPartOfTheHierarchy) {
  Unified("/docker/1f0c/child", "/docker/1f0c");
  Group("/sys/fs/cgroup", "5000", "max", 4000);
  Group("/sys/fs/cgroup/child", "4500", "max", 4000);
  EXPECT_EQ(Find().bytes, 900u);
  EXPECT_EQ(Find().limit_file, "/sys/fs/cgroup/child/memory.max");
}

TEST_F(AvailableMemoryTest, LimitsOfTheOlderKindCountLikewise) {
  Write("/proc/self/cgroup", "9:cpu,cpuacct:/b\n8:memory:/a\n0::/\n");
  Write("/proc/self/mountinfo",
        "31 22 0:27 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 22 0:28 / /cg/memory rw - cgroup cgroup rw,memory\n");
  Write("/cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/cg/memory/memory.usage_in_bytes", "77\n");
  EXPECT_EQ(Find().bytes, 8000u << 10) << "no limit";
  Write("/cg/memory/a/memory.limit_in_bytes", "6000\n");
  Write("/cg/memory/a/memory.usage_in_bytes", "5000\n");
  Write("/cg/memory/a/memory.stat", "active_file 1\ntotal_inactive_file 20\ntotal_active_file 4\n");
  EXPECT_EQ(Find().bytes, 1024u);
  EXPECT_EQ(Find().limit_file, "/cg/memory/a/memory.limit_in_bytes");
}

TEST_F(AvailableMemoryTest, TellsSomethingOfThisMachine) {
  const std::optional<AvailableMemory> found = FindAvailableMemory();
  ASSERT_TRUE(found.has_value());
  EXPECT_GT(found->bytes, 0u);
}

}  // namespace
}  // namespace offload::proto

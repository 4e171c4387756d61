#include "base/cpu_list.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

namespace offload {
namespace {

TEST(CpuListTest, ReadsAndWritesWhatTheKernelWrites) {
  for (const char* text : {"0", "0-3", "0-3,8", "1,3,5", "0,2-3,7-9"}) {
    const std::optional<CpuList> list = ParseCpuList(text);
    ASSERT_TRUE(list.has_value()) << text;
    EXPECT_EQ(FormatCpuList(*list), text);
  }
  EXPECT_EQ(ParseCpuList("0-2,5\n"), (CpuList{0, 1, 2, 5}));
  EXPECT_EQ(ParseCpuList("8191"), CpuList{8191});
  EXPECT_EQ(ParseCpuList(""), CpuList{});
  EXPECT_EQ(ParseCpuList("\n"), CpuList{});
  EXPECT_EQ(FormatCpuList({}), "");
}

TEST(CpuListTest, NoOtherTextIsOne) {
  for (const char* text : {"x", "-1", "1-", "3-1", "1,", ",1", "1,1", "2,1", "0-3,3", "1 2", "8192",
                           "0-8192", "99999999999", "1-2-3", "0\n\n"}) {
    EXPECT_FALSE(ParseCpuList(text).has_value()) << text;
  }
}

TEST(CpuListTest, JoinsAndMeets) {
  EXPECT_EQ(Union({0, 2, 4}, {1, 2}), (CpuList{0, 1, 2, 4}));
  EXPECT_EQ(Intersection({0, 2, 4}, {1, 2, 4, 5}), (CpuList{2, 4}));
  EXPECT_EQ(Intersection({0}, {1}), CpuList{});
}

TEST(CpuListTest, AThreadRunsWhereItWasPut) {
  const CpuList mine = ProcessorsOf(0);
  ASSERT_FALSE(mine.empty());
  std::thread([&] {
    ASSERT_TRUE(RunOn({mine.back()}));
    EXPECT_EQ(ProcessorsOf(0), CpuList{mine.back()});
    std::thread([&] { EXPECT_EQ(ProcessorsOf(0), CpuList{mine.back()}); }).join();
    EXPECT_FALSE(RunOn({}));
    EXPECT_EQ(ProcessorsOf(0), CpuList{mine.back()});
  }).join();
  EXPECT_EQ(ProcessorsOf(0), mine);
  EXPECT_EQ(ProcessorsOf(::getpid()), mine);
}

}  // namespace
}  // namespace offload

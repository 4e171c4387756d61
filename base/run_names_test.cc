#include "base/run_names.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.h"

namespace offload {
namespace {

std::string RefusalOf(const absl::Status& status) {
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kBadValue) << status;
  return std::string(status.message());
}

TEST(RunNamesTest, AJobHasANameThatIsAFileOnEveryDrive) {
  for (const char* name : {"run1", "a.b_c-d#2", "1"}) EXPECT_TRUE(CheckJobName(name).ok()) << name;
  EXPECT_TRUE(CheckJobName(std::string(kJobNameBytesMax, 'a')).ok());
  for (const char* name : {"", "a b/c", ".hidden", "a/b", "läuft", "a\n"})
    EXPECT_NE(RefusalOf(CheckJobName(name)).find("Use letters"), std::string::npos) << name;
  EXPECT_FALSE(CheckJobName(std::string(kJobNameBytesMax + 1, 'a')).ok());
}

TEST(RunNamesTest, PoolsAreSeparatedByCommasAndSpaces) {
  EXPECT_EQ(*SplitPools("/a"), std::vector<std::string>{"/a"});
  EXPECT_EQ(*SplitPools(""), std::vector<std::string>{""});
  EXPECT_EQ(*SplitPools(" with spaces "), std::vector<std::string>{" with spaces "});
  EXPECT_EQ(*SplitPools("/a, /b ,/c"), (std::vector<std::string>{"/a", "/b", "/c"}));
}

TEST(RunNamesTest, APoolIsThereOnceHoweverItIsWritten) {
  for (const char* pools : {"/a,/a", "/a,/b,/a/", "/a,/b/../a", "/a,//a", "a,./a"})
    EXPECT_NE(RefusalOf(SplitPools(pools).status()).find("twice"), std::string::npos) << pools;
  EXPECT_TRUE(SplitPools("/a,/a/b").ok());
  for (const char* pools : {"/a,", ",/a", "/a,,/b", "/a, ,/b"})
    EXPECT_NE(RefusalOf(SplitPools(pools).status()).find("comma"), std::string::npos) << pools;
}

TEST(RunNamesTest, TheTildeOfShellsIsToldWithWhatItMeans) {
  setenv("HOME", "/home/ann", 1);
  EXPECT_NE(RefusalOf(SplitPools("~/pool").status()).find("such as /home/ann/pool"),
            std::string::npos);
  EXPECT_FALSE(SplitPools("~").ok());
  EXPECT_FALSE(SplitPools("/nvme0,~/pool").ok());
  const std::string of_bob = RefusalOf(SplitPools("~bob/pool").status());
  EXPECT_EQ(of_bob.find("such as"), std::string::npos) << of_bob;
  EXPECT_TRUE(SplitPools("./~/pool").ok());
  EXPECT_TRUE(SplitPools("/nvme0/~old").ok());
}

TEST(RunNamesTest, ADeviceIsNamedAsTorchNamesIt) {
  for (const char* device : {"cuda", "cuda:0", "cuda:15", "cpu"})
    EXPECT_FALSE(ComplainOfDevice(device).has_value()) << device;
  for (const char* device : {"", "gpu", "gpu0", "cuda0", "cuda:", "cuda:a", "cuda:-1", "CUDA:0"})
    EXPECT_TRUE(ComplainOfDevice(device).has_value()) << device;
}

}  // namespace
}  // namespace offload

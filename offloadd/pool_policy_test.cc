#include "offloadd/pool_policy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/error.h"

namespace offload::daemon {
namespace {

class PoolPolicyTest : public testing::Test {
 protected:
  PoolPolicyTest() {
    for (const char* name : {"a", "b", "c"}) std::filesystem::create_directories(Folder(name));
  }
  ~PoolPolicyTest() override { std::filesystem::remove_all(root_); }
  std::string Folder(const std::string& name) const { return root_ + "/" + name; }

  const std::string root_ = testing::TempDir() + "/pool_policy_" + std::to_string(::getpid());
};

TEST_F(PoolPolicyTest, WithoutAListAnyPoolMayBeNamedAndTheDefaultOneIsTakenWithoutAName) {
  EXPECT_EQ(ChoosePool({.default_pool = Folder("a")}, "").value(), Folder("a"));
  EXPECT_EQ(ChoosePool({.default_pool = Folder("a")}, Folder("b")).value(), Folder("b"));
  EXPECT_EQ(ErrorIdOf(ChoosePool({}, "").status()), ErrorId::kBadValue);
}

TEST_F(PoolPolicyTest, EveryPoolOfAStripedJobHasToBeOnTheList) {
  const PoolPolicy policy{.allowed = {Folder("a"), Folder("b")}};
  const std::string striped = Folder("a") + "," + Folder("b");
  EXPECT_EQ(ChoosePool(policy, striped).value(), striped);
  EXPECT_EQ(ErrorIdOf(ChoosePool(policy, Folder("a") + "," + Folder("c")).status()),
            ErrorId::kRefused);
  EXPECT_EQ(ErrorIdOf(ChoosePool(policy, Folder("a") + "," + Folder("a")).status()),
            ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf(ChoosePool(policy, Folder("c")).status()), ErrorId::kRefused);
}

TEST_F(PoolPolicyTest, AnotherNameOfAnAllowedFolderIsAllowed) {
  const PoolPolicy policy{.allowed = {Folder("a")}};
  EXPECT_TRUE(ChoosePool(policy, Folder("b") + "/../a").ok());
  std::filesystem::create_directory_symlink(Folder("a"), Folder("link"));
  EXPECT_TRUE(ChoosePool(policy, Folder("link")).ok());
  std::filesystem::create_directory_symlink(Folder("c"), Folder("elsewhere"));
  EXPECT_EQ(ErrorIdOf(ChoosePool(policy, Folder("elsewhere")).status()), ErrorId::kRefused);
}

}  // namespace
}  // namespace offload::daemon

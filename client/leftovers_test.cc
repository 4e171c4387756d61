#include "client/leftovers.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/unique_fd.h"
#include "proto/socket_directory.h"

namespace offload::client {
namespace {

using std::filesystem::exists;

constexpr std::chrono::seconds kAnyAge(0);

class LeftoversTest : public ::testing::Test {
 protected:
  // Short, since socket paths are.
  void SetUp() override {
    char name[] = "/tmp/left-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    parent_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(parent_); }

  std::string Directory(const std::string& name) {
    const std::string path = parent_ + "/" + name;
    std::filesystem::create_directory(path);
    return path;
  }

  // Binds a daemon's socket in the directory; it is unbound when the descriptor is closed.
  UniqueFd Bind(const std::string& directory) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address = {.sun_family = AF_UNIX};
    std::strncpy(address.sun_path, (directory + "/offloadd.sock").c_str(),
                 sizeof(address.sun_path) - 1);
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }

  std::string parent_;
};

TEST_F(LeftoversTest, RemovesDirectoriesOfDeadDaemons) {
  const std::string empty = Directory("offloadd-aB3dE6"), dead = Directory("offloadd-123456");
  Bind(dead).reset();
  ASSERT_TRUE(exists(dead + "/offloadd.sock"));
  RemoveLeftovers(parent_, kAnyAge);
  EXPECT_FALSE(exists(empty));
  EXPECT_FALSE(exists(dead));
}

TEST_F(LeftoversTest, LeavesADaemonThatLivesAndDoesNotDisturbIt) {
  const std::string living = Directory("offloadd-aaaaaa"), bound = Directory("offloadd-bbbbbb");
  const UniqueFd listener = Bind(living), starting = Bind(bound);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  RemoveLeftovers(parent_, kAnyAge);
  EXPECT_TRUE(exists(living + "/offloadd.sock"));
  EXPECT_TRUE(exists(bound + "/offloadd.sock"));
  EXPECT_EQ(::accept(listener.get(), nullptr, nullptr), -1) << "it must not see a rank";
}

TEST_F(LeftoversTest, LeavesADirectoryInWhichADaemonMayBeStarting) {
  const std::string young = Directory("offloadd-cccccc");
  RemoveLeftovers(parent_, std::chrono::hours(24));
  EXPECT_TRUE(exists(young));
}

TEST_F(LeftoversTest, LeavesADirectoryInWhichARankStartsADaemonAfterADeadOne) {
  const std::string ranks = Directory("offloadd-ranks-0-0123456789abcdef");
  Bind(ranks).reset();
  UniqueFd lock(::open(ranks.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_TRUE(proto::LockSocketDirectory(lock, ranks));
  RemoveLeftovers(parent_, kAnyAge);
  EXPECT_TRUE(exists(ranks + "/offloadd.sock"));
  lock.reset();
  RemoveLeftovers(parent_, kAnyAge);
  EXPECT_FALSE(exists(ranks));
}

TEST_F(LeftoversTest, LeavesWhatMkdtempDidNotMakeForADaemon) {
  const std::string pool = Directory("offloadd-pool"), node = Directory("offloadd"),
                    dotted = Directory("offloadd-..a..b"), full = Directory("offloadd-dddddd");
  std::ofstream(full + "/notes") << "mine";
  std::filesystem::create_directory_symlink(pool, parent_ + "/offloadd-eeeeee");
  RemoveLeftovers(parent_, kAnyAge);
  for (const std::string& path : {pool, node, dotted, full + "/notes"}) EXPECT_TRUE(exists(path));
  EXPECT_TRUE(exists(parent_ + "/offloadd-eeeeee"));
}

TEST_F(LeftoversTest, AMissingParentIsNoError) { RemoveLeftovers(parent_ + "/none", kAnyAge); }

}  // namespace
}  // namespace offload::client

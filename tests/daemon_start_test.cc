// How a daemon begins, whom it admits, and how it ends.

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/failing_call.h"
#include "base/unique_fd.h"
#include "offloadd/limits.h"
#include "proto/handshake.h"
#include "tests/in_process_daemon.h"

namespace offload::tests {
namespace {

using daemon::Daemon;
using daemon::DaemonOptions;
using daemon::kLimits;

constexpr uid_t kOtherUser = 65534;

[[maybe_unused]] const bool termination_is_blocked = BlockTermination();

class DaemonStartTest : public InProcessDaemonTest {
 protected:
  absl::Status StartError(const std::function<void(DaemonOptions&)>& change = {}) const {
    DaemonOptions options = Options();
    if (change) change(options);
    return Daemon::Create(std::move(options)).status();
  }
  void ExpectRefused(ErrorId id, const std::function<void(DaemonOptions&)>& change) const {
    const absl::Status status = StartError(change);
    EXPECT_EQ(ErrorIdOf(status), id) << status;
  }
  // What a rank is told that connects now.
  absl::Status Greet() const {
    auto socket = proto::ConnectToDaemon(socket_);
    if (!socket.ok()) return socket.status();
    return proto::Greet(socket->get()).status();
  }
  void ExpectNothingIsLeft() const { EXPECT_TRUE(std::filesystem::is_empty(directory_)); }
};

// ---- The beginning -----------------------------------------------------------------------------

TEST_F(DaemonStartTest, SocketsThatCannotBeServedAreRefused) {
  ExpectRefused(ErrorId::kBadValue, [](auto& options) { options.socket_path = ""; });
  ExpectRefused(ErrorId::kBadValue,
                [&](auto& options) { options.socket_path += std::string(108, 'x'); });
  ExpectRefused(ErrorId::kBadValue,
                [&](auto& options) { options.socket_path = directory_ + "/missing/d.sock"; });
  ExpectNothingIsLeft();
}

// The socket's path is short enough, that of control.sock beside it is not.
TEST_F(DaemonStartTest, AControlSocketWhosePathIsTooLongIsRefusedAndLeavesNothing) {
  const std::string folder = directory_ + "/" + std::string(100 - directory_.size(), 'x');
  std::filesystem::create_directory(folder);
  ExpectRefused(ErrorId::kDaemonStart, [&](auto& options) { options.socket_path = folder + "/d"; });
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST_F(DaemonStartTest, AFolderThatOthersMayWriteIsRefused) {
  std::filesystem::permissions(directory_, std::filesystem::perms(0777));
  ExpectRefused(ErrorId::kBadValue, {});
}

TEST_F(DaemonStartTest, ASecondDaemonIsRefusedAndTheFirstServesOn) {
  StartDaemon();
  ExpectRefused(ErrorId::kStoreLocked, {});
  EXPECT_TRUE(Greet().ok());
}

TEST_F(DaemonStartTest, TheSocketsOfAKilledDaemonAreReplaced) {
  { ASSERT_TRUE(proto::ListenForRanks(socket_).ok()); }  // closed, and left behind
  ASSERT_TRUE(std::filesystem::exists(socket_));
  StartDaemon();
  EXPECT_TRUE(Greet().ok());
}

TEST_F(DaemonStartTest, OtherUsersAreAdmittedByANodeDaemonWithPoolsOnly) {
  ExpectRefused(ErrorId::kBadValue, [](auto& options) {
    options.peers.uids = {kOtherUser};
    options.is_private = true;
  });
  ExpectRefused(ErrorId::kBadValue, [](auto& options) {
    options.peers.gids = {kOtherUser};
    options.pools = {};
  });
}

TEST_F(DaemonStartTest, AParentThatHasEndedIsRefused) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ExpectRefused(ErrorId::kDaemonStart, [child](auto& options) { options.parent_pid = child; });
  ExpectNothingIsLeft();
}

TEST_F(DaemonStartTest, EveryCallOfTheSystemIsCheckedAndNothingIsLeft) {
  for (const char* call : {"epoll_create1", "signalfd", "chmod"}) {
    const FailingCall failing(call, EMFILE);
    EXPECT_FALSE(StartError().ok()) << call;
    EXPECT_EQ(failing.failures(), 1) << call;
    ExpectNothingIsLeft();
  }
  const FailingCall failing("chmod", EPERM, {.after = 1});
  ExpectRefused(ErrorId::kDaemonStart,
                [](auto& options) { options.peers.uids = {kOtherUser}; });  // ranks.sock
  ExpectNothingIsLeft();
}

// ---- Who is admitted ---------------------------------------------------------------------------

TEST_F(DaemonStartTest, WhatAcceptingTakesIsMissedAndThenThereAgain) {
  StartDaemon();
  {
    const FailingCall failing("accept4", EMFILE, {.times = 20});
    testing::internal::CaptureStdout();
    EXPECT_TRUE(Greet().ok()) << "it is tried again";
    const std::string log = testing::internal::GetCapturedStdout();
    EXPECT_EQ(failing.failures(), 20);
    int lines = 0;
    for (size_t at = log.find("EMFILE"); at != std::string::npos; at = log.find("EMFILE", at + 1))
      ++lines;
    EXPECT_LE(lines, 10) << log;
  }
  {
    const FailingCall failing("getrandom", ENOSYS);
    EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kInternal) << "no token";
    EXPECT_EQ(failing.failures(), 1);
  }
  {
    const FailingCall failing("getsockopt", EINVAL);
    EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kRefused) << "nobody knows who it is";
  }
  EXPECT_TRUE(Greet().ok());
}

// Without a descriptor to say why: the rank sees the end.
TEST_F(DaemonStartTest, ARefusalThatCannotBeSaidIsAClosedConnection) {
  DaemonOptions options = Options();
  options.parent_pid = getppid();
  StartDaemon(std::move(options));
  EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kRefused);
  const FailingCall failing("dup", EMFILE);
  EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kDaemonLost);
}

TEST_F(DaemonStartTest, WhoIsRefusedOftenDoesNotFillTheLog) {
  DaemonOptions options = Options();
  options.parent_pid = getppid();
  StartDaemon(std::move(options));
  testing::internal::CaptureStdout();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 500; ++i) EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kRefused);
  std::this_thread::sleep_for(std::chrono::milliseconds(1050));
  EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kRefused);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  StopDaemon();
  const std::string log = testing::internal::GetCapturedStdout();
  EXPECT_NE(log.find("more were refused"), std::string::npos) << log;
  int lines = 0;
  for (size_t at = log.find("a rank is refused"); at != std::string::npos;
       at = log.find("a rank is refused", at + 1))
    ++lines;
  EXPECT_LE(lines, 5 * (seconds.count() + 2)) << log;
}

// Processes that connect and stay.
class Crowd {
 public:
  ~Crowd() {
    for (const pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }
  // True when all connections of a new process were accepted and welcomed.
  bool Join(const std::string& path, int connections, uid_t user) {
    int answer[2];
    if (pipe2(answer, O_CLOEXEC) != 0) return false;
    const UniqueFd in(answer[0]), out(answer[1]);
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (user != geteuid() && setresuid(user, user, user) != 0) _exit(1);
      std::vector<UniqueFd> sockets;
      bool welcome = true;
      for (int i = 0; i < connections && welcome; ++i) {
        auto socket = proto::ConnectToDaemon(path);
        welcome = socket.ok() && proto::Greet(socket->get()).ok();
        if (welcome) sockets.push_back(*std::move(socket));
      }
      if (write(out.get(), welcome ? "y" : "n", 1) != 1) _exit(1);
      for (;;) pause();
    }
    children_.push_back(child);
    char welcome = 'n';
    return read(in.get(), &welcome, 1) == 1 && welcome == 'y';
  }

 private:
  std::vector<pid_t> children_;
};

TEST_F(DaemonStartTest, AFullDaemonRefusesOneMoreUntilAnotherLeaves) {
  StartDaemon();
  {
    Crowd crowd;
    for (int left = kLimits.sessions_max; left > 0; left -= kLimits.sessions_per_process_max)
      ASSERT_TRUE(crowd.Join(socket_, std::min(left, kLimits.sessions_per_process_max), geteuid()));
    const absl::Status status = Greet();
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kRefused) << status;
    EXPECT_NE(status.message().find("128 sessions already"), absl::string_view::npos) << status;
  }
  absl::Status status = Greet();
  for (int i = 0; i < 1000 && !status.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    status = Greet();
  }
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(DaemonStartTest, AnotherUserHasSoManySessionsAndTheDaemonsOwnUserMore) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  std::filesystem::permissions(directory_, std::filesystem::perms(0755));
  DaemonOptions options = Options();
  options.peers.uids = {kOtherUser};
  StartDaemon(std::move(options));
  Crowd crowd;
  for (int left = kLimits.sessions_per_other_user_max; left > 0;
       left -= kLimits.sessions_per_process_max) {
    ASSERT_TRUE(crowd.Join(socket_, std::min(left, kLimits.sessions_per_process_max), kOtherUser));
  }
  EXPECT_FALSE(crowd.Join(socket_, 1, kOtherUser));
  EXPECT_FALSE(crowd.Join(socket_, 1, kOtherUser + 1)) << "nobody named this one";
  EXPECT_TRUE(crowd.Join(socket_, 1, geteuid()));
}

// ---- The end -----------------------------------------------------------------------------------

TEST_F(DaemonStartTest, ADaemonThatWasToldToEndLeavesNoSocket) {
  DaemonOptions options = Options();
  options.peers.uids = {kOtherUser};
  StartDaemon(std::move(options));
  for (const char* name : {"control.sock", "metrics.sock", "ranks.sock", "offloadd.sock"})
    EXPECT_TRUE(std::filesystem::exists(directory_ + "/" + name)) << name;
  StopDaemon();
  ExpectNothingIsLeft();
}

TEST_F(DaemonStartTest, APrivateDaemonEndsWithItsParentAndRemovesItsFolder) {
  const pid_t parent = fork();
  if (parent == 0) {
    for (;;) pause();
  }
  DaemonOptions options = Options();
  options.is_private = true;
  options.parent_pid = parent;
  StartDaemon(std::move(options));
  EXPECT_EQ(ErrorIdOf(Greet()), ErrorId::kRefused) << "it serves its parent only";
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  WaitForDaemon();
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

TEST_F(DaemonStartTest, APrivateDaemonThatNobodyUsedEndsWithASignal) {
  DaemonOptions options = Options();
  options.is_private = true;
  StartDaemon(std::move(options));
  StopDaemon();
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

TEST_F(DaemonStartTest, APrivateDaemonEndsWithItsLastSession) {
  DaemonOptions options = Options();
  options.is_private = true;
  options.parent_pid = getpid();
  StartDaemon(std::move(options));
  EXPECT_TRUE(Greet().ok());
  WaitForDaemon();
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

}  // namespace
}  // namespace offload::tests

// A daemon, an honest neighbour, and one attack after the other: the daemon lives, the neighbour
// reads its bytes all the time, and the attacker gets what it is promised.

#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/honest_neighbour.h"

namespace offload::tests {
namespace {

constexpr int kOtherUser = 65534;

// How long something that must happen may take on a slow machine.
template <typename Condition>
bool Becomes(Condition condition) {
  for (int i = 0; i < 6000 && !condition(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

std::string StatusLine(const std::filesystem::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name + ":\t", 0) == 0) return line.substr(name.size() + 2);
  }
  return "";
}

class HostileTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    pool_ = absl::StrCat(getenv("TEST_TMPDIR"), "/", name);
    std::filesystem::create_directories(pool_);
    std::string directory = "/tmp/offloadd-hostile-XXXXXX";
    directory_ = mkdtemp(directory.data());
    socket_ = directory_ + "/offloadd.sock";
    setenv("OFFLOADD_SOCKET", socket_.c_str(), 1);
    client_ = std::filesystem::absolute(getenv("HOSTILE_CLIENT"));
  }
  void TearDown() override {
    if (daemon_ > 0) {
      EXPECT_EQ(waitpid(daemon_, nullptr, WNOHANG), 0) << "the daemon has died";
      kill(daemon_, SIGKILL);
      waitpid(daemon_, nullptr, 0);
    }
    std::filesystem::remove_all(pool_);
    std::filesystem::remove_all(directory_);
  }

  static pid_t Spawn(std::vector<std::string> arguments) {
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_t pid = -1;
    EXPECT_EQ(posix_spawnp(&pid, pointers[0], nullptr, nullptr, pointers.data(), environ), 0);
    return pid;
  }
  static int ExitCode(pid_t pid) {
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  void StartDaemon(const std::vector<std::string>& flags = {}) {
    std::vector<std::string> arguments = {
        getenv("OFFLOADD_BINARY"), "--socket", socket_, "--pool", pool_, "--log-level", "error"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    daemon_ = Spawn(arguments);
    ASSERT_TRUE(Becomes([&] { return std::filesystem::exists(directory_ + "/control.sock"); }));
  }

  std::vector<std::string> AttackCommand(const std::string& attack,
                                         const std::string& count) const {
    return {client_, "--socket", socket_,    "--pool",  pool_, "--attack",
            attack,  "--seed",   "20260101", "--count", count};
  }

  // Runs an attack beside a neighbour that must not notice it.
  void Attack(const std::string& attack, uint64_t count = 0) {
    auto neighbour = HonestNeighbour::Open("honest", pool_);
    ASSERT_TRUE(neighbour.ok()) << neighbour.status();
    (*neighbour)->Start();
    EXPECT_EQ(ExitCode(Spawn(AttackCommand(attack, absl::StrCat(count)))), 0);
    ExpectProgress(**neighbour);
    const absl::Status status = (*neighbour)->Stop();
    EXPECT_TRUE(status.ok()) << status;
  }
  static void ExpectProgress(const HonestNeighbour& neighbour) {
    const uint64_t before = neighbour.reads();
    EXPECT_TRUE(Becomes([&] { return neighbour.reads() >= before + 8; }));
  }

  // As another user, with what that user may run and reach.
  int RunAsOther(const std::string& attack) const {
    std::vector<std::string> command = {"setpriv", absl::StrCat("--reuid=", kOtherUser),
                                        absl::StrCat("--regid=", kOtherUser), "--clear-groups",
                                        "--"};
    for (const std::string& word : AttackCommand(attack, "0")) command.push_back(word);
    return ExitCode(Spawn(command));
  }

  std::string pool_, directory_, socket_, client_;
  pid_t daemon_ = -1;
};

// ---- Attacks -----------------------------------------------------------------------------------

TEST_F(HostileTest, EntriesFlippedWhileTheyAreServedHarmNobody) {
  const char* const flips = getenv("HOSTILE_FLIPS");  // tools/torture takes more
  StartDaemon();
  Attack("flips", flips != nullptr ? std::strtoull(flips, nullptr, 10) : 500'000);
}
TEST_F(HostileTest, WildCursorsHarmNobody) {
  StartDaemon();
  Attack("cursors");
}
TEST_F(HostileTest, ForgedTensorsEndTheirSessionUnanswered) {
  StartDaemon();
  Attack("forged");
}
TEST_F(HostileTest, WildStepCommandsHarmNobody) {
  StartDaemon();
  Attack("commands");
}
TEST_F(HostileTest, ARankThatReadsNoCompletionStopsOnlyItself) {
  StartDaemon();
  Attack("nodrain");
}
TEST_F(HostileTest, SharedMemoryCannotBeTakenAway) {
  StartDaemon();
  Attack("memory");
}
TEST_F(HostileTest, TheNeighboursBytesAreNowhereToBeSeen) {
  StartDaemon();
  Attack("canary", HonestNeighbour::kCanary);
}
TEST_F(HostileTest, GarbageInTheHandshakeEndsItsSession) {
  StartDaemon();
  Attack("garbage");
}
TEST_F(HostileTest, WhoSaysNothingIsClosed) {
  StartDaemon({"--handshake-timeout", "0.5"});
  Attack("silent");
}
TEST_F(HostileTest, AThousandConnectionsHarmNobody) {
  StartDaemon();
  Attack("connections", 1000);
}
TEST_F(HostileTest, ForgedAndReplayedTokensAreRefused) {
  StartDaemon();
  Attack("tokens");
}
TEST_F(HostileTest, OversizeAndEndlessCallsAreRefused) {
  StartDaemon();
  Attack("calls");
}

TEST_F(HostileTest, AStoppedRankStopsNobody) {
  StartDaemon();
  auto neighbour = HonestNeighbour::Open("honest", pool_);
  ASSERT_TRUE(neighbour.ok()) << neighbour.status();
  (*neighbour)->Start();
  const pid_t stopped = Spawn(AttackCommand("stop", "0"));
  int status = 0;
  ASSERT_EQ(waitpid(stopped, &status, WUNTRACED), stopped);
  ASSERT_TRUE(WIFSTOPPED(status)) << status;
  ExpectProgress(**neighbour);
  kill(stopped, SIGCONT);
  EXPECT_EQ(ExitCode(stopped), 0);
  EXPECT_TRUE((*neighbour)->Stop().ok());
}

// ---- The sandbox -------------------------------------------------------------------------------

TEST_F(HostileTest, EveryThreadOfTheRunningDaemonIsConfined) {
  if (const char* mode = getenv("OFFLOADD_SANDBOX"); mode != nullptr && std::string(mode) == "off")
    GTEST_SKIP() << "OFFLOADD_SANDBOX=off";
  StartDaemon();
  auto neighbour = HonestNeighbour::Open("honest", pool_);
  ASSERT_TRUE(neighbour.ok()) << neighbour.status();
  int threads = 0;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_, "/task"))) {
    const std::filesystem::path path = task.path() / "status";
    EXPECT_EQ(StatusLine(path, "NoNewPrivs"), "1");
    EXPECT_EQ(StatusLine(path, "Seccomp"), "2");
    for (const char* set : {"CapInh", "CapPrm", "CapEff", "CapAmb"})
      EXPECT_EQ(StatusLine(path, set), std::string(16, '0')) << set;
    ++threads;
  }
  EXPECT_GT(threads, 3);
}

// ---- Who is admitted ---------------------------------------------------------------------------

class PeerTest : public HostileTest {
 protected:
  void SetUp() override {
    HostileTest::SetUp();
    if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
    std::filesystem::permissions(directory_, std::filesystem::perms(0755));
    const std::filesystem::path copy = std::filesystem::path(directory_) / "hostile_client";
    std::filesystem::copy_file(client_, copy);
    client_ = copy;
  }
};

TEST_F(PeerTest, AnotherUserIsNotAdmitted) {
  StartDaemon();
  EXPECT_EQ(RunAsOther("open"), 1);
  EXPECT_TRUE(std::filesystem::is_empty(pool_));
}

TEST_F(PeerTest, AnotherUserWhoIsNamedHasJobsOfItsOwn) {
  StartDaemon({"--allow-uid", absl::StrCat(kOtherUser)});
  EXPECT_EQ(RunAsOther("open"), 0);
  EXPECT_EQ(RunAsOther("list"), 1);  // names of others' jobs are not for it
  EXPECT_EQ(ExitCode(Spawn(AttackCommand("open", "0"))), 0);
  EXPECT_EQ(ExitCode(Spawn(AttackCommand("list", "0"))), 0);
  struct stat info;
  ASSERT_EQ(stat((directory_ + "/control.sock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(PeerTest, AJobOfAnotherUserCarriesItsNumber) {
  StartDaemon({"--allow-gid", absl::StrCat(kOtherUser)});
  EXPECT_EQ(RunAsOther("tokens"), 0);
  auto own = HonestNeighbour::Open("u65534.honest", pool_);  // trusted: any name
  ASSERT_TRUE(own.ok()) << own.status();
}

TEST_F(PeerTest, AdmittingOthersWithoutPoolsIsRefused) {
  EXPECT_EQ(ExitCode(Spawn({getenv("OFFLOADD_BINARY"), "--socket", socket_, "--allow-uid", "1"})),
            1);
}

TEST_F(PeerTest, ASocketThatOthersCouldReplaceIsRefused) {
  std::filesystem::permissions(directory_, std::filesystem::perms(0777));
  EXPECT_EQ(ExitCode(Spawn({getenv("OFFLOADD_BINARY"), "--socket", socket_, "--pool", pool_})), 1);
}

}  // namespace
}  // namespace offload::tests

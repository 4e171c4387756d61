#include "offloadd/sandbox.h"

#include <fcntl.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/environment.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

// Exit codes of a child.
constexpr int kAsExpected = 0;
constexpr int kNotAsExpected = 1;
constexpr int kNoSandbox = 2;

// The sandbox cannot be left: every case has a process of its own. Returns how it ended.
int InSandbox(SandboxMode mode, const std::function<bool()>& as_expected) {
  const pid_t child = fork();
  if (child == 0) {
    if (!DropPrivileges().ok() || !RestrictSystemCalls(mode).ok()) _exit(kNoSandbox);
    _exit(as_expected() ? kAsExpected : kNotAsExpected);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

bool Holds(const std::function<bool()>& as_expected) {
  const int status = InSandbox(SandboxMode::kOn, as_expected);
  return WIFEXITED(status) && WEXITSTATUS(status) == kAsExpected;
}

bool IsForbidden(long result) { return result == -1 && errno == EPERM; }

// A line of /proc/…/status, without the name and blanks.
std::string StatusLine(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name + ":\t", 0) == 0) return line.substr(name.size() + 2);
  }
  return "";
}

bool IsConfined(const std::string& path) {
  const std::string none(16, '0');
  return StatusLine(path, "NoNewPrivs") == "1" && StatusLine(path, "Seccomp") == "2" &&
         StatusLine(path, "CapEff") == none && StatusLine(path, "CapPrm") == none &&
         StatusLine(path, "CapInh") == none && StatusLine(path, "CapAmb") == none;
}

TEST(SandboxTest, TheProcessHasNoPrivilegeAndAFilter) {
  EXPECT_TRUE(Holds([] { return IsConfined("/proc/self/status"); }));
  if (geteuid() == 0) {
    EXPECT_TRUE(
        Holds([] { return StatusLine("/proc/self/status", "CapBnd") == std::string(16, '0'); }));
  }
}

TEST(SandboxTest, ThreadsFromBeforeAndAfterAreConfinedToo) {
  const pid_t child = fork();
  if (child == 0) {
    if (!DropPrivileges().ok()) _exit(kNoSandbox);
    std::atomic<int> stage{0};
    std::atomic<bool> early_is_confined{false};
    std::thread early([&] {
      while (stage.load() == 0) std::this_thread::yield();
      early_is_confined = IsConfined("/proc/thread-self/status");
    });
    const bool loaded = RestrictSystemCalls(SandboxMode::kOn).ok();
    stage = 1;
    early.join();
    bool late_is_confined = false;
    std::thread([&] { late_is_confined = IsConfined("/proc/thread-self/status"); }).join();
    _exit(loaded && early_is_confined && late_is_confined ? kAsExpected : kNotAsExpected);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SandboxTest, NothingIsRunAndNothingForked) {
  EXPECT_TRUE(Holds([] {
    char* const arguments[] = {const_cast<char*>("/bin/true"), nullptr};
    return IsForbidden(execv("/bin/true", arguments));
  }));
  EXPECT_TRUE(Holds([] { return fork() == -1; }));
  EXPECT_TRUE(Holds([] { return IsForbidden(syscall(SYS_vfork)); }));
}

TEST(SandboxTest, SocketsAreLocalAndGoNowhere) {
  EXPECT_TRUE(Holds([] { return IsForbidden(socket(AF_INET, SOCK_STREAM, 0)); }));
  EXPECT_TRUE(Holds([] { return IsForbidden(socket(AF_NETLINK, SOCK_RAW, 0)); }));
  EXPECT_TRUE(Holds([] {
    int pair[2];
    return socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0;
  }));
  EXPECT_TRUE(Holds([] {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr address{.sa_family = AF_UNIX, .sa_data = "/x"};
    return fd >= 0 && IsForbidden(connect(fd, &address, sizeof(address))) &&
           IsForbidden(bind(fd, &address, sizeof(address)));
  }));
}

TEST(SandboxTest, NoMemoryBecomesExecutable) {
  EXPECT_TRUE(Holds([] {
    void* const executable =
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return executable == MAP_FAILED && errno == EPERM;
  }));
  EXPECT_TRUE(Holds([] {
    void* const plain =
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return plain != MAP_FAILED && IsForbidden(mprotect(plain, 4096, PROT_READ | PROT_EXEC));
  }));
}

TEST(SandboxTest, OtherProcessesAreOutOfReach) {
  EXPECT_TRUE(Holds([] { return IsForbidden(ptrace(PTRACE_TRACEME, 0, 0, 0)); }));
  EXPECT_TRUE(Holds([] { return IsForbidden(kill(getppid(), 0)); }));
  EXPECT_TRUE(Holds([] { return IsForbidden(syscall(SYS_tgkill, getppid(), getppid(), 0)); }));
  EXPECT_TRUE(
      Holds([] { return IsForbidden(syscall(SYS_process_vm_readv, getppid(), 0, 0, 0, 0, 0)); }));
  EXPECT_TRUE(Holds([] { return IsForbidden(syscall(SYS_mount, "a", "/", "tmpfs", 0, 0)); }));
  EXPECT_TRUE(Holds([] { return IsForbidden(syscall(SYS_bpf, 0, 0, 0)); }));
}

TEST(SandboxTest, FilesAndThreadsWorkAsBefore) {
  const char* const folder = std::getenv("TEST_TMPDIR");
  const std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/sandbox";
  EXPECT_TRUE(Holds([&] {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct statx info;
    return fd >= 0 && pwrite(fd, "x", 1, 0) == 1 && fsync(fd) == 0 &&
           statx(fd, "", AT_EMPTY_PATH, STATX_ALL, &info) == 0 && unlink(path.c_str()) == 0 &&
           memfd_create("memory", MFD_CLOEXEC) >= 0;
  }));
}

TEST(SandboxTest, AStrictSandboxEndsTheProcess) {
  const int status = InSandbox(SandboxMode::kStrict, [] {
    socket(AF_INET, SOCK_STREAM, 0);
    return false;
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGSYS);
  EXPECT_EQ(InSandbox(SandboxMode::kStrict, [] { return true; }), 0);
}

// ---- What a container may have taken away ------------------------------------------------------

struct Forbidden {
  int call;
  std::vector<scmp_arg_cmp> conditions;
};

// Whether `as_expected` holds in a process to which those calls are forbidden.
bool HoldsWithout(const std::vector<Forbidden>& calls, const std::function<bool()>& as_expected) {
  const pid_t child = fork();
  if (child == 0) {
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
    for (const Forbidden& each : calls) {
      if (seccomp_rule_add_array(filter, SCMP_ACT_ERRNO(EPERM), each.call,
                                 static_cast<unsigned>(each.conditions.size()),
                                 each.conditions.data()) != 0)
        _exit(kNoSandbox);
    }
    if (seccomp_load(filter) != 0) _exit(kNoSandbox);
    _exit(as_expected() ? kAsExpected : kNotAsExpected);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status == 0;
}

bool Tells(const absl::Status& status, const std::string& what) {
  return !status.ok() && status.message().find(what) != absl::string_view::npos;
}

TEST(SandboxTest, PrivilegesThatCannotBeDroppedAreTold) {
  EXPECT_TRUE(
      HoldsWithout({{SCMP_SYS(capset), {}}}, [] { return Tells(DropPrivileges(), "capset"); }));
  EXPECT_TRUE(HoldsWithout({{SCMP_SYS(prctl), {SCMP_A0(SCMP_CMP_EQ, PR_SET_NO_NEW_PRIVS)}}},
                           [] { return Tells(DropPrivileges(), "PR_SET_NO_NEW_PRIVS"); }));
}

TEST(SandboxTest, AFilterThatCannotBeLoadedIsTold) {
  EXPECT_TRUE(HoldsWithout(
      {{SCMP_SYS(seccomp), {}}, {SCMP_SYS(prctl), {SCMP_A0(SCMP_CMP_EQ, PR_SET_SECCOMP)}}},
      [] { return Tells(RestrictSystemCalls(SandboxMode::kOn), "seccomp"); }));
}

TEST(SandboxTest, LimitsThatCannotBeChangedOrReadStayAsTheyAre) {
  EXPECT_TRUE(HoldsWithout({{SCMP_SYS(prlimit64), {}}}, [] { return DropPrivileges().ok(); }));
  EXPECT_TRUE(HoldsWithout({{SCMP_SYS(prlimit64), {SCMP_A2(SCMP_CMP_NE, 0)}}},
                           [] { return DropPrivileges().ok(); }));
}

TEST(SandboxTest, ModesHaveNames) {
  EXPECT_EQ(ParseSandboxMode("off"), SandboxMode::kOff);
  EXPECT_EQ(ParseSandboxMode("on"), SandboxMode::kOn);
  EXPECT_EQ(ParseSandboxMode("strict"), SandboxMode::kStrict);
  for (const std::string& name : ChoicesIn(kSandboxChoices))
    EXPECT_NE(ParseSandboxMode(name), std::nullopt) << name;
  EXPECT_EQ(ParseSandboxMode("no"), std::nullopt);
}

}  // namespace
}  // namespace offload::daemon

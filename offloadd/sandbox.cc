#include "offloadd/sandbox.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/fs.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::daemon {
namespace {

// ---- What serving takes, whatever the arguments ------------------------------------------------

constexpr int kFileCalls[] = {
    SCMP_SYS(access),      SCMP_SYS(close),
    SCMP_SYS(close_range), SCMP_SYS(copy_file_range),
    SCMP_SYS(dup),         SCMP_SYS(dup2),
    SCMP_SYS(dup3),        SCMP_SYS(faccessat),
    SCMP_SYS(faccessat2),  SCMP_SYS(fadvise64),
    SCMP_SYS(fallocate),   SCMP_SYS(fchmod),
    SCMP_SYS(fcntl),       SCMP_SYS(fdatasync),
    SCMP_SYS(fgetxattr),   SCMP_SYS(flock),
    SCMP_SYS(fstat),       SCMP_SYS(fstatfs),
    SCMP_SYS(fsync),       SCMP_SYS(ftruncate),
    SCMP_SYS(getcwd),      SCMP_SYS(getdents64),
    SCMP_SYS(link),        SCMP_SYS(linkat),
    SCMP_SYS(lseek),       SCMP_SYS(lstat),
    SCMP_SYS(mkdir),       SCMP_SYS(mkdirat),
    SCMP_SYS(newfstatat),  SCMP_SYS(open),
    SCMP_SYS(openat),      SCMP_SYS(openat2),
    SCMP_SYS(pread64),     SCMP_SYS(preadv),
    SCMP_SYS(preadv2),     SCMP_SYS(pwrite64),
    SCMP_SYS(pwritev),     SCMP_SYS(pwritev2),
    SCMP_SYS(read),        SCMP_SYS(readlink),
    SCMP_SYS(readlinkat),  SCMP_SYS(readv),
    SCMP_SYS(rename),      SCMP_SYS(renameat),
    SCMP_SYS(renameat2),   SCMP_SYS(rmdir),
    SCMP_SYS(stat),        SCMP_SYS(statfs),
    SCMP_SYS(statx),       SCMP_SYS(sync_file_range),
    SCMP_SYS(umask),       SCMP_SYS(unlink),
    SCMP_SYS(unlinkat),    SCMP_SYS(write),
    SCMP_SYS(writev),
};

constexpr int kIoCalls[] = {
    SCMP_SYS(epoll_create1),
    SCMP_SYS(epoll_ctl),
    SCMP_SYS(epoll_pwait),
    SCMP_SYS(epoll_pwait2),
    SCMP_SYS(epoll_wait),
    SCMP_SYS(eventfd2),
    SCMP_SYS(io_cancel),
    SCMP_SYS(io_destroy),
    SCMP_SYS(io_getevents),
    SCMP_SYS(io_pgetevents),
    SCMP_SYS(io_setup),
    SCMP_SYS(io_submit),
    SCMP_SYS(io_uring_enter),
    SCMP_SYS(io_uring_register),
    SCMP_SYS(io_uring_setup),
    SCMP_SYS(pipe2),
    SCMP_SYS(poll),
    SCMP_SYS(ppoll),
    SCMP_SYS(pselect6),
    SCMP_SYS(select),
    SCMP_SYS(signalfd4),
    SCMP_SYS(timerfd_create),
    SCMP_SYS(timerfd_settime),
    SCMP_SYS(pidfd_open),
};

constexpr int kSocketCalls[] = {
    SCMP_SYS(accept),     SCMP_SYS(accept4),    SCMP_SYS(getpeername), SCMP_SYS(getsockname),
    SCMP_SYS(getsockopt), SCMP_SYS(recvfrom),   SCMP_SYS(recvmsg),     SCMP_SYS(sendmsg),
    SCMP_SYS(sendto),     SCMP_SYS(setsockopt), SCMP_SYS(shutdown),
};

constexpr int kMemoryCalls[] = {
    SCMP_SYS(brk),        SCMP_SYS(get_mempolicy), SCMP_SYS(madvise), SCMP_SYS(mbind),
    SCMP_SYS(membarrier), SCMP_SYS(memfd_create),  SCMP_SYS(mincore), SCMP_SYS(mlock),
    SCMP_SYS(mlock2),     SCMP_SYS(mremap),        SCMP_SYS(msync),   SCMP_SYS(munlock),
    SCMP_SYS(munmap),     SCMP_SYS(set_mempolicy),
};

constexpr int kProcessCalls[] = {
    SCMP_SYS(clock_getres),
    SCMP_SYS(clock_gettime),
    SCMP_SYS(clock_nanosleep),
    SCMP_SYS(exit),
    SCMP_SYS(exit_group),
    SCMP_SYS(futex),
    SCMP_SYS(futex_waitv),
    SCMP_SYS(getcpu),
    SCMP_SYS(getegid),
    SCMP_SYS(geteuid),
    SCMP_SYS(getgid),
    SCMP_SYS(getgroups),
    SCMP_SYS(getpid),
    SCMP_SYS(getppid),
    SCMP_SYS(getpriority),
    SCMP_SYS(getrandom),
    SCMP_SYS(getrlimit),
    SCMP_SYS(getrusage),
    SCMP_SYS(gettid),
    SCMP_SYS(gettimeofday),
    SCMP_SYS(getuid),
    SCMP_SYS(nanosleep),
    SCMP_SYS(restart_syscall),
    SCMP_SYS(rseq),
    SCMP_SYS(rt_sigaction),
    SCMP_SYS(rt_sigpending),
    SCMP_SYS(rt_sigprocmask),
    SCMP_SYS(rt_sigreturn),
    SCMP_SYS(rt_sigtimedwait),
    SCMP_SYS(sched_getaffinity),
    SCMP_SYS(sched_getparam),
    SCMP_SYS(sched_getscheduler),
    SCMP_SYS(sched_setaffinity),
    SCMP_SYS(sched_yield),
    SCMP_SYS(set_robust_list),
    SCMP_SYS(setpriority),
    SCMP_SYS(sigaltstack),
    SCMP_SYS(sysinfo),
    SCMP_SYS(time),
    SCMP_SYS(times),
    SCMP_SYS(uname),
};

// ---- What depends on an argument ---------------------------------------------------------------

constexpr uint64_t kIoctls[] = {FICLONE,      FICLONERANGE, FS_IOC_GETFLAGS, FS_IOC_SETFLAGS,
                                BLKGETSIZE64, BLKSSZGET,    BLKPBSZGET,      FIONREAD,
                                FIONBIO,      TCGETS};
constexpr uint64_t kPrctls[] = {PR_SET_NAME, PR_GET_NAME, PR_SET_TIMERSLACK, PR_CAPBSET_READ,
                                PR_GET_DUMPABLE};

class Filter {
 public:
  // Without memory there is no context, and then every call below fails.
  explicit Filter(uint32_t otherwise) : context_(seccomp_init(otherwise)) {}
  ~Filter() { seccomp_release(context_); }
  Filter(const Filter&) = delete;
  Filter& operator=(const Filter&) = delete;

  template <size_t kCount>
  void Allow(const int (&calls)[kCount]) {
    for (const int call : calls) Add(SCMP_ACT_ALLOW, call);
  }
  void AllowIf(int call, const scmp_arg_cmp& condition) { Add(SCMP_ACT_ALLOW, call, {condition}); }
  template <size_t kCount>
  void AllowFor(int call, unsigned argument, const uint64_t (&values)[kCount]) {
    for (const uint64_t value : values) AllowIf(call, SCMP_CMP(argument, SCMP_CMP_EQ, value));
  }
  void Deny(int call, int error_number) { Add(SCMP_ACT_ERRNO(error_number), call); }

  // For all threads. The first error of all calls.
  absl::Status Load() {
    Note(seccomp_attr_set(context_, SCMP_FLTATR_CTL_TSYNC, 1), "TSYNC");
    if (error_.ok()) Note(seccomp_load(context_), "seccomp_load");
    return error_;
  }

 private:
  void Add(uint32_t action, int call, std::initializer_list<scmp_arg_cmp> conditions = {}) {
    // A call that this architecture does not have needs no rule.
    const int result =
        seccomp_rule_add_array(context_, action, call, static_cast<unsigned>(conditions.size()),
                               conditions.size() == 0 ? nullptr : conditions.begin());
    if (result != -EDOM) Note(result, "seccomp_rule_add");
  }
  void Note(int result, const char* what) {
    if (result < 0 && error_.ok())
      error_ = absl::FailedPreconditionError(absl::StrCat(what, ": ", ErrnoText(-result)));
  }

  scmp_filter_ctx context_;
  absl::Status error_;
};

void AddRules(Filter& filter) {
  filter.Allow(kFileCalls);
  filter.Allow(kIoCalls);
  filter.Allow(kSocketCalls);
  filter.Allow(kMemoryCalls);
  filter.Allow(kProcessCalls);
  filter.AllowFor(SCMP_SYS(ioctl), 1, kIoctls);
  filter.AllowFor(SCMP_SYS(prctl), 0, kPrctls);
  for (const int call : {SCMP_SYS(socket), SCMP_SYS(socketpair)})
    filter.AllowIf(call, SCMP_A0(SCMP_CMP_EQ, AF_UNIX));
  for (const int call : {SCMP_SYS(mmap), SCMP_SYS(mprotect)})
    filter.AllowIf(call, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
  // Threads, never processes. clone3 has its flags in memory, where no filter sees them: the C
  // library takes ENOSYS for an old kernel and uses clone.
  filter.AllowIf(SCMP_SYS(clone), SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, CLONE_THREAD));
  filter.Deny(SCMP_SYS(clone3), ENOSYS);
  // abort() sends a signal to the process itself; nobody else may get one.
  const auto self = static_cast<uint64_t>(getpid());
  filter.AllowIf(SCMP_SYS(tgkill), SCMP_A0(SCMP_CMP_EQ, self));
  filter.AllowIf(SCMP_SYS(prlimit64), SCMP_A2(SCMP_CMP_EQ, 0));  // asks for limits, sets none
}

// Registered buffers are charged to this limit once CAP_IPC_LOCK is gone.
void RaiseLockedMemory() {
  const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
  if (setrlimit(RLIMIT_MEMLOCK, &unlimited) == 0) return;
  rlimit limit;
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_MEMLOCK, &limit);
}

absl::Status DropCapabilities() {
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  // Fails without CAP_SETPCAP, and then there is nothing in force that could be regained.
  for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; ++capability)
    prctl(PR_CAPBSET_DROP, capability);
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  const std::array<__user_cap_data_struct, 2> none{};
  if (syscall(SYS_capset, &header, none.data()) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("capset: ", ErrnoText(errno)));
}

}  // namespace

std::optional<SandboxMode> ParseSandboxMode(std::string_view text) {
  if (text == "off") return SandboxMode::kOff;
  if (text == "on") return SandboxMode::kOn;
  if (text == "strict") return SandboxMode::kStrict;
  return std::nullopt;
}

absl::Status DropPrivileges() {
  RaiseLockedMemory();
  const int no_new_privileges = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  const int error_number = errno;
  OFFLOAD_RETURN_IF_ERROR(DropCapabilities());
  if (no_new_privileges == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("PR_SET_NO_NEW_PRIVS: ", ErrnoText(error_number)));
}

absl::Status RestrictSystemCalls(SandboxMode mode) {
  Filter filter(mode == SandboxMode::kStrict ? SCMP_ACT_KILL_PROCESS : SCMP_ACT_ERRNO(EPERM));
  AddRules(filter);
  return filter.Load();
}

}  // namespace offload::daemon

// aio/locked_memory.h
//
// For tests: what this user may lock in memory, and code that runs as one who may lock little. What
// rings and buffers lock is counted per user, over all processes.
//
// Thread safety: RunWithLittleMemlock changes a limit of the process while its function runs.
#pragma once

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <functional>
#include <thread>

namespace offload::aio {

// True when at least so much may be locked.
inline bool MayLock(size_t size_bytes) {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[2] = {};
  const bool may_ignore_limit =
      ::syscall(SYS_capget, &header, sets) == 0 && (sets[0].effective & (1u << CAP_IPC_LOCK)) != 0;
  rlimit limit = {};
  return may_ignore_limit ||
         (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur >= size_bytes);
}

// Runs `function` on a thread without capabilities, while at most `limit_bytes` may be locked; as a
// user who has no other process, where this one may become another. False where nothing has run,
// because the hard limit is lower.
inline bool RunWithLittleMemlock(size_t limit_bytes, const std::function<void()>& function) {
  rlimit before = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &before) != 0 || before.rlim_max < limit_bytes) return false;
  bool ran = false;
  std::thread([&] {
    // System calls, not the library's functions: those change every thread.
    const auto user = 1'000'000'000u + static_cast<unsigned>(::getpid());
    [[maybe_unused]] const long changed = ::syscall(SYS_setresuid, user, user, user);
    __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct none[2] = {};
    const rlimit lower = {limit_bytes, before.rlim_max};
    if (::syscall(SYS_capset, &header, none) != 0 || ::setrlimit(RLIMIT_MEMLOCK, &lower) != 0)
      return;
    function();
    ran = true;
    ::setrlimit(RLIMIT_MEMLOCK, &before);
  }).join();
  return ran;
}

}  // namespace offload::aio

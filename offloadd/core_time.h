// offloadd/core_time.h
//
// How long work took, and how much of that its thread had a core: what is missing went to others
// that computed meanwhile, such as torch's threads, which spin while they wait for each other.
//
// Thread safety: Now() tells of the calling thread; the rest is plain data.
#pragma once

#include <time.h>

#include <cstdint>

namespace offload::daemon {

struct CoreTime {
  int64_t nanoseconds = 0, core_nanoseconds = 0;

  static CoreTime Now() { return {Read(CLOCK_MONOTONIC), Read(CLOCK_THREAD_CPUTIME_ID)}; }
  CoreTime Since(const CoreTime& before) const {
    return {nanoseconds - before.nanoseconds, core_nanoseconds - before.core_nanoseconds};
  }
  void Add(const CoreTime& more) {
    nanoseconds += more.nanoseconds;
    core_nanoseconds += more.core_nanoseconds;
  }

 private:
  static int64_t Read(clockid_t clock) {
    timespec now = {};
    clock_gettime(clock, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  }
};

}  // namespace offload::daemon

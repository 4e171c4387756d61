// client/health.h
//
// Whether a session still works, and if not, why. The first reason stays; a forked child is dead
// from its first instruction.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace offload::client {

class Health {
 public:
  // Registers the fork handler of the process when it is the first.
  Health();

  // Two loads: for the fast path.
  bool ok() const { return !failed_.load(std::memory_order_acquire) && !forked(); }
  // In a child that was forked after this session began. Its threads and locks are not to be
  // touched.
  bool forked() const { return forks_ != fork_count_.load(std::memory_order_relaxed); }

  absl::Status status() const;

  // True when this reason is the first.
  bool Fail(const absl::Status& reason);

 private:
  static void CountFork();
  // Forks between the program's start and this process; a session of before has another count.
  static std::atomic<uint32_t> fork_count_;

  uint32_t forks_ = 0;
  std::atomic<bool> failed_{false};
  mutable absl::Mutex mutex_;
  absl::Status reason_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace offload::client

// base/worker_pool.h
//
// A fixed number of threads that run posted functions in the order of posting.
//
// Invariants
//   * Every posted function runs exactly once, also those still waiting when the pool is destroyed:
//   the destructor drains.
//   * Functions must not throw and must not destroy the pool. They may post.
//
// Thread safety: Post may be called from any thread, until destruction begins or from a function of
// the pool.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace offload {

class WorkerPool {
 public:
  // Starts `thread_count` (at least 1) threads, or as many as the system gives; std::system_error
  // when that is none. `name` shows in ps and debuggers, cut to 15 bytes.
  WorkerPool(size_t thread_count, const std::string& name);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void Post(std::function<void()> work);

  size_t thread_count() const { return threads_.size(); }

 private:
  void RunWorker();

  // std::mutex, because ThreadSanitizer understands it also where Abseil comes without
  // instrumentation.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // guarded by mutex_
  size_t running_count_ = 0;                 // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  std::vector<std::thread> threads_;
};

// How many of `wanted` threads could be started now beside each other: limits of a user, of a
// container and of address space bound them. They have ended when this returns.
size_t CountStartableThreads(size_t wanted);

}  // namespace offload

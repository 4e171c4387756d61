#include "base/worker_pool.h"

#include <pthread.h>

#include <latch>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace offload {

WorkerPool::WorkerPool(size_t thread_count, const std::string& name) {
  OFFLOAD_CHECK(thread_count > 0);
  threads_.reserve(thread_count);
  for (size_t i = 0; i < thread_count; ++i) {
    try {
      threads_.emplace_back([this] { RunWorker(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      return;
    }
    ::pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
  }
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Post(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    OFFLOAD_CHECK(!stopping_ || running_count_ > 0) << "posted to a pool that has ended";
    queue_.push_back(std::move(work));
  }
  changed_.notify_one();
}

// A worker leaves only when nothing waits and nobody runs, because what runs may still post.
void WorkerPool::RunWorker() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty() || (stopping_ && running_count_ == 0); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    ++running_count_;
    lock.unlock();
    work();
    work = nullptr;  // what it holds is freed outside the lock
    lock.lock();
    --running_count_;
    if (stopping_ && running_count_ == 0) changed_.notify_all();
  }
}

size_t CountStartableThreads(size_t wanted) {
  std::latch all_counted(1);
  std::vector<std::thread> threads;
  threads.reserve(wanted);
  try {
    while (threads.size() < wanted) threads.emplace_back([&] { all_counted.wait(); });
  } catch (const std::system_error&) {
    // As many as there are.
  }
  all_counted.count_down();
  for (std::thread& thread : threads) thread.join();
  return threads.size();
}

}  // namespace offload

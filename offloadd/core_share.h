// offloadd/core_share.h
//
// What a job computes takes cores that its ranks compute on, too. So it runs on threads of its own,
// one for every core, but only `width` computations at a time, in the order in which they came: few
// while ranks compute, all while they wait for what is computed.
//
// Invariants
//   * At most the width at the time of its start runs beside a computation; those that run when it
//   shrinks end by themselves.
//   * Whoever says Finished() lets the next one start, so every computation says it once.
//
// Thread safety: the loop's thread only; computations run on the executor's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "offloadd/machine.h"

namespace offload::daemon {

class CoreShare {
 public:
  // `executor` has so many threads; all of them are used until SetWidth().
  void Start(Executor executor, uint32_t thread_count) {
    executor_ = std::move(executor);
    thread_count_ = width_ = thread_count;
  }
  uint32_t thread_count() const { return thread_count_; }
  // At least 1.
  void SetWidth(uint32_t width) {
    width_ = width;
    StartNext();
  }
  void Run(std::function<void()> work) {
    waiting_.push_back(std::move(work));
    StartNext();
  }
  void Finished() {
    --running_;
    StartNext();
  }

 private:
  void StartNext() {
    while (running_ < width_ && !waiting_.empty()) {
      std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      ++running_;
      executor_(std::move(work));
    }
  }

  Executor executor_;
  uint32_t thread_count_ = 1, width_ = 1;
  uint32_t running_ = 0;  // given to the executor, and not Finished()
  std::deque<std::function<void()>> waiting_;
};

}  // namespace offload::daemon

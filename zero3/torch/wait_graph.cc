#include "zero3/torch/wait_graph.h"

#include <algorithm>
#include <utility>

namespace offload::zero3 {

WaitGraph& WaitGraph::OfProcess() {
  static auto* const kGraph = new WaitGraph;
  return *kGraph;
}

bool WaitGraph::Enter(Thread self, const void* resource, Needs needs,
                      std::span<const Thread> holders) {
  std::lock_guard lock(mutex_);
  waits_[self] = {resource, needs, {holders.begin(), holders.end()}};
  if (!IsStuckLocked(self)) return true;
  waits_.erase(self);
  return false;
}

void WaitGraph::Leave(Thread self) {
  std::lock_guard lock(mutex_);
  waits_.erase(self);
}

void WaitGraph::Wake(const void* resource) {
  std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const auto& wait) { return wait.second.resource == resource; });
}

// Takes all that wait for stuck and frees those that a free one can help, until there are no more.
bool WaitGraph::IsStuckLocked(Thread self) const {
  std::set<Thread> stuck;
  for (const auto& [thread, wait] : waits_) stuck.insert(thread);
  const auto goes_on = [&](Thread thread) {
    const Wait& wait = waits_.at(thread);
    const auto is_free = [&](Thread holder) { return !stuck.contains(holder); };
    return wait.needs == Needs::kAnyHolder
               ? std::any_of(wait.holders.begin(), wait.holders.end(), is_free)
               : std::all_of(wait.holders.begin(), wait.holders.end(), is_free);
  };
  while (std::erase_if(stuck, goes_on) > 0 && stuck.contains(self)) {
  }
  return stuck.contains(self);
}

bool WaitQueue::Wait(std::unique_lock<std::mutex>& lock, WaitGraph::Needs needs,
                     std::span<const WaitGraph::Thread> holders) {
  const WaitGraph::Thread self = std::this_thread::get_id();
  if (!graph_.Enter(self, this, needs, holders)) return false;
  WaitForOthers(lock);
  graph_.Leave(self);
  return true;
}

void WaitQueue::WaitForOthers(std::unique_lock<std::mutex>& lock) {
  ++waiting_;
  changed_.wait(lock);
  --waiting_;
}

void WaitQueue::NotifyAll() {
  if (waiting_ == 0) return;
  graph_.Wake(this);
  changed_.notify_all();
}

}  // namespace offload::zero3

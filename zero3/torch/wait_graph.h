// zero3/torch/wait_graph.h
//
// Room that operations hold while they ask for more (staging, window of gradients, a weight that is
// written) can make threads wait for each other in a circle. Who is about to sleep says here who
// has what it needs; the one that would close a circle is told so instead, and fails its operation,
// which gives back what it holds.
//
// Invariants
//   * A thread that is not registered is taken to come back by itself: it computes, or waits for
//   the daemon, which answers.
//   * Every registration is up to date: whoever changes the holders of a resource wakes its
//   waiters, and waking forgets them until they look again.
//   * So a circle is found by the thread that closes it, and nobody else ever fails.
//
// Thread safety: all methods may be called from any thread. A WaitQueue's are called with the lock
// of its resource.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

namespace offload::zero3 {

class WaitGraph {
 public:
  using Thread = std::thread::id;
  // Whether a waiter goes on as soon as one holder has let go, or has to wait for all of them.
  enum class Needs { kAnyHolder, kAllHolders };

  // Of all engines in the process: one thread may hold something of several.
  static WaitGraph& OfProcess();

  // `self` is about to sleep for `resource`, which `holders` have (itself, too, if it is among
  // them). False, and nothing is registered, when they will never let go of it.
  bool Enter(Thread self, const void* resource, Needs needs, std::span<const Thread> holders);
  void Leave(Thread self);
  void Wake(const void* resource);

 private:
  struct Wait {
    const void* resource;
    Needs needs;
    std::vector<Thread> holders;
  };
  bool IsStuckLocked(Thread self) const;

  std::mutex mutex_;
  std::map<Thread, Wait> waits_;
};

// A condition variable of a resource whose waiters are in the graph.
class WaitQueue {
 public:
  explicit WaitQueue(WaitGraph& graph = WaitGraph::OfProcess()) : graph_(graph) {}

  // Sleeps until the next NotifyAll(), or for no reason; false, at once, in a circle.
  bool Wait(std::unique_lock<std::mutex>& lock, WaitGraph::Needs needs,
            std::span<const WaitGraph::Thread> holders);
  // Sleeps while something lets go that is no thread.
  void WaitForOthers(std::unique_lock<std::mutex>& lock);
  // The holders of the resource have changed. With the lock held.
  void NotifyAll();

 private:
  WaitGraph& graph_;
  std::condition_variable changed_;
  int waiting_ = 0;
};

}  // namespace offload::zero3

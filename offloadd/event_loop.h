// offloadd/event_loop.h
//
// One thread that waits for descriptors and runs what others post to it. Whatever it owns needs no
// lock.
//
// Invariants
//   * Posted functions and callbacks run on the thread that is inside Run(), one at a time, posts
//   in the order of posting.
//   * A callback may watch, unwatch and post; after Unwatch(fd) its callback does not run again.
//   * What Post() has taken is run, before Run() returns; after that Post() takes nothing: a caller
//   that waits is always answered.
//
// Thread safety: Post, Call and Stop from any thread; the rest from the loop's thread, or before
// Run().
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "base/error.h"
#include "base/unique_fd.h"

namespace offload::daemon {

class EventLoop {
 public:
  static absl::StatusOr<std::unique_ptr<EventLoop>> Create();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void Run();
  // One turn without sleep, for whoever runs the loop himself: what is posted, and the end of the
  // turn. No descriptor is looked at.
  void RunOnce();
  void Stop();  // Run() returns when nothing is posted any more
  // False, and `work` will not run, when the loop has ended.
  bool Post(std::function<void()> work);

  // Runs `work`, which is given a function to answer with, on the loop and waits for the answer. It
  // may be given later, but before the loop ends. OFD-1802 when the loop has ended. Must not be
  // called from the loop.
  template <typename Answer>
  Answer Call(std::function<void(std::function<void(Answer)>)> work) {
    auto promise = std::make_shared<std::promise<Answer>>();
    std::future<Answer> answer = promise->get_future();
    const bool posted = Post([promise, work = std::move(work)] {
      work([promise](Answer value) { promise->set_value(std::move(value)); });
    });
    if (!posted) return MakeError(ErrorId::kSessionEnded, "the session is closed");
    return answer.get();
  }

  // Calls `ready` in each turn in which `fd` can be read or has hung up.
  void Watch(int fd, std::function<void()> ready);
  void Unwatch(int fd);

  // What runs at the end of every turn. It returns how long the loop may sleep, in milliseconds;
  // -1: until something happens, 0: not at all.
  void SetTurn(std::function<int()> turn) { turn_ = std::move(turn); }

 private:
  EventLoop(UniqueFd epoll, UniqueFd wake) : epoll_(std::move(epoll)), wake_(std::move(wake)) {}
  // False when the loop has ended.
  bool RunPosted();
  void Dispatch(int timeout_ms);

  UniqueFd epoll_, wake_;
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;  // guarded by mutex_
  bool stopping_ = false;                      // guarded by mutex_
  bool ended_ = false;                         // guarded by mutex_
  std::unordered_map<int, std::shared_ptr<std::function<void()>>> watches_;
  std::function<int()> turn_;
};

}  // namespace offload::daemon

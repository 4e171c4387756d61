#include "offloadd/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/error.h"

namespace offload::daemon {
namespace {

absl::Status Refused(const char* call, int error_number) {
  const std::string what = std::string(call) + ": " + ErrnoText(error_number);
  if (error_number == EMFILE || error_number == ENFILE) return MakeError(ErrorId::kOpenFiles, what);
  return absl::ResourceExhaustedError(what);
}

}  // namespace

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Create() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !wake.valid()) {
    return Refused("epoll or eventfd", errno);
  }
  epoll_event event{.events = EPOLLIN, .data = {.fd = wake.get()}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return Refused("epoll_ctl", errno);
  }
  return std::unique_ptr<EventLoop>(new EventLoop(std::move(epoll), std::move(wake)));
}

void EventLoop::Run() {
  while (RunPosted()) Dispatch(turn_ ? turn_() : -1);
}

void EventLoop::RunOnce() {
  RunPosted();
  if (turn_) turn_();
}

void EventLoop::Stop() {
  Post([this] {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  });
}

bool EventLoop::Post(std::function<void()> work) {
  // All of it under the lock: when the work runs nobody is inside any more, so it may be what ends
  // the loop and with it this object.
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_) return false;
  const bool first = posted_.empty();
  posted_.push_back(std::move(work));
  if (!first) return true;
  const uint64_t one = 1;
  // Can only fail when the counter is full, and then the loop is awake.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  return true;
}

void EventLoop::Watch(int fd, std::function<void()> ready) {
  OFFLOAD_CHECK(fd >= 0) << "fd " << fd;
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.fd = fd}};
  OFFLOAD_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) << ErrnoText(errno);
  watches_[fd] = std::make_shared<std::function<void()>>(std::move(ready));
}

void EventLoop::Unwatch(int fd) {
  if (watches_.erase(fd) == 0) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

bool EventLoop::RunPosted() {
  for (;;) {
    std::vector<std::function<void()>> work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work.swap(posted_);
      if (work.empty()) {
        ended_ = stopping_;
        return !ended_;
      }
    }
    for (std::function<void()>& function : work) function();
    // What was posted meanwhile waits for its turn, unless there is none any more.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) return true;
  }
}

void EventLoop::Dispatch(int timeout_ms) {
  std::array<epoll_event, 16> events;
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    if (fd == wake_.get()) {
      uint64_t value;
      [[maybe_unused]] const ssize_t got = read(fd, &value, sizeof(value));
      continue;
    }
    const auto watch = watches_.find(fd);
    if (watch == watches_.end()) continue;
    const std::shared_ptr<std::function<void()>> ready = watch->second;  // it may unwatch itself
    (*ready)();
  }
}

}  // namespace offload::daemon

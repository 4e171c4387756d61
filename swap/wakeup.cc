#include "swap/wakeup.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "base/error.h"
#include "base/status_macros.h"

namespace offload::swap {
namespace {

absl::Status SystemError(const char* call) {
  const std::string what = std::string(call) + ": " + ErrnoText(errno);
  if (errno == EMFILE || errno == ENFILE) return MakeError(ErrorId::kOpenFiles, what);
  return MakeError(ErrorId::kInternal, what);
}

}  // namespace

absl::StatusOr<Wakeup> Wakeup::Make() {
  Wakeup wakeup;
  wakeup.epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!wakeup.epoll_.valid()) return SystemError("epoll_create1");
  wakeup.event_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wakeup.event_.valid()) return SystemError("eventfd");
  OFFLOAD_RETURN_IF_ERROR(wakeup.Watch(wakeup.event_.get()));
  return wakeup;
}

absl::Status Wakeup::Watch(int device_fd) {
  if (device_fd < 0) return absl::OkStatus();
  epoll_event event{.events = EPOLLIN, .data = {.fd = device_fd}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, device_fd, &event) != 0)
    return SystemError("epoll_ctl");
  return absl::OkStatus();
}

void Wakeup::Forget(int device_fd) {
  if (device_fd >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, device_fd, nullptr);
}

void Wakeup::Signal() {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then it is readable anyway.
  [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof(one));
}

void Wakeup::Clear() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(event_.get(), &count, sizeof(count));
}

}  // namespace offload::swap

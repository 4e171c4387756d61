// In front of the C library: calls that hand buffers to the kernel, which cannot wait for a page of
// ours. Each serves its buffer and goes on. And those that would put another handler in the place
// of the one that serves such pages, or block its signal: the kernel ends a thread that has blocked
// SIGSEGV where it touches one, and a mask of all signals is what threads of a trainer often have.

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "zero3/torch/raw_access.h"

namespace offload::zero3 {
namespace {

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

Served ServeAll(const struct iovec* parts, int count, bool writes) {
  Served all = Served::kNone;
  for (int i = 0; i < count; ++i) {
    const Served one = ServeBuffer(parts[i].iov_base, parts[i].iov_len, writes);
    if (one == Served::kFailed) return one;
    if (one == Served::kOurs) all = one;
  }
  return all;
}

Served ServeMessage(const struct msghdr* message, bool writes) {
  return message == nullptr
             ? Served::kNone
             : ServeAll(message->msg_iov, static_cast<int>(message->msg_iovlen), writes);
}

// A change of the thread's mask, as the C library makes it, that never blocks SIGSEGV.
int ChangeMask(int (*change)(int, const sigset_t*, sigset_t*), int how, const sigset_t* signals,
               sigset_t* before) {
  if (signals == nullptr || how == SIG_UNBLOCK) return change(how, signals, before);
  sigset_t others = *signals;
  sigdelset(&others, SIGSEGV);
  return change(how, &others, before);
}

// Between serving and the call another thread's pointers may take the room of these, or its step
// may put them back: the call is made again. Not for ever: some other buffer of it may be wrong.
constexpr int kAttemptsMax = 1000;

template <class Serve, class Call>
ssize_t Make(Serve serve, Call call) {
  for (int attempt = 1;; ++attempt) {
    const Served served = serve();
    if (served == Served::kFailed) {
      errno = EFAULT;
      return -1;
    }
    const ssize_t result = call();
    if (result >= 0 || errno != EFAULT || served == Served::kNone || attempt == kAttemptsMax)
      return result;
  }
}

// The same of streams, which give what they have done before.
template <class Serve, class Call>
size_t MakeAll(size_t size, size_t count, FILE* file, Serve serve, Call call) {
  size_t done = 0;
  for (int attempt = 1;; ++attempt) {
    const Served served = serve(done);
    if (served == Served::kFailed) return size == 0 ? 0 : done / size;
    if (served == Served::kNone && done == 0) return call(done, size, count);
    errno = 0;
    done += call(done, 1, size * count - done);
    if (done == size * count || !::ferror(file) || errno != EFAULT || attempt == kAttemptsMax)
      return size == 0 ? 0 : done / size;
    ::clearerr(file);
  }
}

}  // namespace
}  // namespace offload::zero3

using offload::zero3::ChangeMask;
using offload::zero3::KeepForLater;
using offload::zero3::Make;
using offload::zero3::MakeAll;
using offload::zero3::Next;
using offload::zero3::ServeAll;
using offload::zero3::ServeBuffer;
using offload::zero3::ServeMessage;

extern "C" {

ssize_t read(int fd, void* buffer, size_t count) {
  static const auto next = Next<ssize_t (*)(int, void*, size_t)>("read");
  return Make([&] { return ServeBuffer(buffer, count, true); },
              [&] { return next(fd, buffer, count); });
}

ssize_t write(int fd, const void* buffer, size_t count) {
  static const auto next = Next<ssize_t (*)(int, const void*, size_t)>("write");
  return Make([&] { return ServeBuffer(buffer, count, false); },
              [&] { return next(fd, buffer, count); });
}

ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  static const auto next = Next<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  return Make([&] { return ServeBuffer(buffer, count, true); },
              [&] { return next(fd, buffer, count, offset); });
}

ssize_t pwrite(int fd, const void* buffer, size_t count, off_t offset) {
  static const auto next = Next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return Make([&] { return ServeBuffer(buffer, count, false); },
              [&] { return next(fd, buffer, count, offset); });
}

ssize_t readv(int fd, const struct iovec* parts, int count) {
  static const auto next = Next<ssize_t (*)(int, const struct iovec*, int)>("readv");
  return Make([&] { return ServeAll(parts, count, true); }, [&] { return next(fd, parts, count); });
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  static const auto next = Next<ssize_t (*)(int, const struct iovec*, int)>("writev");
  return Make([&] { return ServeAll(parts, count, false); },
              [&] { return next(fd, parts, count); });
}

ssize_t preadv(int fd, const struct iovec* parts, int count, off_t offset) {
  static const auto next = Next<decltype(&::preadv)>("preadv");
  return Make([&] { return ServeAll(parts, count, true); },
              [&] { return next(fd, parts, count, offset); });
}

ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
  static const auto next = Next<decltype(&::pwritev)>("pwritev");
  return Make([&] { return ServeAll(parts, count, false); },
              [&] { return next(fd, parts, count, offset); });
}

ssize_t preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  static const auto next = Next<decltype(&::preadv2)>("preadv2");
  return Make([&] { return ServeAll(parts, count, true); },
              [&] { return next(fd, parts, count, offset, flags); });
}

ssize_t pwritev2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  static const auto next = Next<decltype(&::pwritev2)>("pwritev2");
  return Make([&] { return ServeAll(parts, count, false); },
              [&] { return next(fd, parts, count, offset, flags); });
}

// What the same calls are named where _FILE_OFFSET_BITS is 64.

ssize_t pread64(int fd, void* buffer, size_t count, off64_t offset) {
  static const auto next = Next<decltype(&::pread64)>("pread64");
  return Make([&] { return ServeBuffer(buffer, count, true); },
              [&] { return next(fd, buffer, count, offset); });
}

ssize_t pwrite64(int fd, const void* buffer, size_t count, off64_t offset) {
  static const auto next = Next<decltype(&::pwrite64)>("pwrite64");
  return Make([&] { return ServeBuffer(buffer, count, false); },
              [&] { return next(fd, buffer, count, offset); });
}

ssize_t preadv64(int fd, const struct iovec* parts, int count, off64_t offset) {
  static const auto next = Next<decltype(&::preadv64)>("preadv64");
  return Make([&] { return ServeAll(parts, count, true); },
              [&] { return next(fd, parts, count, offset); });
}

ssize_t pwritev64(int fd, const struct iovec* parts, int count, off64_t offset) {
  static const auto next = Next<decltype(&::pwritev64)>("pwritev64");
  return Make([&] { return ServeAll(parts, count, false); },
              [&] { return next(fd, parts, count, offset); });
}

ssize_t preadv64v2(int fd, const struct iovec* parts, int count, off64_t offset, int flags) {
  static const auto next = Next<decltype(&::preadv64v2)>("preadv64v2");
  return Make([&] { return ServeAll(parts, count, true); },
              [&] { return next(fd, parts, count, offset, flags); });
}

ssize_t pwritev64v2(int fd, const struct iovec* parts, int count, off64_t offset, int flags) {
  static const auto next = Next<decltype(&::pwritev64v2)>("pwritev64v2");
  return Make([&] { return ServeAll(parts, count, false); },
              [&] { return next(fd, parts, count, offset, flags); });
}

ssize_t send(int fd, const void* buffer, size_t count, int flags) {
  static const auto next = Next<decltype(&::send)>("send");
  return Make([&] { return ServeBuffer(buffer, count, false); },
              [&] { return next(fd, buffer, count, flags); });
}

ssize_t recv(int fd, void* buffer, size_t count, int flags) {
  static const auto next = Next<decltype(&::recv)>("recv");
  return Make([&] { return ServeBuffer(buffer, count, true); },
              [&] { return next(fd, buffer, count, flags); });
}

ssize_t sendto(int fd, const void* buffer, size_t count, int flags, const struct sockaddr* to,
               socklen_t to_bytes) {
  static const auto next = Next<decltype(&::sendto)>("sendto");
  return Make([&] { return ServeBuffer(buffer, count, false); },
              [&] { return next(fd, buffer, count, flags, to, to_bytes); });
}

ssize_t recvfrom(int fd, void* buffer, size_t count, int flags, struct sockaddr* from,
                 socklen_t* from_bytes) {
  static const auto next = Next<decltype(&::recvfrom)>("recvfrom");
  return Make([&] { return ServeBuffer(buffer, count, true); },
              [&] { return next(fd, buffer, count, flags, from, from_bytes); });
}

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  static const auto next = Next<decltype(&::sendmsg)>("sendmsg");
  return Make([&] { return ServeMessage(message, false); },
              [&] { return next(fd, message, flags); });
}

ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  static const auto next = Next<decltype(&::recvmsg)>("recvmsg");
  return Make([&] { return ServeMessage(message, true); },
              [&] { return next(fd, message, flags); });
}

size_t fread(void* buffer, size_t size, size_t count, FILE* file) {
  static const auto next = Next<size_t (*)(void*, size_t, size_t, FILE*)>("fread");
  auto* const bytes = static_cast<char*>(buffer);
  return MakeAll(
      size, count, file,
      [&](size_t done) { return ServeBuffer(bytes + done, size * count - done, true); },
      [&](size_t done, size_t of, size_t n) { return next(bytes + done, of, n, file); });
}

size_t fwrite(const void* buffer, size_t size, size_t count, FILE* file) {
  static const auto next = Next<size_t (*)(const void*, size_t, size_t, FILE*)>("fwrite");
  const auto* const bytes = static_cast<const char*>(buffer);
  return MakeAll(
      size, count, file,
      [&](size_t done) { return ServeBuffer(bytes + done, size * count - done, false); },
      [&](size_t done, size_t of, size_t n) { return next(bytes + done, of, n, file); });
}

int sigaction(int signal, const struct sigaction* action, struct sigaction* before) noexcept {
  using Function = int (*)(int, const struct sigaction*, struct sigaction*);
  static const auto next = Next<Function>("sigaction");
  return signal == SIGSEGV && KeepForLater(action, before) ? 0 : next(signal, action, before);
}

sighandler_t signal(int signal, sighandler_t handler) noexcept {
  static const auto next = Next<sighandler_t (*)(int, sighandler_t)>("signal");
  struct sigaction action = {}, before = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return signal == SIGSEGV && KeepForLater(&action, &before) ? before.sa_handler
                                                             : next(signal, handler);
}

int pthread_sigmask(int how, const sigset_t* signals, sigset_t* before) noexcept {
  static const auto next = Next<int (*)(int, const sigset_t*, sigset_t*)>("pthread_sigmask");
  return ChangeMask(next, how, signals, before);
}

int sigprocmask(int how, const sigset_t* signals, sigset_t* before) noexcept {
  static const auto next = Next<int (*)(int, const sigset_t*, sigset_t*)>("sigprocmask");
  return ChangeMask(next, how, signals, before);
}

}  // extern "C"

// Both may be called in a signal's handler and in a forked child, where symbols cannot be looked
// for.
__attribute__((constructor)) static void FindMasks() {
  sigset_t now;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &now);
  ::sigprocmask(SIG_BLOCK, nullptr, &now);
}

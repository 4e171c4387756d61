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

bool ServeAll(const struct iovec* parts, int count, bool writes) {
  for (int i = 0; i < count; ++i) {
    if (!ServeBuffer(parts[i].iov_base, parts[i].iov_len, writes)) return false;
  }
  return true;
}

bool ServeMessage(const struct msghdr* message, bool writes) {
  return message == nullptr ||
         ServeAll(message->msg_iov, static_cast<int>(message->msg_iovlen), writes);
}

// A change of the thread's mask, as the C library makes it, that never blocks SIGSEGV.
int ChangeMask(int (*change)(int, const sigset_t*, sigset_t*), int how, const sigset_t* signals,
               sigset_t* before) {
  if (signals == nullptr || how == SIG_UNBLOCK) return change(how, signals, before);
  sigset_t others = *signals;
  sigdelset(&others, SIGSEGV);
  return change(how, &others, before);
}

ssize_t Fault() {
  errno = EFAULT;
  return -1;
}

}  // namespace
}  // namespace offload::zero3

using offload::zero3::ChangeMask;
using offload::zero3::Fault;
using offload::zero3::KeepForLater;
using offload::zero3::Next;
using offload::zero3::ServeAll;
using offload::zero3::ServeBuffer;
using offload::zero3::ServeMessage;

extern "C" {

ssize_t read(int fd, void* buffer, size_t count) {
  static const auto next = Next<ssize_t (*)(int, void*, size_t)>("read");
  return ServeBuffer(buffer, count, true) ? next(fd, buffer, count) : Fault();
}

ssize_t write(int fd, const void* buffer, size_t count) {
  static const auto next = Next<ssize_t (*)(int, const void*, size_t)>("write");
  return ServeBuffer(buffer, count, false) ? next(fd, buffer, count) : Fault();
}

ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  static const auto next = Next<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  return ServeBuffer(buffer, count, true) ? next(fd, buffer, count, offset) : Fault();
}

ssize_t pwrite(int fd, const void* buffer, size_t count, off_t offset) {
  static const auto next = Next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return ServeBuffer(buffer, count, false) ? next(fd, buffer, count, offset) : Fault();
}

ssize_t readv(int fd, const struct iovec* parts, int count) {
  static const auto next = Next<ssize_t (*)(int, const struct iovec*, int)>("readv");
  return ServeAll(parts, count, true) ? next(fd, parts, count) : Fault();
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  static const auto next = Next<ssize_t (*)(int, const struct iovec*, int)>("writev");
  return ServeAll(parts, count, false) ? next(fd, parts, count) : Fault();
}

ssize_t preadv(int fd, const struct iovec* parts, int count, off_t offset) {
  static const auto next = Next<decltype(&::preadv)>("preadv");
  return ServeAll(parts, count, true) ? next(fd, parts, count, offset) : Fault();
}

ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
  static const auto next = Next<decltype(&::pwritev)>("pwritev");
  return ServeAll(parts, count, false) ? next(fd, parts, count, offset) : Fault();
}

ssize_t preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  static const auto next = Next<decltype(&::preadv2)>("preadv2");
  return ServeAll(parts, count, true) ? next(fd, parts, count, offset, flags) : Fault();
}

ssize_t pwritev2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  static const auto next = Next<decltype(&::pwritev2)>("pwritev2");
  return ServeAll(parts, count, false) ? next(fd, parts, count, offset, flags) : Fault();
}

// What the same calls are named where _FILE_OFFSET_BITS is 64.

ssize_t pread64(int fd, void* buffer, size_t count, off64_t offset) {
  static const auto next = Next<decltype(&::pread64)>("pread64");
  return ServeBuffer(buffer, count, true) ? next(fd, buffer, count, offset) : Fault();
}

ssize_t pwrite64(int fd, const void* buffer, size_t count, off64_t offset) {
  static const auto next = Next<decltype(&::pwrite64)>("pwrite64");
  return ServeBuffer(buffer, count, false) ? next(fd, buffer, count, offset) : Fault();
}

ssize_t preadv64(int fd, const struct iovec* parts, int count, off64_t offset) {
  static const auto next = Next<decltype(&::preadv64)>("preadv64");
  return ServeAll(parts, count, true) ? next(fd, parts, count, offset) : Fault();
}

ssize_t pwritev64(int fd, const struct iovec* parts, int count, off64_t offset) {
  static const auto next = Next<decltype(&::pwritev64)>("pwritev64");
  return ServeAll(parts, count, false) ? next(fd, parts, count, offset) : Fault();
}

ssize_t preadv64v2(int fd, const struct iovec* parts, int count, off64_t offset, int flags) {
  static const auto next = Next<decltype(&::preadv64v2)>("preadv64v2");
  return ServeAll(parts, count, true) ? next(fd, parts, count, offset, flags) : Fault();
}

ssize_t pwritev64v2(int fd, const struct iovec* parts, int count, off64_t offset, int flags) {
  static const auto next = Next<decltype(&::pwritev64v2)>("pwritev64v2");
  return ServeAll(parts, count, false) ? next(fd, parts, count, offset, flags) : Fault();
}

ssize_t send(int fd, const void* buffer, size_t count, int flags) {
  static const auto next = Next<decltype(&::send)>("send");
  return ServeBuffer(buffer, count, false) ? next(fd, buffer, count, flags) : Fault();
}

ssize_t recv(int fd, void* buffer, size_t count, int flags) {
  static const auto next = Next<decltype(&::recv)>("recv");
  return ServeBuffer(buffer, count, true) ? next(fd, buffer, count, flags) : Fault();
}

ssize_t sendto(int fd, const void* buffer, size_t count, int flags, const struct sockaddr* to,
               socklen_t to_bytes) {
  static const auto next = Next<decltype(&::sendto)>("sendto");
  return ServeBuffer(buffer, count, false) ? next(fd, buffer, count, flags, to, to_bytes) : Fault();
}

ssize_t recvfrom(int fd, void* buffer, size_t count, int flags, struct sockaddr* from,
                 socklen_t* from_bytes) {
  static const auto next = Next<decltype(&::recvfrom)>("recvfrom");
  return ServeBuffer(buffer, count, true) ? next(fd, buffer, count, flags, from, from_bytes)
                                          : Fault();
}

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  static const auto next = Next<decltype(&::sendmsg)>("sendmsg");
  return ServeMessage(message, false) ? next(fd, message, flags) : Fault();
}

ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  static const auto next = Next<decltype(&::recvmsg)>("recvmsg");
  return ServeMessage(message, true) ? next(fd, message, flags) : Fault();
}

size_t fread(void* buffer, size_t size, size_t count, FILE* file) {
  static const auto next = Next<size_t (*)(void*, size_t, size_t, FILE*)>("fread");
  return ServeBuffer(buffer, size * count, true) ? next(buffer, size, count, file) : 0;
}

size_t fwrite(const void* buffer, size_t size, size_t count, FILE* file) {
  static const auto next = Next<size_t (*)(const void*, size_t, size_t, FILE*)>("fwrite");
  return ServeBuffer(buffer, size * count, false) ? next(buffer, size, count, file) : 0;
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

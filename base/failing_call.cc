#include "base/failing_call.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>

#include "base/check.h"

namespace offload {
namespace {

// What the one object says; the functions may be called before and after it, and by any thread.
std::atomic<const char*> failing_name{nullptr};
std::atomic<int> failing_error{0}, failing_after{0}, failing_times{0};
std::atomic<int> calls{0}, failed_calls{0};

// True, and errno is set, when this call has to fail.
bool Fails(const char* name) {
  const char* const wanted = failing_name.load(std::memory_order_acquire);
  if (wanted == nullptr || std::strcmp(wanted, name) != 0) return false;
  const int call = calls.fetch_add(1);
  if (call < failing_after.load() || call - failing_after.load() >= failing_times.load())
    return false;
  failed_calls.fetch_add(1);
  errno = failing_error.load();
  return true;
}

// The function of that name in the library behind this program.
template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

FailingCall::FailingCall(const char* name, int error_number, Which which) {
  OFFLOAD_CHECK(failing_name.load() == nullptr) << "two failing calls at a time";
  failing_error = error_number;
  failing_after = which.after;
  failing_times = which.times;
  calls = 0;
  failed_calls = 0;
  failing_name.store(name, std::memory_order_release);
}

FailingCall::~FailingCall() { failing_name = nullptr; }

int FailingCall::failures() const { return failed_calls.load(); }

}  // namespace offload

using offload::Fails;
using offload::Next;

// A function that fails with -1 or is forwarded.
#define OFFLOAD_FAILING_CALL(result, name, parameters, arguments) \
  result name parameters {                                        \
    if (Fails(#name)) return -1;                                  \
    return Next<result parameters>(#name) arguments;              \
  }

extern "C" {

OFFLOAD_FAILING_CALL(int, accept4, (int fd, sockaddr* address, socklen_t* length, int flags),
                     (fd, address, length, flags))
OFFLOAD_FAILING_CALL(int, bind, (int fd, const sockaddr* address, socklen_t length) noexcept,
                     (fd, address, length))
OFFLOAD_FAILING_CALL(int, chmod, (const char* path, mode_t mode) noexcept, (path, mode))
OFFLOAD_FAILING_CALL(int, connect, (int fd, const sockaddr* address, socklen_t length),
                     (fd, address, length))
OFFLOAD_FAILING_CALL(int, dup, (int fd) noexcept, (fd))
OFFLOAD_FAILING_CALL(int, epoll_create1, (int flags) noexcept, (flags))
OFFLOAD_FAILING_CALL(int, epoll_ctl,
                     (int epoll, int operation, int fd, epoll_event* event) noexcept,
                     (epoll, operation, fd, event))
OFFLOAD_FAILING_CALL(int, eventfd, (unsigned count, int flags) noexcept, (count, flags))
OFFLOAD_FAILING_CALL(int, fallocate, (int fd, int mode, off_t offset, off_t size),
                     (fd, mode, offset, size))
OFFLOAD_FAILING_CALL(int, fstat, (int fd, struct stat* info) noexcept, (fd, info))
OFFLOAD_FAILING_CALL(int, ftruncate, (int fd, off_t size) noexcept, (fd, size))
OFFLOAD_FAILING_CALL(ssize_t, getrandom, (void* bytes, size_t size, unsigned flags),
                     (bytes, size, flags))
OFFLOAD_FAILING_CALL(int, getsockopt,
                     (int fd, int level, int name, void* value, socklen_t* length) noexcept,
                     (fd, level, name, value, length))
OFFLOAD_FAILING_CALL(int, listen, (int fd, int backlog) noexcept, (fd, backlog))
OFFLOAD_FAILING_CALL(int, madvise, (void* address, size_t size, int advice) noexcept,
                     (address, size, advice))
OFFLOAD_FAILING_CALL(int, memfd_create, (const char* name, unsigned flags) noexcept, (name, flags))
OFFLOAD_FAILING_CALL(ssize_t, pread, (int fd, void* bytes, size_t size, off_t offset),
                     (fd, bytes, size, offset))
OFFLOAD_FAILING_CALL(ssize_t, recv, (int fd, void* bytes, size_t size, int flags),
                     (fd, bytes, size, flags))
OFFLOAD_FAILING_CALL(ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags))
OFFLOAD_FAILING_CALL(ssize_t, send, (int fd, const void* bytes, size_t size, int flags),
                     (fd, bytes, size, flags))
OFFLOAD_FAILING_CALL(ssize_t, sendmsg, (int fd, const msghdr* message, int flags),
                     (fd, message, flags))
OFFLOAD_FAILING_CALL(int, signalfd, (int fd, const sigset_t* mask, int flags) noexcept,
                     (fd, mask, flags))
OFFLOAD_FAILING_CALL(int, socket, (int domain, int type, int protocol) noexcept,
                     (domain, type, protocol))
OFFLOAD_FAILING_CALL(int, socketpair, (int domain, int type, int protocol, int* fds) noexcept,
                     (domain, type, protocol, fds))

#undef OFFLOAD_FAILING_CALL

int fcntl(int fd, int command, ...) {
  if (Fails("fcntl")) return -1;
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  return Next<int(int, int, ...)>("fcntl")(fd, command, argument);
}

}  // extern "C"

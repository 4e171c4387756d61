#include "swap/syscall_faults.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

namespace offload::swap {
namespace {

thread_local SyscallFaults* armed = nullptr;

// The function of that name in the library behind this program.
template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int ErrorOf(SyscallFault fault, const SyscallFaults::Errors& errors) {
  switch (fault) {
    case SyscallFault::kBroken:
      return errors.broken;
    case SyscallFault::kExhausted:
      return errors.exhausted;
    case SyscallFault::kFull:
      return errors.full;
    case SyscallFault::kInterrupted:
      return errors.interrupted;
    case SyscallFault::kRefused:
      return errors.refused;
    case SyscallFault::kGone:
      return errors.gone;
    case SyscallFault::kBusy:
      return errors.busy;
  }
  return 0;
}

bool OpenFails(const char* call, int flags) {
  const bool unnamed = (flags & O_TMPFILE) == O_TMPFILE, makes = unnamed || (flags & O_CREAT) != 0;
  return SyscallFaults::Fails(call, {.broken = EIO,
                                     .exhausted = EMFILE,
                                     .full = unnamed ? ENOSPC
                                             : makes ? EDQUOT
                                                     : 0,
                                     .refused = unnamed ? EOPNOTSUPP
                                                : makes ? EINVAL
                                                        : EACCES,
                                     .gone = unnamed ? EISDIR
                                             : makes ? 0
                                                     : ENOENT});
}

// The third argument, which only an open that makes a file has.
mode_t ModeOf(int flags, va_list arguments) {
  const bool has_mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return has_mode ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

const char* NameOf(SyscallFault fault) {
  static constexpr const char* kNames[kSyscallFaultCount] = {
      "broken", "exhausted", "full", "interrupted", "refused", "gone", "busy"};
  return kNames[static_cast<int>(fault)];
}

void SyscallFaults::Arm() { armed = this; }

void SyscallFaults::Disarm() {
  if (armed == this) armed = nullptr;
}

bool SyscallFaults::Fails(const char* call, const Errors& errors) {
  if (armed == nullptr) return false;
  const int error = ErrorOf(armed->fault_, errors);
  if (error == 0) return false;
  const uint64_t number = ++armed->call_count_;
  if (number < armed->position_ || (number > armed->position_ && !armed->forever_)) return false;
  if (armed->failed_call_.empty()) armed->failed_call_ = call;
  errno = error;
  return true;
}

}  // namespace offload::swap

using offload::swap::ModeOf;
using offload::swap::Next;
using offload::swap::OpenFails;
using offload::swap::SyscallFaults;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  if (OpenFails("open", flags)) return -1;
  return Next<int(const char*, int, ...)>("open")(path, flags, mode);
}

int openat(int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  if (OpenFails("openat", flags)) return -1;
  return Next<int(int, const char*, int, ...)>("openat")(directory, path, flags, mode);
}

int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  const bool duplicates = command == F_DUPFD || command == F_DUPFD_CLOEXEC;
  if (duplicates && SyscallFaults::Fails("fcntl", {.exhausted = EMFILE})) return -1;
  return Next<int(int, int, ...)>("fcntl")(fd, command, argument);
}

// A function that only fails or is handed on.
#define OFFLOAD_FAULTY_CALL(result, failed, name, parameters, arguments, ...)          \
  result name parameters {                                                             \
    if (SyscallFaults::Fails(#name, SyscallFaults::Errors __VA_ARGS__)) return failed; \
    return Next<result parameters>(#name) arguments;                                   \
  }

OFFLOAD_FAULTY_CALL(int, -1, fstat, (int fd, struct stat* info) noexcept, (fd, info),
                    {.broken = EIO})
OFFLOAD_FAULTY_CALL(int, -1, fstatat,
                    (int fd, const char* path, struct stat* info, int flags) noexcept,
                    (fd, path, info, flags), {.broken = EIO, .gone = ENOENT})
OFFLOAD_FAULTY_CALL(int, -1, fstatfs, (int fd, struct statfs* info) noexcept, (fd, info),
                    {.broken = EIO})
OFFLOAD_FAULTY_CALL(int, -1, fstatvfs, (int fd, struct statvfs* info) noexcept, (fd, info),
                    {.broken = EIO})
OFFLOAD_FAULTY_CALL(int, -1, statx,
                    (int fd, const char* path, int flags, unsigned mask,
                     struct statx* info) noexcept,
                    (fd, path, flags, mask, info), {.broken = EIO})
OFFLOAD_FAULTY_CALL(int, -1, faccessat, (int fd, const char* path, int mode, int flags) noexcept,
                    (fd, path, mode, flags), {.broken = EIO, .refused = EACCES})
OFFLOAD_FAULTY_CALL(int, -1, fchmod, (int fd, mode_t mode) noexcept, (fd, mode),
                    {.broken = EIO, .refused = EPERM})
OFFLOAD_FAULTY_CALL(int, -1, flock, (int fd, int operation) noexcept, (fd, operation),
                    {.exhausted = ENOLCK, .interrupted = EINTR, .busy = EWOULDBLOCK})
OFFLOAD_FAULTY_CALL(int, -1, fallocate, (int fd, int mode, off_t offset, off_t size),
                    (fd, mode, offset, size),
                    {.broken = EIO, .full = EDQUOT, .interrupted = EINTR, .refused = EOPNOTSUPP})
OFFLOAD_FAULTY_CALL(int, -1, ftruncate, (int fd, off_t size) noexcept, (fd, size), {.broken = EIO})
OFFLOAD_FAULTY_CALL(ssize_t, -1, getrandom, (void* bytes, size_t size, unsigned flags),
                    (bytes, size, flags), {.broken = ENOSYS})
OFFLOAD_FAULTY_CALL(ssize_t, -1, pread, (int fd, void* bytes, size_t size, off_t offset),
                    (fd, bytes, size, offset),
                    {.broken = EIO, .interrupted = EINTR, .refused = EINVAL})
OFFLOAD_FAULTY_CALL(ssize_t, -1, pwrite, (int fd, const void* bytes, size_t size, off_t offset),
                    (fd, bytes, size, offset),
                    {.broken = EIO, .full = ENOSPC, .interrupted = EINTR, .refused = EINVAL})
OFFLOAD_FAULTY_CALL(int, -1, renameat2,
                    (int from, const char* name, int to, const char* other,
                     unsigned flags) noexcept,
                    (from, name, to, other, flags),
                    {.broken = EIO, .full = ENOSPC, .refused = EINVAL, .busy = EEXIST})
OFFLOAD_FAULTY_CALL(int, -1, unlinkat, (int fd, const char* path, int flags) noexcept,
                    (fd, path, flags), {.broken = EIO, .refused = EACCES})
OFFLOAD_FAULTY_CALL(DIR*, nullptr, fdopendir, (int fd), (fd), {.exhausted = ENOMEM})
OFFLOAD_FAULTY_CALL(struct dirent*, nullptr, readdir, (DIR * stream), (stream), {.broken = EIO})
OFFLOAD_FAULTY_CALL(int, -1, epoll_create1, (int flags) noexcept, (flags), {.exhausted = EMFILE})
OFFLOAD_FAULTY_CALL(int, -1, eventfd, (unsigned count, int flags) noexcept, (count, flags),
                    {.exhausted = ENFILE})

#undef OFFLOAD_FAULTY_CALL

int fsync(int fd) {
  return SyscallFaults::Fails("fsync", {.broken = EIO, .full = ENOSPC}) ? -1 : 0;
}

int fdatasync(int fd) {
  return SyscallFaults::Fails("fdatasync", {.broken = EIO, .full = ENOSPC}) ? -1 : 0;
}

int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  if (operation == EPOLL_CTL_ADD && SyscallFaults::Fails("epoll_ctl", {.exhausted = ENOSPC}))
    return -1;
  return Next<int(int, int, int, epoll_event*)>("epoll_ctl")(epoll, operation, fd, event);
}

// By its number: sanitizers and the loader map memory before names can be looked up.
void* mmap(void* address, size_t size, int prot, int flags, int fd, off_t offset) noexcept {
  if (SyscallFaults::Fails("mmap", {.exhausted = ENOMEM})) return MAP_FAILED;
  const long result = syscall(SYS_mmap, address, size, prot, flags, fd, offset);
  return result == -1 ? MAP_FAILED : reinterpret_cast<void*>(result);
}

}  // extern "C"

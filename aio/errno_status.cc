#include "aio/errno_status.h"

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::aio {
namespace {

absl::StatusCode CodeOf(int error_number, Device::Kind kind) {
  if (kind == Device::Kind::kFlush) return absl::StatusCode::kDataLoss;
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case ENOBUFS:
      return absl::StatusCode::kResourceExhausted;
    case EAGAIN:
    case EBUSY:
    case EINTR:
      return absl::StatusCode::kUnavailable;
    case EINVAL:
    case EFAULT:
      return absl::StatusCode::kInvalidArgument;
    case ENOSYS:
    case EOPNOTSUPP:
      return absl::StatusCode::kUnimplemented;
    case EPERM:
    case EACCES:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case EBADF:
      return absl::StatusCode::kFailedPrecondition;
    case ECANCELED:
      return absl::StatusCode::kCancelled;
    default:
      return absl::StatusCode::kDataLoss;
  }
}

std::string Describe(Device::Kind kind, uint64_t offset_bytes, uint64_t size_bytes) {
  if (kind == Device::Kind::kFlush) return "flush";
  return absl::StrCat(kind == Device::Kind::kRead ? "read" : "write", " of ", size_bytes,
                      " bytes at offset ", offset_bytes);
}

}  // namespace

absl::Status FileErrorStatus(int error_number, std::string_view what) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return MakeError(ErrorId::kPoolFull, what);
    case EFBIG:
      return MakeError(ErrorId::kPoolFull, what,
                       "Raise the limit of the size of files (ulimit -f), or choose a file system "
                       "that has larger ones");
    default:
      return MakeError(ErrorId::kIo, what);
  }
}

absl::Status IoErrorStatus(int error_number, Device::Kind kind, uint64_t offset_bytes,
                           uint64_t size_bytes) {
  const std::string what =
      absl::StrCat(Describe(kind, offset_bytes, size_bytes), ": ", ErrnoText(error_number));
  // io_uring gives what may block, a flush above all, to threads of the kernel's, which count as
  // this process's.
  const absl::Status status =
      error_number == ECANCELED
          ? MakeError(ErrorId::kIo, what,
                      "The kernel could start no thread for it: raise the limit of threads "
                      "(ulimit -u, TasksMax, docker --pids-limit)")
      : kind == Device::Kind::kFlush ? MakeError(ErrorId::kIo, what)
                                     : FileErrorStatus(error_number, what);
  return absl::Status(CodeOf(error_number, kind), status.message());
}

absl::Status ShortTransferStatus(Device::Kind kind, uint64_t offset_bytes, uint64_t size_bytes,
                                 uint64_t done_bytes) {
  return MakeError(ErrorId::kIo, absl::StrCat(Describe(kind, offset_bytes, size_bytes),
                                              " ended after ", done_bytes, " bytes"));
}

absl::Status CallStatus(std::string_view call, int result) {
  if (result >= 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(ToAbsl(call), ": ", ErrnoText(-result)));
}

}  // namespace offload::aio

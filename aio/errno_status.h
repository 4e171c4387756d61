// aio/errno_status.h
//
// The one place where an errno of a transfer becomes a status. All texts carry OFD-1209 (OFD-1204
// for a full file system); the code says what a caller can do:
//
//   errno                           code
//   EIO and all not named here      DATA_LOSS            these bytes cannot be had, or not written
//   ENOSPC EDQUOT EFBIG             RESOURCE_EXHAUSTED   the file system is full
//   ENOMEM ENOBUFS                  RESOURCE_EXHAUSTED   the kernel has no memory
//   EAGAIN EBUSY EINTR              UNAVAILABLE          after all retries
//   EINVAL EFAULT                   INVALID_ARGUMENT     the kernel refuses the transfer's shape
//   ENOSYS EOPNOTSUPP               UNIMPLEMENTED        engine or file system cannot do this
//   EPERM EACCES EROFS              PERMISSION_DENIED
//   EBADF                           FAILED_PRECONDITION
//   ECANCELED                       CANCELLED
//   any, for a flush                DATA_LOSS            nobody knows which writes are lost
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "aio/device.h"

namespace offload::aio {

// `error_number` is positive.
absl::Status IoErrorStatus(int error_number, Device::Kind kind, uint64_t offset_bytes,
                           uint64_t size_bytes);

// Of a file that cannot be written or grow: OFD-1204, with what helps, for a full file system, else
// OFD-1209.
absl::Status FileErrorStatus(int error_number, std::string_view what);

// A transfer that stopped at `done_bytes` without an error: the file is shorter than it was when it
// was opened.
absl::Status ShortTransferStatus(Device::Kind kind, uint64_t offset_bytes, uint64_t size_bytes,
                                 uint64_t done_bytes);

// Of a call that makes or changes an engine: OK unless `result` is a negated errno, else the text
// "io_uring_setup: EPERM (...)".
absl::Status CallStatus(std::string_view call, int result);

}  // namespace offload::aio

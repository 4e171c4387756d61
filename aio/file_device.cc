#include "aio/file_device.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "aio/errno_status.h"
#include "base/check.h"
#include "base/error.h"

namespace offload::aio {

absl::Status FileDevice::MakeEvent() {
  event_fd_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return CallStatus("eventfd", event_fd_.valid() ? 0 : -errno);
}

std::optional<absl::Status> FileDevice::Advance(Transfer& transfer, int64_t result) {
  const bool flushes = transfer.kind() == Kind::kFlush;
  if (result == -EAGAIN || result == -EINTR) {
    counters_.retries.fetch_add(1, std::memory_order_relaxed);
  } else if (!flushes && result >= 0 && static_cast<uint64_t>(result) < transfer.left_bytes()) {
    counters_.short_transfers.fetch_add(1, std::memory_order_relaxed);
  }
  return transfer.Advance(result);
}

absl::Status FileDevice::Resize(uint64_t size_bytes) {
  const int fd = owned_file_.get();
  const uint64_t old_bytes = geometry_.size_bytes;
  int result = 0;
  if (size_bytes > old_bytes) {
    do {
      result = ::fallocate(fd, 0, static_cast<off_t>(old_bytes),
                           static_cast<off_t>(size_bytes - old_bytes));
    } while (result != 0 && errno == EINTR);
  } else {
    result = ::ftruncate(fd, static_cast<off_t>(size_bytes));
  }
  if (result == 0) {
    geometry_.size_bytes = size_bytes;
    return absl::OkStatus();
  }
  const int error = errno;
  // A refused allocation may have taken part of the space.
  [[maybe_unused]] const int truncated = ::ftruncate(fd, static_cast<off_t>(old_bytes));
  struct statvfs info {};
  ::fstatvfs(fd, &info);
  return FileErrorStatus(
      error,
      absl::StrCat("a file of ", old_bytes, " bytes cannot become one of ", size_bytes,
                   ", free are ", uint64_t{info.f_bavail} * info.f_frsize, ": ", ErrnoText(error)));
}

void FileDevice::SignalReady() {
  // EAGAIN means that the counter is full, hence readable.
  const int rc = ::eventfd_write(event_fd_.get(), 1);
  OFFLOAD_CHECK(rc == 0 || errno == EAGAIN) << ErrnoText(errno);
}

void FileDevice::ClearEvent() {
  eventfd_t count = 0;
  const int rc = ::eventfd_read(event_fd_.get(), &count);
  OFFLOAD_CHECK(rc == 0 || errno == EAGAIN) << ErrnoText(errno);
}

}  // namespace offload::aio

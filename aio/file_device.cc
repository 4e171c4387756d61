#include "aio/file_device.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"

namespace offload::aio {

absl::Status FileDevice::RefusalOf(std::string_view call, int error_number) {
  return absl::FailedPreconditionError(
      absl::StrCat(std::string(call), ": ", ErrnoText(error_number)));
}

absl::Status FileDevice::MakeEvent() {
  event_fd_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return event_fd_.valid() ? absl::OkStatus() : RefusalOf("eventfd", errno);
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

#include "aio/file_device.h"

#include <sys/eventfd.h>

#include <cerrno>

#include "base/check.h"
#include "base/error.h"

namespace offload::aio {

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

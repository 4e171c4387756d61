#include "base/posix_io.h"

#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload {
namespace {

// Calls transfer(done_bytes) until all bytes are through.
template <typename Transfer>
absl::Status TransferFully(const char* name, size_t size_bytes, Transfer transfer) {
  size_t done_bytes = 0;
  while (done_bytes < size_bytes) {
    const ssize_t count = transfer(done_bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int error_number = errno;
      return absl::Status(absl::ErrnoToStatusCode(error_number),
                          absl::StrCat(name, " after ", done_bytes, " of ", size_bytes,
                                       " bytes: ", ErrnoText(error_number)));
    }
    if (count == 0) {
      return absl::DataLossError(
          absl::StrCat(name, " ended after ", done_bytes, " of ", size_bytes, " bytes"));
    }
    done_bytes += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadFully(int fd, std::span<std::byte> bytes) {
  return TransferFully("read", bytes.size(), [&](size_t done) {
    return ::read(fd, bytes.data() + done, bytes.size() - done);
  });
}

absl::Status WriteFully(int fd, std::span<const std::byte> bytes) {
  return TransferFully("write", bytes.size(), [&](size_t done) {
    return ::write(fd, bytes.data() + done, bytes.size() - done);
  });
}

absl::Status PreadFully(int fd, uint64_t offset_bytes, std::span<std::byte> bytes) {
  return TransferFully("pread", bytes.size(), [&](size_t done) {
    return ::pread(fd, bytes.data() + done, bytes.size() - done,
                   static_cast<off_t>(offset_bytes + done));
  });
}

absl::Status PwriteFully(int fd, uint64_t offset_bytes, std::span<const std::byte> bytes) {
  return TransferFully("pwrite", bytes.size(), [&](size_t done) {
    return ::pwrite(fd, bytes.data() + done, bytes.size() - done,
                    static_cast<off_t>(offset_bytes + done));
  });
}

}  // namespace offload

#include "base/mapped_region.h"

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"

namespace offload {

absl::StatusOr<MappedRegion> MappedRegion::Map(int fd, uint64_t offset_bytes, size_t size_bytes,
                                               int prot, int flags) {
  void* address = ::mmap(nullptr, size_bytes, prot, flags, fd, static_cast<off_t>(offset_bytes));
  if (address == MAP_FAILED) {
    const int error_number = errno;
    return absl::Status(absl::ErrnoToStatusCode(error_number),
                        absl::StrCat("mmap of ", size_bytes, " bytes at offset ", offset_bytes,
                                     ": ", ErrnoText(error_number)));
  }
  return MappedRegion(static_cast<std::byte*>(address), size_bytes);
}

absl::StatusOr<MappedRegion> MappedRegion::Anonymous(size_t size_bytes) {
  return Map(-1, 0, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
}

absl::StatusOr<MappedRegion> MappedRegion::Reserve(size_t size_bytes, int prot) {
  return Map(-1, 0, size_bytes, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
}

MappedRegion& MappedRegion::operator=(MappedRegion&& other) noexcept {
  if (this == &other) return *this;
  Unmap();
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

void MappedRegion::Unmap() {
  if (data_ == nullptr) return;
  OFFLOAD_CHECK(::munmap(data_, size_bytes_) == 0) << ErrnoText(errno) << ", size " << size_bytes_;
  data_ = nullptr;
  size_bytes_ = 0;
}

}  // namespace offload

#include "base/mapped_region.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Debian 12's C library does not name it
#endif

namespace offload {
namespace {

std::byte* AlignUpToHugePage(void* address) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(address);
  return reinterpret_cast<std::byte*>((value + kHugePageBytes - 1) & ~(kHugePageBytes - 1));
}

// Address space that holds `size_bytes` from a multiple of a huge page on; null where there is
// none, or no use for it.
void* FindHugeAddress(size_t size_bytes) {
  if (size_bytes < kHugePageBytes) return nullptr;
  const size_t with_slack = size_bytes + kHugePageBytes;
  void* address =
      ::mmap(nullptr, with_slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  ::munmap(address, with_slack);
  return AlignUpToHugePage(address);
}

}  // namespace

absl::StatusOr<MappedRegion> MappedRegion::Map(int fd, uint64_t offset_bytes, size_t size_bytes,
                                               int prot, int flags) {
  void* address = ::mmap(FindHugeAddress(size_bytes), size_bytes, prot, flags, fd,
                         static_cast<off_t>(offset_bytes));
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

size_t MappedRegion::UseHugePages(size_t offset_bytes, size_t size_bytes) {
  OFFLOAD_CHECK(offset_bytes <= size_bytes_ && size_bytes <= size_bytes_ - offset_bytes)
      << offset_bytes << " + " << size_bytes << " of " << size_bytes_;
  const std::byte* const end = data_ + offset_bytes + size_bytes;
  std::byte* at = AlignUpToHugePage(data_ + offset_bytes);
  size_t huge_bytes = 0;
  for (; at + kHugePageBytes <= end; at += kHugePageBytes) {
    // What has no page at all is not gathered: a read gives it one.
    static_cast<void>(*static_cast<volatile const std::byte*>(at));
    if (::madvise(at, kHugePageBytes, MADV_COLLAPSE) == 0) {
      huge_bytes += kHugePageBytes;
    } else if (errno == EINVAL || errno == ENOMEM) {
      break;  // an older kernel, or no memory in one piece: the next try would be as futile
    }
  }
  return huge_bytes;
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

#include "proto/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/advice.h"
#include "base/byte_size.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/numa.h"
#include "base/status_macros.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace offload::proto {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

absl::Status SystemError(std::string_view call, int error_number) {
  const std::string what = absl::StrCat(std::string(call), ": ", ErrnoText(error_number));
  switch (error_number) {
    case EFBIG:
      return MakeError(ErrorId::kSharedMemory, what,
                       "Raise the limit of the size of files (ulimit -f): shared memory is one");
    case EPERM:
    case ENOSYS:
      return MakeError(ErrorId::kSharedMemory, what, kSeccompFix);
    default:
      return MakeError(ErrorId::kSharedMemory, what);
  }
}

// Kernels before 6.3 do not know MFD_NOEXEC_SEAL and refuse it.
int CreateMemfd(const std::string& name) {
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

absl::StatusOr<MappedRegion> MapShared(int fd, uint64_t size_bytes, bool writable) {
  const int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  absl::StatusOr<MappedRegion> map =
      MappedRegion::Map(fd, 0, size_bytes, prot, MAP_SHARED | MAP_NORESERVE);
  if (!map.ok()) {
    return MakeError(ErrorId::kSharedMemory, std::string(map.status().message()),
                     "Lower ram, free memory, or raise the limit of address space (ulimit -v)");
  }
  if (::madvise(map->data(), map->size(), MADV_DONTFORK) != 0) {
    return SystemError("madvise(MADV_DONTFORK)", errno);
  }
  return map;
}

}  // namespace

absl::StatusOr<SharedMemory> SharedMemory::Create(const std::string& name, uint64_t size_bytes) {
  const std::optional<uint64_t> rounded = CheckedAlignUp(size_bytes, kPageBytes);
  if (!rounded.has_value() || *rounded == 0 ||
      *rounded > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) {
    return MakeError(ErrorId::kSharedMemory, absl::StrCat("memory of ", size_bytes, " bytes"));
  }
  SharedMemory memory;
  memory.fd_.reset(CreateMemfd(name));
  if (!memory.fd_.valid()) return SystemError("memfd_create", errno);
  if (::ftruncate(memory.fd(), static_cast<off_t>(*rounded)) != 0) {
    return SystemError(absl::StrCat("memory of ", *rounded, " bytes, ftruncate"), errno);
  }
  if (::fcntl(memory.fd(), F_ADD_SEALS, kSizeSeals) != 0) return SystemError("F_ADD_SEALS", errno);
  OFFLOAD_ASSIGN_OR_RETURN(memory.map_, MapShared(memory.fd(), *rounded, /*writable=*/true));
  return memory;
}

absl::StatusOr<SharedMemory> SharedMemory::CreatePrivate(uint64_t size_bytes) {
  SharedMemory memory;
  OFFLOAD_ASSIGN_OR_RETURN(memory.map_, MappedRegion::Anonymous(size_bytes));
  return memory;
}

absl::Status SharedMemory::Allocate(uint64_t offset_bytes, uint64_t length_bytes) {
  if (!IsInside(offset_bytes, length_bytes, size_bytes())) {
    return MakeError(ErrorId::kProtocol, absl::StrCat(length_bytes, " bytes at ", offset_bytes,
                                                      " are outside the memory of ", size_bytes()));
  }
  if (length_bytes == 0 || !fd_.valid()) return absl::OkStatus();
  // fallocate() takes page after page and would rather have processes killed than give up.
  if (const std::optional<AvailableMemory> available = FindAvailableMemory();
      available.has_value() && length_bytes > available->bytes) {
    return MakeError(ErrorId::kSharedMemory,
                     absl::StrCat("reserving ", FormatBytes(length_bytes),
                                  " of memory, available are ", available->Describe()),
                     available->limit_file.empty()
                         ? "Lower ram, or free memory"
                         : "Lower ram, or raise the control group's limit (docker --memory, Slurm "
                           "--mem, MemoryMax)");
  }
  map_.UseHugePages(offset_bytes, length_bytes);
  int result = 0;
  do {
    result =
        ::fallocate(fd(), 0, static_cast<off_t>(offset_bytes), static_cast<off_t>(length_bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    return SystemError(absl::StrCat("reserving ", length_bytes, " bytes of memory, fallocate"),
                       errno);
  }
  return absl::OkStatus();
}

absl::Status SharedMemory::PlaceOn(const CpuList& nodes) {
  return PlaceMemory(map_.data(), map_.size(), nodes);
}

absl::Status SharedMemory::SealForWriting() {
  if (!fd_.valid()) return absl::OkStatus();
  if (::fcntl(fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return SystemError("F_ADD_SEALS", errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SharedMemory::AllocatedBytes() const {
  if (!fd_.valid()) return 0;
  struct stat status;
  if (::fstat(fd(), &status) != 0) return SystemError("fstat", errno);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

absl::StatusOr<MappedRegion> MapFromDaemon(int fd, uint64_t size_bytes, bool writable) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return SystemError("fstat", errno);
  const int seals = ::fcntl(fd, F_GET_SEALS);
  // A memory that could shrink would raise SIGBUS in the trainer.
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals || size_bytes == 0 ||
      static_cast<uint64_t>(status.st_size) != size_bytes) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("memory of ", size_bytes, " bytes has size ",
                                                      status.st_size, " and seals ", seals));
  }
  return MapShared(fd, size_bytes, writable);
}

}  // namespace offload::proto

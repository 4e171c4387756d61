#include "swap/building_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "aio/errno_status.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::swap {

absl::StatusOr<BuildingFile> BuildingFile::Make(const PoolDirectory& directory, std::string name) {
  constexpr int kAccess = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_DIRECT;
  UniqueFd fd(openat(directory.fd(), name.c_str(), kAccess, 0600));
  if (!fd.valid()) {
    return MakeError(RefusalId(errno),
                     absl::StrCat(directory.PathOf(name), ": ", ErrnoText(errno)));
  }
  BuildingFile file(directory, std::move(name), std::move(fd));
  if (fchmod(file.fd(), 0600) != 0 || !TryLock(file.fd())) {  // the umask may have taken bits away
    return MakeError(ErrorId::kPoolNotUsable,
                     absl::StrCat(directory.PathOf(file.name()), ": ", ErrnoText(errno)));
  }
  return file;
}

absl::StatusOr<BuildingFile> BuildingFile::MakeFor(const PoolDirectory& directory,
                                                   std::string_view job) {
  std::array<uint8_t, sizeof(uint64_t)> token;
  OFFLOAD_RETURN_IF_ERROR(Random(token));
  return Make(directory, BuildingFileName(job, std::bit_cast<uint64_t>(token)));
}

bool BuildingFile::Remove() {
  if (name_.empty()) return true;
  return unlinkat(directory_fd_, KeepName().c_str(), 0) == 0 || errno == ENOENT;
}

absl::Status Random(std::span<uint8_t> bytes) {
  if (getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()))
    return absl::OkStatus();
  return MakeError(ErrorId::kInternal, absl::StrCat("getrandom: ", ErrnoText(errno)));
}

uint64_t FreeBytes(int fd) {
  struct statvfs info {};
  return fstatvfs(fd, &info) == 0 ? uint64_t{info.f_bavail} * info.f_frsize : 0;
}

absl::Status Allocate(const PoolDirectory& directory, int fd, uint64_t file_bytes) {
  const uint64_t free_bytes = FreeBytes(directory.fd());
  int error = ENOSPC;
  if (file_bytes <= free_bytes) {
    int result;
    do {
      result = fallocate(fd, 0, 0, static_cast<off_t>(file_bytes));
    } while (result != 0 && errno == EINTR);
    if (result == 0) return absl::OkStatus();
    error = errno;
  }
  return AllocationRefused({.what = absl::StrCat(directory.PathOf(""), ": the store"),
                            .needed = absl::StrCat(file_bytes, " bytes"),
                            .file_bytes = file_bytes,
                            .free_bytes = free_bytes},
                           error);
}

absl::Status AllocationRefused(const AllocationWish& wish, int error) {
  const std::string reason = ErrnoText(error);
  const std::string needs =
      absl::StrCat(wish.what, " needs ", wish.needed, ", free are ", wish.free_bytes, ": ", reason);
  switch (error) {
    case ENOSPC:
      return MakeError(ErrorId::kPoolFull, needs);
    case EDQUOT:
      return MakeError(ErrorId::kPoolFull, needs,
                       "Raise the quota of this user (quota -s), remove old jobs with offloadctl "
                       "rm, or choose another drive");
    case EFBIG:
      return aio::FileErrorStatus(
          error, absl::StrCat(wish.what, " needs a file of ", wish.file_bytes, " bytes: ", reason));
    case EIO:
    case EROFS:
      return MakeError(ErrorId::kIo, absl::StrCat(wish.what, ": fallocate: ", reason));
    default:
      return MakeError(ErrorId::kPoolNotUsable, absl::StrCat(wish.what, ": fallocate: ", reason),
                       "Choose a file system that can reserve space, such as ext4 or xfs");
  }
}

}  // namespace offload::swap

#include "swap/building_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/error.h"

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

bool BuildingFile::Remove() {
  if (name_.empty()) return true;
  return unlinkat(directory_fd_, KeepName().c_str(), 0) == 0 || errno == ENOENT;
}

absl::Status Allocate(const PoolDirectory& directory, int fd, uint64_t file_bytes) {
  struct statvfs info {};
  fstatvfs(directory.fd(), &info);
  const uint64_t free_bytes = uint64_t{info.f_bavail} * info.f_frsize;
  const auto refuse = [&](const std::string& why) {
    return MakeError(ErrorId::kPoolFull,
                     absl::StrCat(directory.PathOf(""), ": the store needs ", file_bytes,
                                  " bytes, free are ", free_bytes, why));
  };
  if (file_bytes > free_bytes) return refuse("");
  int result;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(file_bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  if (errno == ENOSPC || errno == EDQUOT) return refuse(absl::StrCat(": ", ErrnoText(errno)));
  if (errno == EFBIG) {
    return MakeError(ErrorId::kPoolFull,
                     absl::StrCat(directory.PathOf(""), ": the store needs a file of ", file_bytes,
                                  " bytes: ", ErrnoText(errno)),
                     "Raise the limit of the size of files (ulimit -f), or choose a file system "
                     "that has larger ones");
  }
  return MakeError(ErrorId::kPoolNotUsable,
                   absl::StrCat(directory.PathOf(""), ": fallocate: ", ErrnoText(errno)),
                   "Choose a file system that can reserve space, such as ext4 or xfs");
}

}  // namespace offload::swap

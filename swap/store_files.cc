#include "swap/store_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::swap {
namespace {

// While we waited for the lock the file may have been removed, and another may have taken its name.
absl::StatusOr<uint64_t> CheckStillNamed(const PoolDirectory& directory, const std::string& name,
                                         int fd) {
  struct stat ours {
  }, named{};
  if (fstat(fd, &ours) != 0)
    return MakeError(ErrorId::kIo, absl::StrCat(directory.PathOf(name), ": ", ErrnoText(errno)));
  const bool found = fstatat(directory.fd(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0;
  if (!found || ours.st_ino != named.st_ino || ours.st_dev != named.st_dev) {
    return absl::NotFoundError(
        absl::StrCat("store ", directory.PathOf(name), " was removed while it was being opened"));
  }
  return static_cast<uint64_t>(ours.st_size);
}

absl::Status SyncFileAndDirectory(const PoolDirectory& directory, const std::string& name, int fd) {
  if (fsync(fd) != 0)
    return MakeError(ErrorId::kIo,
                     absl::StrCat("fsync of ", directory.PathOf(name), ": ", ErrnoText(errno)));
  return directory.Sync();
}

absl::Status ClearLeftovers(const PoolDirectory& directory, const std::string& job,
                            const StoreOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd lock,
                           directory.Lock(options.lock_timeout_seconds, options.cancelled));
  return directory.RemoveLeftovers(job).status();
}

}  // namespace

absl::StatusOr<OpenedFiles> OpenStoreFiles(const std::string& pool, const std::string& job,
                                           const StoreOptions& options) {
  if (!IsValidJobName(job))
    return MakeError(ErrorId::kBadValue, absl::StrCat("job name '", job, "'"));
  OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
  OpenedFiles opened;
  OFFLOAD_ASSIGN_OR_RETURN(opened.directory, PoolDirectory::Open(pool));
  OFFLOAD_RETURN_IF_ERROR(ClearLeftovers(opened.directory, job, options));
  const std::string name = StoreFileName(job);
  opened.path = opened.directory.PathOf(name);
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, opened.directory.OpenStoreFile(name, O_RDWR));
  OFFLOAD_RETURN_IF_ERROR(
      LockWithin(file.get(), options.lock_timeout_seconds, opened.path, options.cancelled));
  OFFLOAD_ASSIGN_OR_RETURN(opened.size_bytes, CheckStillNamed(opened.directory, name, file.get()));
  OFFLOAD_RETURN_IF_ERROR(SyncFileAndDirectory(opened.directory, name, file.get()));
  OFFLOAD_ASSIGN_OR_RETURN(opened.device, aio::OpenDevice(file.release(), options.io));
  if (options.decorate) opened.device = options.decorate(std::move(opened.device));
  return opened;
}

}  // namespace offload::swap

#include "swap/store_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "swap/member_files.h"

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
  if (!found && errno != ENOENT)
    return MakeError(ErrorId::kIo, absl::StrCat(directory.PathOf(name), ": ", ErrnoText(errno)));
  if (!found) {
    return absl::NotFoundError(
        absl::StrCat("store ", directory.PathOf(name), " was removed while it was being opened"));
  }
  if (ours.st_ino != named.st_ino || ours.st_dev != named.st_dev) {
    return MakeError(
        ErrorId::kStoreLocked,
        absl::StrCat(directory.PathOf(name), " was replaced while it was being opened"));
  }
  return static_cast<uint64_t>(ours.st_size);
}

absl::Status SyncFileAndDirectory(const PoolDirectory& directory, const std::string& name, int fd) {
  OFFLOAD_RETURN_IF_ERROR(SyncFile(fd, directory.PathOf(name)));
  return directory.Sync();
}

// Returns what RemoveLeftovers does.
absl::StatusOr<std::string> ClearLeftovers(const PoolDirectory& directory, const std::string& job,
                                           const StoreOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd lock,
                           directory.Lock(options.lock_timeout_seconds, options.cancelled));
  return directory.RemoveLeftovers(job);
}

absl::Status CheckMainSize(int fd, const std::string& path, const StripeMap& map,
                           const MemberPage& page) {
  struct stat info {};
  const uint64_t expected_bytes = kMemberHeadBytes + map.MemberBytes(0, page.store_bytes);
  if (fstat(fd, &info) != 0)
    return MakeError(ErrorId::kIo, absl::StrCat(path, ": ", ErrnoText(errno)));
  if (static_cast<uint64_t>(info.st_size) >= expected_bytes) return absl::OkStatus();
  return MakeError(ErrorId::kStoreDamaged,
                   absl::StrCat(path, " has ", info.st_size, " of its ", expected_bytes, " bytes"));
}

absl::StatusOr<std::unique_ptr<aio::Device>> OpenStriped(
    const std::vector<std::string>& pools, const std::string& job, const std::string& path,
    UniqueFd main, MemberPage* page, const StoreOptions& options, bool counts_as_opening,
    NamedFiles* named) {
  OFFLOAD_ASSIGN_OR_RETURN(const StripeMap map, StripeMap::Make(NumbersOf(*page)));
  OFFLOAD_RETURN_IF_ERROR(CheckMainSize(main.get(), path, map, *page));
  OFFLOAD_ASSIGN_OR_RETURN(std::vector<MemberFile> files, OpenMembers(pools, job, *page, options));
  if (counts_as_opening) OFFLOAD_RETURN_IF_ERROR(RaiseAge(main.get(), path, page, &files));
  std::vector<UniqueFd> descriptors;
  descriptors.push_back(std::move(main));
  for (uint32_t index = 1; index <= files.size(); ++index) {
    OFFLOAD_RETURN_IF_ERROR(
        named->Add(files[index - 1].fd.get(), pools[index], MemberFileName(job, index)));
  }
  for (MemberFile& file : files) descriptors.push_back(std::move(file.fd));
  return OpenStripedDevice(*page, pools, std::move(descriptors), options.io);
}

}  // namespace

absl::StatusOr<OpenedFiles> OpenStoreFiles(const std::string& pool, const std::string& job,
                                           const StoreOptions& options, bool counts_as_opening) {
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(job));
  OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  OpenedFiles opened;
  OFFLOAD_ASSIGN_OR_RETURN(opened.directory, PoolDirectory::Open(pools.front()));
  OFFLOAD_ASSIGN_OR_RETURN(const std::string alive, ClearLeftovers(opened.directory, job, options));
  const std::string name = StoreFileName(job);
  opened.path = opened.directory.PathOf(name);
  absl::StatusOr<UniqueFd> file = opened.directory.OpenStoreFile(name, O_RDWR);
  // Pools in another order, or a first one that is not mounted, must not look like a new job.
  // (While a format is alive, or a killed one's last writes land, members are where they should
  // be.)
  if (absl::IsNotFound(file.status()) && alive.empty())
    OFFLOAD_RETURN_IF_ERROR(CheckNoStrayMembers(pools, job));
  OFFLOAD_RETURN_IF_ERROR(file.status());
  OFFLOAD_RETURN_IF_ERROR(
      LockWithin(file->get(), options.lock_timeout_seconds, opened.path, options.cancelled));
  OFFLOAD_ASSIGN_OR_RETURN(opened.size_bytes, CheckStillNamed(opened.directory, name, file->get()));
  OFFLOAD_RETURN_IF_ERROR(SyncFileAndDirectory(opened.directory, name, file->get()));
  OFFLOAD_ASSIGN_OR_RETURN(std::optional<MemberPage> page,
                           ReadMemberPage(file->get(), opened.path));
  OFFLOAD_RETURN_IF_ERROR(CheckPoolsOf(pools, job, page));
  OFFLOAD_RETURN_IF_ERROR(opened.files.Add(file->get(), pools.front(), name));
  if (page) {
    opened.size_bytes = page->store_bytes;
    OFFLOAD_ASSIGN_OR_RETURN(opened.device,
                             OpenStriped(pools, job, opened.path, *std::move(file), &*page, options,
                                         counts_as_opening, &opened.files));
  } else {
    OFFLOAD_ASSIGN_OR_RETURN(opened.device, aio::OpenDevice(file->release(), options.io));
  }
  if (options.decorate) opened.device = options.decorate(std::move(opened.device));
  return opened;
}

absl::StatusOr<OpenedFiles> OpenStoreFileToRead(const std::string& pool, const std::string& job,
                                                const StoreOptions& options) {
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(job));
  OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
  OpenedFiles opened;
  OFFLOAD_ASSIGN_OR_RETURN(opened.directory, PoolDirectory::Open(pool));
  const std::string name = StoreFileName(job);
  opened.path = opened.directory.PathOf(name);
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, opened.directory.OpenStoreFile(name, O_RDWR));
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<MemberPage> page,
                           ReadMemberPage(file.get(), opened.path));
  OFFLOAD_RETURN_IF_ERROR(CheckPoolsOf({pool}, job, page));
  OFFLOAD_ASSIGN_OR_RETURN(opened.device, aio::OpenDevice(file.release(), options.io));
  if (options.decorate) opened.device = options.decorate(std::move(opened.device));
  opened.size_bytes = opened.device->geometry().size_bytes;
  return opened;
}

}  // namespace offload::swap

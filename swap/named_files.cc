#include "swap/named_files.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "spdlog/spdlog.h"
#include "swap/building_file.h"
#include "swap/pool_directory.h"

namespace offload::swap {
namespace {

constexpr uint64_t kCopyBytes = uint64_t{4} << 20;
constexpr double kLockSeconds = 30;

uint64_t SizeOf(int fd) {
  struct stat info {};
  return fstat(fd, &info) == 0 ? static_cast<uint64_t>(info.st_size) : 0;
}

absl::Status CopyBytes(int from, int to, uint64_t size_bytes, const std::string& path) {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion buffer, MappedRegion::Anonymous(kCopyBytes));
  for (uint64_t at = 0; at < size_bytes; at += kCopyBytes) {
    const auto piece = buffer.span().first(std::min(kCopyBytes, size_bytes - at));
    absl::Status status = PreadFully(from, at, piece);
    if (status.ok()) status = PwriteFully(to, at, piece);
    if (!status.ok()) return MakeError(ErrorId::kIo, absl::StrCat(path, ": ", status.message()));
  }
  return SyncFile(to, path);
}

}  // namespace

absl::Status NamedFiles::Add(int fd, std::string pool, std::string name) {
  File file{UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), std::move(pool), std::move(name)};
  if (!file.fd.valid()) {
    return MakeError(errno == EMFILE ? ErrorId::kOpenFiles : ErrorId::kIo,
                     absl::StrCat(file.pool, "/", file.name, ": dup: ", ErrnoText(errno)));
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

bool NamedFiles::IsRemoved(const File& file) {
  struct stat info {};
  return fstat(file.fd.get(), &info) == 0 && info.st_nlink == 0;
}

absl::Status NamedFiles::Check() const {
  std::string removed, room, folders;
  for (const File& file : files_) {
    if (!IsRemoved(file)) continue;
    absl::StrAppend(&removed, removed.empty() ? "" : ", ", file.pool, "/", file.name);
    struct stat info {};
    if (stat(file.pool.c_str(), &info) != 0)
      absl::StrAppend(&folders, "Make the folder ", file.pool, " again. ");
    absl::StrAppend(&room, room.empty() ? "" : ", ", file.pool, " needs ", SizeOf(file.fd.get()),
                    " bytes for that, free are ", FreeBytes(file.fd.get()));
  }
  if (removed.empty()) return absl::OkStatus();
  return MakeError(
      ErrorId::kStoreDamaged, absl::StrCat(removed, " was removed while this run has it open"),
      absl::StrCat(folders,
                   "Training goes on, and when the run ends, or is stopped by Ctrl-C or SIGTERM, "
                   "the file is written anew (",
                   room,
                   "). Until then a SIGKILL of the daemon or a loss of power loses the job: stop "
                   "the run soon and start it again, or save the model from the trainer"));
}

absl::Status NamedFiles::SaveOne(const File& file, const std::string& job) {
  OFFLOAD_ASSIGN_OR_RETURN(const PoolDirectory directory, PoolDirectory::Open(file.pool));
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd lock, directory.Lock(kLockSeconds));
  OFFLOAD_ASSIGN_OR_RETURN(BuildingFile made, BuildingFile::MakeFor(directory, job));
  const uint64_t size_bytes = SizeOf(file.fd.get());
  OFFLOAD_RETURN_IF_ERROR(Allocate(directory, made.fd(), size_bytes));
  const std::string path = directory.PathOf(file.name);
  OFFLOAD_RETURN_IF_ERROR(CopyBytes(file.fd.get(), made.fd(), size_bytes, path));
  std::string name = file.name;
  const auto rename = [&] {
    return renameat2(directory.fd(), made.name().c_str(), directory.fd(), name.c_str(),
                     RENAME_NOREPLACE) == 0;
  };
  bool has_name = rename();
  if (!has_name && errno == EEXIST) {
    name += ".saved";
    has_name = rename();
  }
  if (!has_name) {
    return MakeError(ErrorId::kIo,
                     absl::StrCat("rename to ", directory.PathOf(name), ": ", ErrnoText(errno)));
  }
  made.KeepName();
  OFFLOAD_RETURN_IF_ERROR(directory.Sync());
  if (name == file.name) {
    spdlog::warn("{}, which was removed, is written anew", path);
  } else {
    spdlog::error("{}, which was removed, is saved as {}: another file has its name by now", path,
                  directory.PathOf(name));
  }
  return absl::OkStatus();
}

absl::Status NamedFiles::Save(const std::string& job) const {
  absl::Status status;
  for (const File& file : files_) {
    if (IsRemoved(file)) status.Update(SaveOne(file, job));
  }
  return status;
}

}  // namespace offload::swap

#include "swap/pool_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "spdlog/spdlog.h"
#include "swap/member_files.h"
#include "swap/store.h"

namespace offload::swap {
namespace {

constexpr std::string_view kSuffix = ".offload";
constexpr std::string_view kBuilding = ".building-";
constexpr size_t kTokenDigits = 16;

// False when some could not be reached, or nobody knows of which there are; the file then keeps no
// more space than its page takes.
bool RemoveMembersOf(std::string_view job, const std::string& name, int file) {
  const absl::StatusOr<std::optional<MemberPage>> page = ReadMemberPage(file, name);
  const bool has_none =
      page.ok() ? !page->has_value() : ErrorIdOf(page.status()) == ErrorId::kStoreVersion;
  if (has_none || (page.ok() && RemoveLeftoverMembers(job, name, **page))) return true;
  if (ftruncate(file, static_cast<off_t>(kMemberHeadBytes)) != 0)
    spdlog::warn("{}: ftruncate: {}", name, ErrnoText(errno));
  return false;
}

}  // namespace

absl::Status SyncFile(int fd, const std::string& path) {
  if (fsync(fd) == 0) return absl::OkStatus();
  return MakeError(ErrorId::kIo, absl::StrCat("fsync of ", path, ": ", ErrnoText(errno)));
}

std::string StoreFileName(std::string_view job) {
  return absl::StrCat(ToAbsl(job), ToAbsl(kSuffix));
}

std::string JobOfFileName(std::string_view name) {
  if (!name.ends_with(kSuffix)) return "";
  name.remove_suffix(kSuffix.size());
  return IsValidJobName(name) ? std::string(name) : "";
}

std::string BuildingFileName(std::string_view job, uint64_t token) {
  return absl::StrCat(".", ToAbsl(job), ToAbsl(kSuffix), ToAbsl(kBuilding),
                      absl::Hex(token, absl::kZeroPad16));
}

bool IsBuildingFileName(std::string_view job, std::string_view name) {
  const std::string prefix = absl::StrCat(".", ToAbsl(job), ToAbsl(kSuffix), ToAbsl(kBuilding));
  // The length tells job "a" from a job that is itself called "a.offload.building-…".
  return name.size() == prefix.size() + kTokenDigits && name.starts_with(prefix) &&
         std::all_of(name.begin() + static_cast<ptrdiff_t>(prefix.size()), name.end(),
                     [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
}

ErrorId RefusalId(int error_number) {
  switch (error_number) {
    case EMFILE:
    case ENFILE:
      return ErrorId::kOpenFiles;
    case ENOSPC:
    case EDQUOT:
      return ErrorId::kPoolFull;
    case EINVAL:
      return ErrorId::kPoolNoDirectIo;
    default:
      return ErrorId::kPoolNotUsable;
  }
}

absl::StatusOr<PoolDirectory> PoolDirectory::Open(const std::string& pool) {
  PoolDirectory directory;
  directory.pool_ = pool;
  directory.fd_.reset(open(pool.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.fd_.valid()) return directory;
  const std::string what = absl::StrCat("nvme_path ", pool, ": ", ErrnoText(errno));
  return MakeError(errno == ENOENT ? ErrorId::kPoolMissing : RefusalId(errno), what);
}

std::string PoolDirectory::PathOf(std::string_view name) const {
  return absl::StrCat(pool_, "/", ToAbsl(name));
}

absl::Status PoolDirectory::Sync() const {
  if (fsync(fd_.get()) == 0) return absl::OkStatus();
  return MakeError(ErrorId::kIo, absl::StrCat("fsync of ", pool_, ": ", ErrnoText(errno)));
}

absl::StatusOr<std::vector<std::string>> PoolDirectory::List() const {
  UniqueFd own(openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(own.valid() ? fdopendir(own.get()) : nullptr,
                                                   closedir);
  if (stream == nullptr)
    return MakeError(RefusalId(errno), absl::StrCat("nvme_path ", pool_, ": ", ErrnoText(errno)));
  [[maybe_unused]] const int owned_by_stream = own.release();
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(stream.get())) names.emplace_back(entry->d_name);
  if (errno != 0)
    return MakeError(ErrorId::kIo, absl::StrCat("nvme_path ", pool_, ": ", ErrnoText(errno)));
  return names;
}

absl::StatusOr<UniqueFd> PoolDirectory::Lock(double timeout_seconds,
                                             const std::function<bool()>& cancelled) const {
  UniqueFd own(openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!own.valid())
    return MakeError(RefusalId(errno), absl::StrCat("nvme_path ", pool_, ": ", ErrnoText(errno)));
  OFFLOAD_RETURN_IF_ERROR(LockWithin(own.get(), timeout_seconds, pool_, cancelled));
  return own;
}

absl::StatusOr<UniqueFd> PoolDirectory::OpenStoreFile(const std::string& name, int access) const {
  UniqueFd file(
      openat(fd_.get(), name.c_str(), access | O_DIRECT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.valid()) {
    const int error_number = errno;
    const std::string what = absl::StrCat(PathOf(name), ": ", ErrnoText(error_number));
    struct stat found;
    const bool is_there = fstatat(fd_.get(), name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0;
    if (is_there && (S_ISLNK(found.st_mode) || S_ISDIR(found.st_mode))) {
      return MakeError(
          ErrorId::kPoolNotUsable,
          absl::StrCat(PathOf(name), " is a ", S_ISDIR(found.st_mode) ? "folder" : "symbolic link",
                       ", and the store of a job is a file in its pool"),
          "Move it away, or choose another job name; where the store lies on another "
          "drive, name that as the pool");
    }
    if (error_number == EACCES) {
      return MakeError(ErrorId::kPoolNotUsable, what,
                       "Run as the user who owns that job, or choose another job name");
    }
    if (error_number == ENOENT) return absl::NotFoundError(absl::StrCat("no store ", what));
    return MakeError(RefusalId(error_number), what);
  }
  struct stat info;
  if (fstat(file.get(), &info) != 0)
    return MakeError(ErrorId::kIo, absl::StrCat(PathOf(name), ": ", ErrnoText(errno)));
  const char* wrong = !S_ISREG(info.st_mode)           ? "is not a regular file"
                      : info.st_uid != geteuid()       ? "belongs to another user"
                      : info.st_nlink != 1             ? "has more than one name"
                      : (info.st_mode & 07777) != 0600 ? "has another mode than 0600"
                                                       : nullptr;
  if (wrong != nullptr) {
    return MakeError(ErrorId::kPoolNotUsable, absl::StrCat(PathOf(name), " ", wrong),
                     "Remove it, or correct what is said");
  }
  return file;
}

absl::StatusOr<std::string> PoolDirectory::RemoveLeftovers(std::string_view job) const {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> names, List());
  std::string alive;
  for (const std::string& name : names) {
    if (!IsBuildingFileName(job, name)) continue;
    const UniqueFd file(
        openat(fd_.get(), name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!file.valid()) continue;  // gone meanwhile, or not ours
    if (!TryLock(file.get())) {
      alive = absl::StrCat(PathOf(name), " (", LockHolder(file.get()), ")");
    } else if (!RemoveMembersOf(job, name, file.get())) {
      continue;  // it is what leads to them, once their pool is back
    } else if (unlinkat(fd_.get(), name.c_str(), 0) == 0) {
      spdlog::info("removed {}, left by a format that did not finish", PathOf(name));
    }
  }
  return alive;
}

bool TryLock(int fd) {
  int result;
  do {
    result = flock(fd, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

absl::Status CheckWanted(const std::function<bool()>& cancelled) {
  if (!cancelled || !cancelled()) return absl::OkStatus();
  return MakeError(ErrorId::kSessionEnded, "the session ended before its job was open");
}

absl::Status LockWithin(int fd, double timeout_seconds, const std::string& path,
                        const std::function<bool()>& cancelled) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  bool told = false;
  while (!TryLock(fd)) {
    if (errno != EWOULDBLOCK)
      return MakeError(ErrorId::kIo, absl::StrCat("flock of ", path, ": ", ErrnoText(errno)));
    if (std::chrono::steady_clock::now() >= deadline) {
      return MakeError(ErrorId::kStoreLocked, absl::StrCat(path, " is held by ", LockHolder(fd)));
    }
    if (!told)
      spdlog::warn("{} is held by {}: waiting up to {:.0f} s, as old writes may still be landing",
                   path, LockHolder(fd), timeout_seconds);
    told = true;
    OFFLOAD_RETURN_IF_ERROR(CheckWanted(cancelled));
    std::this_thread::sleep_for(kLockPause);
  }
  return absl::OkStatus();
}

std::string LockHolder(int fd) {
  struct stat info;
  if (fstat(fd, &info) == 0) {
    char file[64];
    std::snprintf(file, sizeof(file), "%02x:%02x:%llu", major(info.st_dev), minor(info.st_dev),
                  static_cast<unsigned long long>(info.st_ino));
    std::ifstream locks("/proc/locks");
    for (std::string line; std::getline(locks, line);) {
      // "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"; those who wait have "->" in second
      // place.
      std::istringstream words(line);
      std::string number, kind, advisory, mode, holder, where;
      words >> number >> kind >> advisory >> mode >> holder >> where;
      if (kind == "FLOCK" && where == file && holder != "-1" && holder != "0")
        return absl::StrCat("process ", holder);
    }
  }
  return "another process";
}

}  // namespace offload::swap

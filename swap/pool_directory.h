// swap/pool_directory.h
//
// A pool as a directory: the names of store files, their locks, and what a killed format leaves
// behind.
//
// The lock of a store is flock() on the descriptor that does its I/O: after kill -9 the kernel
// grants it to the next owner only when the last queued write of the dead one has landed. Creating
// and clearing away files of a pool happens under a short flock() of the directory itself, so that
// two processes never judge each other's half-made file.
//
// Thread safety: one thread per object.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "base/unique_fd.h"

namespace offload::swap {

class PoolDirectory {
 public:
  // OFD-1201, OFD-1202.
  static absl::StatusOr<PoolDirectory> Open(const std::string& pool);

  int fd() const { return fd_.get(); }
  std::string PathOf(std::string_view name) const;

  // Makes renames, new names and removals durable.
  absl::Status Sync() const;

  // Names of the directory, unsorted.
  absl::StatusOr<std::vector<std::string>> List() const;

  // Takes the lock of the directory on a descriptor of its own; closing that releases it. Errors as
  // LockWithin().
  absl::StatusOr<UniqueFd> Lock(double timeout_seconds,
                                const std::function<bool()>& cancelled = nullptr) const;

  // Opens an existing store file and judges it: a regular file of this user, one link, no access
  // for others. NOT_FOUND without an identifier when there is none; OFD-1202, OFD-1203.
  absl::StatusOr<UniqueFd> OpenStoreFile(const std::string& name, int access) const;

  // Removes files that killed formats of `job` left. Returns the name of one that is still being
  // built by a living process, or "". The directory must be locked.
  absl::StatusOr<std::string> RemoveLeftovers(std::string_view job) const;

 private:
  std::string pool_;
  UniqueFd fd_;
};

// Why a file of a pool could not be opened, by errno: OFD-1202, OFD-1203, OFD-1204 or OFD-1218.
ErrorId RefusalId(int error_number);

// Makes a file's bytes and length durable; `path` is what an error names. OFD-1209.
absl::Status SyncFile(int fd, const std::string& path);

// "JOB.offload", and its inverse: "" when the name is not that of a published store.
std::string StoreFileName(std::string_view job);
std::string JobOfFileName(std::string_view name);
// ".JOB.offload.building-<16 hexadecimal digits>".
std::string BuildingFileName(std::string_view job, uint64_t token);
bool IsBuildingFileName(std::string_view job, std::string_view name);

// Between two tries to get a lock.
inline constexpr std::chrono::milliseconds kLockPause{50};

// Takes the lock now; false when another has it.
bool TryLock(int fd);
// Takes the lock within the timeout, trying every 50 ms, and says in the log that it waits.
// OFD-1205, with the holder; OFD-1802 as soon as `cancelled`, if there is one, says true.
absl::Status LockWithin(int fd, double timeout_seconds, const std::string& path,
                        const std::function<bool()>& cancelled = nullptr);
// OFD-1802 when `cancelled`, if there is one, says true.
absl::Status CheckWanted(const std::function<bool()>& cancelled);
// "process 123", or "another process" when /proc/locks does not show it.
std::string LockHolder(int fd);

}  // namespace offload::swap

// swap/building_file.h
//
// A file that is being formatted: under a temporary name, locked by us, gone with the object unless
// its name is kept. Internal to swap/.
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "swap/pool_directory.h"

namespace offload::swap {

class BuildingFile {
 public:
  // Makes and locks `name`. OFD-1202, OFD-1204. The descriptor of the directory must outlive the
  // object.
  static absl::StatusOr<BuildingFile> Make(const PoolDirectory& directory, std::string name);
  // The same under a name of its own that the next run of `job` finds, should it be left. The
  // directory must be locked, so that nobody sees the file unlocked.
  static absl::StatusOr<BuildingFile> MakeFor(const PoolDirectory& directory, std::string_view job);
  BuildingFile(BuildingFile&& other) noexcept
      : directory_fd_(other.directory_fd_),
        name_(std::exchange(other.name_, {})),
        fd_(std::move(other.fd_)) {}
  ~BuildingFile() { Remove(); }

  int fd() const { return fd_.get(); }
  const std::string& name() const { return name_; }
  UniqueFd TakeFd() { return std::move(fd_); }
  std::string KeepName() { return std::exchange(name_, {}); }
  // Removes the file now; false when it is still there.
  bool Remove();
  // Follows a rename.
  void Rename(std::string name) { name_ = std::move(name); }

 private:
  BuildingFile(const PoolDirectory& directory, std::string name, UniqueFd fd)
      : directory_fd_(directory.fd()), name_(std::move(name)), fd_(std::move(fd)) {}

  int directory_fd_;
  std::string name_;
  UniqueFd fd_;
};

// Of the kernel's generator.
absl::Status Random(std::span<uint8_t> bytes);

// Of the file system of an open file or directory; 0 where that is not known.
uint64_t FreeBytes(int fd);

// Reserves the space of a file, whole or not at all. OFD-1204 with what is needed and what is free;
// OFD-1202 where space cannot be reserved.
absl::Status Allocate(const PoolDirectory& directory, int fd, uint64_t file_bytes);

// What the kernel has not reserved, as messages say it.
struct AllocationWish {
  std::string what;    // "/nvme0/: the store"
  std::string needed;  // "4096 bytes"
  uint64_t file_bytes = 0;
  uint64_t free_bytes = 0;
};
// OFD-1204 where there is no room, or no such long file; OFD-1209 of a drive that fails; OFD-1202
// where space cannot be reserved.
absl::Status AllocationRefused(const AllocationWish& wish, int error);

}  // namespace offload::swap

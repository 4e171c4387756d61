// What can be said and done about a pool and its stores without opening one.

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/posix_io.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "swap/member_files.h"
#include "swap/pool_directory.h"
#include "swap/recovery.h"
#include "swap/store.h"

namespace offload::swap {
namespace {

struct FileSystem {
  uint64_t magic;
  const char* name;
  const char* refusal;  // null: fit for stores, as far as the name tells
};

constexpr const char* kInMemory = "holds files in memory";
constexpr const char* kLayered = "layers files over others and may copy them on write";
constexpr const char* kCopyOnWrite = "copies on write, so that preallocated space can run out";
constexpr const char* kNetwork = "is on the network";
constexpr FileSystem kFileSystems[] = {
    {TMPFS_MAGIC, "tmpfs", kInMemory},
    {RAMFS_MAGIC, "ramfs", kInMemory},
    {OVERLAYFS_SUPER_MAGIC, "overlay", kLayered},
    {BTRFS_SUPER_MAGIC, "btrfs", kCopyOnWrite},
    {0x2FC12FC1, "zfs", kCopyOnWrite},
    {0xCA451A4E, "bcachefs", kCopyOnWrite},
    {NFS_SUPER_MAGIC, "nfs", kNetwork},
    {SMB2_SUPER_MAGIC, "smb", kNetwork},
    {CIFS_SUPER_MAGIC, "cifs", kNetwork},
    {EXT4_SUPER_MAGIC, "ext4", nullptr},
    {XFS_SUPER_MAGIC, "xfs", nullptr},
    {FUSE_SUPER_MAGIC, "fuse", nullptr},
};

FileSystem FileSystemOf(int fd) {
  struct statfs info;
  if (fstatfs(fd, &info) != 0) return {0, "unknown", nullptr};
  const auto magic = static_cast<uint64_t>(info.f_type);
  for (const FileSystem& known : kFileSystems) {
    if (known.magic == magic) return known;
  }
  return {magic, "other", nullptr};
}

// Opens an unnamed file with direct I/O, or one whose name is gone at once where unnamed ones are
// unknown.
UniqueFd OpenProbe(int directory) {
  constexpr int kAccess = O_RDWR | O_DIRECT | O_CLOEXEC;
  UniqueFd file(openat(directory, ".", kAccess | O_TMPFILE, 0600));
  if (file.valid() || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  uint64_t token = 0;
  if (getrandom(&token, sizeof(token), 0) != sizeof(token)) return file;
  const std::string name = absl::StrCat(".offloadd-probe-", absl::Hex(token, absl::kZeroPad16));
  file.reset(openat(directory, name.c_str(), kAccess | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  const int error = errno;
  unlinkat(directory, name.c_str(), 0);  // EINVAL for O_DIRECT comes after the file was made
  errno = error;
  return file;
}

absl::Status ProbeDirectIo(int file, const std::string& where) {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion written, MappedRegion::Anonymous(kPageBytes));
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion got, MappedRegion::Anonymous(kPageBytes));
  std::memset(written.data(), 0xA5, kPageBytes);
  const auto refuse = [&](ErrorId id, const absl::Status& status) {
    return MakeError(id, absl::StrCat(where, ": direct I/O: ", status.message()));
  };
  if (const absl::Status status = PwriteFully(file, 0, written.span()); !status.ok()) {
    if (absl::IsOutOfRange(status)) {  // EFBIG
      return MakeError(ErrorId::kPoolFull, absl::StrCat(where, ": ", status.message()),
                       "Raise the limit of the size of files (ulimit -f)");
    }
    // A store that is there goes on; who needs room is told how much.
    if (absl::IsResourceExhausted(status)) return absl::OkStatus();
    return refuse(ErrorId::kPoolNoDirectIo, status);
  }
  if (const absl::Status status = PreadFully(file, 0, got.span()); !status.ok())
    return refuse(ErrorId::kPoolNoDirectIo, status);
  if (std::memcmp(written.data(), got.data(), kPageBytes) != 0) {
    return MakeError(ErrorId::kIo,
                     absl::StrCat(where, ": a direct read returned other bytes than were written"));
  }
  return absl::OkStatus();
}

// Reads a store file that may be in use. Direct reads, so that no cached page is older than the
// drive.
absl::StatusOr<RecoveredStore> Inspect(int file, RecoveryDepth depth, StoreSummary* summary) {
  struct stat info;
  if (fstat(file, &info) != 0)
    return MakeError(ErrorId::kIo, absl::StrCat(summary->path, ": ", ErrnoText(errno)));
  summary->file_bytes = static_cast<uint64_t>(info.st_size);
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<MemberPage> page,
                           ReadMemberPage(file, summary->path));
  if (page) {
    summary->file_bytes = page->store_bytes;
    summary->pools = PathsOf(*page);
    OFFLOAD_RETURN_IF_ERROR(FindMembers(summary->job, *page));
    // The head lies on member 0, behind its page; the tables of snapshots lie elsewhere.
    if (depth == RecoveryDepth::kWhole) depth = RecoveryDepth::kCommit;
  }
  const uint64_t skipped_bytes = page ? kMemberHeadBytes : 0;
  const ReadPages read = [file, skipped_bytes](uint64_t offset_bytes, std::span<std::byte> bytes) {
    return PreadFully(file, skipped_bytes + offset_bytes, bytes);
  };
  return Recover(summary->path, summary->file_bytes, read, depth);
}

StoreSummary Summarize(const PoolDirectory& directory, const std::string& name) {
  StoreSummary summary{.job = JobOfFileName(name), .path = directory.PathOf(name)};
  const absl::StatusOr<UniqueFd> file = directory.OpenStoreFile(name, O_RDONLY);
  if (!file.ok()) {
    summary.damage = file.status();
    return summary;
  }
  summary.in_use = flock(file->get(), LOCK_SH | LOCK_NB) != 0;
  // The owner changes tables at any time; superblocks always show a whole commit.
  const RecoveryDepth depth = summary.in_use ? RecoveryDepth::kSummary : RecoveryDepth::kWhole;
  const absl::StatusOr<RecoveredStore> found = Inspect(file->get(), depth, &summary);
  if (!found.ok()) {
    summary.damage = found.status();
    return summary;
  }
  summary.committed = found->committed;
  summary.committed.blob.clear();
  for (const std::optional<SnapshotInfo>& snapshot : found->snapshots) {
    if (snapshot) summary.snapshots.push_back(*snapshot);
  }
  summary.generation_count = found->superblock.generation_count;
  summary.generation_bytes = found->layout.generation_bytes();
  summary.state_bytes = found->layout.place_bytes();
  // Copies differ for a moment while the owner commits; it has judged them itself at its start.
  if (!summary.in_use && !found->repairs.empty()) {
    summary.damage = absl::DataLossError(absl::StrCat(
        "served from its twin: ", found->repairs.front(), " (", found->repairs.size(), " in all)"));
  }
  return summary;
}

absl::Status CheckOnePool(const std::string& pool) {
  OFFLOAD_ASSIGN_OR_RETURN(const PoolDirectory directory, PoolDirectory::Open(pool));
  const FileSystem system = FileSystemOf(directory.fd());
  const std::string where = absl::StrCat(
      "nvme_path ", pool, " (file system ", system.name,
      system.name == std::string_view("other") ? absl::StrCat(" ", absl::Hex(system.magic)) : "",
      ")");
  if (system.refusal != nullptr)
    return MakeError(ErrorId::kPoolNoDirectIo, absl::StrCat(where, " ", system.refusal));
  if (faccessat(directory.fd(), ".", R_OK | W_OK | X_OK, AT_EACCESS) != 0) {
    return MakeError(ErrorId::kPoolNotUsable, absl::StrCat(where, ": ", ErrnoText(errno)));
  }
  const UniqueFd probe = OpenProbe(directory.fd());
  if (!probe.valid()) {
    return MakeError(RefusalId(errno),
                     absl::StrCat(where, ": a file cannot be made: ", ErrnoText(errno)));
  }
  return ProbeDirectIo(probe.get(), where);
}

}  // namespace

absl::Status CheckPool(const std::string& pool) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  for (const std::string& each : pools) OFFLOAD_RETURN_IF_ERROR(CheckOnePool(each));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StoreSummary>> ListStores(const std::string& pool) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  std::vector<StoreSummary> stores;
  for (const std::string& each : pools) {
    OFFLOAD_ASSIGN_OR_RETURN(const PoolDirectory directory, PoolDirectory::Open(each));
    OFFLOAD_ASSIGN_OR_RETURN(std::vector<std::string> names, directory.List());
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      if (!JobOfFileName(name).empty()) stores.push_back(Summarize(directory, name));
    }
  }
  return stores;
}

absl::Status RemoveStore(const std::string& pool, const std::string& job) {
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(job));
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  OFFLOAD_ASSIGN_OR_RETURN(const PoolDirectory directory, PoolDirectory::Open(pools.front()));
  const std::string name = StoreFileName(job);
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd file, directory.OpenStoreFile(name, O_RDWR));
  if (!TryLock(file.get())) {
    return MakeError(ErrorId::kStoreLocked,
                     absl::StrCat(directory.PathOf(name), " is held by ", LockHolder(file.get())));
  }
  // Members first: as long as the main file stands, what is left can be found and removed again.
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<MemberPage> page,
                           ReadMemberPage(file.get(), directory.PathOf(name)));
  if (page) OFFLOAD_RETURN_IF_ERROR(RemoveMembers(job, *page));
  if (unlinkat(directory.fd(), name.c_str(), 0) != 0) {
    return MakeError(ErrorId::kPoolNotUsable,
                     absl::StrCat(directory.PathOf(name), ": ", ErrnoText(errno)));
  }
  return directory.Sync();
}

uint64_t FormattedBytes(const StoreSpec& spec, uint32_t generations) {
  const absl::StatusOr<Layout> layout = Layout::Make(spec);
  return layout.ok() ? layout->file_bytes(generations) : 0;
}

}  // namespace offload::swap

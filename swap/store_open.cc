// Store::Open: lock, make durable what a dead owner had written, recover.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "spdlog/spdlog.h"
#include "swap/store_impl.h"

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

// Nothing may be decided on bytes that a dead owner had not flushed: a power cut could still take
// them back.
absl::Status SyncFileAndDirectory(const PoolDirectory& directory, const std::string& name, int fd) {
  if (fsync(fd) != 0)
    return MakeError(ErrorId::kIo,
                     absl::StrCat("fsync of ", directory.PathOf(name), ": ", ErrnoText(errno)));
  return directory.Sync();
}

absl::Status Flush(aio::Device& device) {
  return RunToEnd(device, [&](aio::Device::Done done) { device.Flush(std::move(done)); });
}

// Makes the commit that was found as safe as one that was acknowledged.
absl::Status WriteSuperblockTwin(aio::Device& device, SuperblockPage superblock) {
  superblock.copy ^= 1;
  SealSuperblock(&superblock);
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion page, MappedRegion::Anonymous(kPageBytes));
  std::memcpy(page.data(), &superblock, kPageBytes);
  const iovec memory{page.data(), kPageBytes};
  OFFLOAD_RETURN_IF_ERROR(RunToEnd(device, [&](aio::Device::Done done) {
    device.Write(Layout::SuperblockOffset(superblock.copy), {&memory, 1}, std::move(done));
  }));
  return Flush(device);
}

ReadPages ReadsFrom(aio::Device* device) {
  return [device](uint64_t offset_bytes, std::span<std::byte> bytes) {
    const iovec memory{bytes.data(), bytes.size()};
    return RunToEnd(*device, [&](aio::Device::Done done) {
      device->Read(offset_bytes, {&memory, 1}, std::move(done));
    });
  };
}

absl::Status ClearLeftovers(const PoolDirectory& directory, const std::string& job,
                            const StoreOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd lock,
                           directory.Lock(options.lock_timeout_seconds, options.cancelled));
  return directory.RemoveLeftovers(job).status();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const std::string& pool, const std::string& job,
                                                   const StoreOptions& options) {
  if (!IsValidJobName(job))
    return MakeError(ErrorId::kBadValue, absl::StrCat("job name '", job, "'"));
  OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
  OFFLOAD_ASSIGN_OR_RETURN(PoolDirectory directory, PoolDirectory::Open(pool));
  OFFLOAD_RETURN_IF_ERROR(ClearLeftovers(directory, job, options));
  const std::string name = StoreFileName(job);
  const std::string path = directory.PathOf(name);
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, directory.OpenStoreFile(name, O_RDWR));
  OFFLOAD_RETURN_IF_ERROR(
      LockWithin(file.get(), options.lock_timeout_seconds, path, options.cancelled));
  OFFLOAD_ASSIGN_OR_RETURN(const uint64_t file_bytes, CheckStillNamed(directory, name, file.get()));
  OFFLOAD_RETURN_IF_ERROR(SyncFileAndDirectory(directory, name, file.get()));

  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<aio::Device> device,
                           aio::OpenDevice(file.release(), options.io));
  if (options.decorate) device = options.decorate(std::move(device));
  OFFLOAD_ASSIGN_OR_RETURN(
      std::unique_ptr<Impl> impl,
      Impl::OfRecovery(std::move(directory), path, file_bytes, std::move(device)));
  if (impl->spec.job != job) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat(path, " is the store of job '", impl->spec.job, "'"),
                     "Give the file the name of its job again");
  }
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Store>> Store::OpenOn(std::unique_ptr<aio::Device> device) {
  OFFLOAD_RETURN_IF_ERROR(Flush(*device));
  const uint64_t file_bytes = device->geometry().size_bytes;
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                           Impl::OfRecovery({}, "the device", file_bytes, std::move(device)));
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Store::Impl>> Store::Impl::OfRecovery(
    PoolDirectory pool, std::string path, uint64_t file_bytes,
    std::unique_ptr<aio::Device> device) {
  OFFLOAD_ASSIGN_OR_RETURN(RecoveredStore found, Recover(path, file_bytes, ReadsFrom(device.get()),
                                                         RecoveryDepth::kWhole));
  for (const std::string& repair : found.repairs)
    spdlog::warn("{}: taken from its twin: {}", path, repair);
  if (found.superblock_twin_missing)
    OFFLOAD_RETURN_IF_ERROR(WriteSuperblockTwin(*device, found.superblock));
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  auto impl = std::make_unique<Impl>(std::move(pool), std::move(found.spec),
                                     std::move(found.layout), std::move(device), std::move(wakeup));
  impl->path = std::move(path);
  impl->uuid = found.header.uuid;
  impl->superblock = found.superblock;
  impl->committed = std::move(found.committed);
  impl->table = std::move(found.table);
  impl->repairs = std::move(found.repairs);
  OFFLOAD_RETURN_IF_ERROR(impl->AllocateBuffers());
  // What the other copy holds does not matter: a dead owner may have begun to write it. The
  // committed one is known.
  const uint32_t copy = found.superblock.table_copy;
  impl->page_crcs[copy] = std::move(found.table_page_crcs);
  impl->page_stale[copy].assign(impl->layout.table_page_count(), 0);
  for (const uint32_t page : found.repaired_table_pages) impl->page_stale[copy][page] = 1;
  return impl;
}

}  // namespace offload::swap

// Store::Open: recover over the locked device, and make the commit that was found safe.

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "spdlog/spdlog.h"
#include "swap/store_files.h"
#include "swap/store_impl.h"

namespace offload::swap {
namespace {

// Makes the commit that was found as safe as one that was acknowledged.
absl::Status WriteSuperblockTwin(aio::Device& device, SuperblockPage superblock) {
  superblock.copy ^= 1;
  SealSuperblock(&superblock);
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion page, MappedRegion::Anonymous(kPageBytes));
  std::memcpy(page.data(), &superblock, kPageBytes);
  OFFLOAD_RETURN_IF_ERROR(
      WriteToEnd(device, Layout::SuperblockOffset(superblock.copy), page.span()));
  return FlushToEnd(device);
}

ReadPages ReadsFrom(aio::Device* device) {
  return [device](uint64_t offset_bytes, std::span<std::byte> bytes) {
    const iovec memory{bytes.data(), bytes.size()};
    return RunToEnd(*device, [&](aio::Device::Done done) {
      device->Read(offset_bytes, {&memory, 1}, std::move(done));
    });
  };
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const std::string& pool, const std::string& job,
                                                   const StoreOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(OpenedFiles files,
                           OpenStoreFiles(pool, job, options, /*counts_as_opening=*/true));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                           Impl::OfRecovery(std::move(files.directory), files.path,
                                            files.size_bytes, std::move(files.device)));
  if (impl->spec.job != job) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat(files.path, " is the store of job '", impl->spec.job, "'"),
                     "Give the file the name of its job again");
  }
  impl->files = std::move(files.files);
  OFFLOAD_RETURN_IF_ERROR(impl->CutOffUnfinishedGrowth());
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Store>> Store::OpenSnapshot(const std::string& pool,
                                                           const std::string& job,
                                                           const std::string& snapshot,
                                                           const StoreOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  OFFLOAD_ASSIGN_OR_RETURN(OpenedFiles files,
                           pools.size() > 1
                               ? OpenStoreFiles(pool, job, options, /*counts_as_opening=*/false)
                               : OpenStoreFileToRead(pool, job, options));
  OFFLOAD_ASSIGN_OR_RETURN(
      std::unique_ptr<Impl> impl,
      Impl::OfSnapshot(files.path, files.size_bytes, snapshot, std::move(files.device)));
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Store>> Store::OpenSnapshotOn(std::unique_ptr<aio::Device> device,
                                                             const std::string& snapshot) {
  const uint64_t file_bytes = device->geometry().size_bytes;
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                           Impl::OfSnapshot("the device", file_bytes, snapshot, std::move(device)));
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

// What is longer than the last commit says is what a killed owner had begun to add.
absl::Status Store::Impl::CutOffUnfinishedGrowth() {
  const uint64_t named_bytes = layout.file_bytes(generation_count);
  if (device->geometry().size_bytes <= named_bytes) return absl::OkStatus();
  spdlog::info("{}: removed {} bytes of a growth that did not finish", path,
               device->geometry().size_bytes - named_bytes);
  return device->Resize(named_bytes);
}

absl::StatusOr<std::unique_ptr<Store::Impl>> Store::Impl::OfSnapshot(
    std::string path, uint64_t file_bytes, const std::string& snapshot,
    std::unique_ptr<aio::Device> device) {
  OFFLOAD_ASSIGN_OR_RETURN(RecoveredStore found,
                           RecoverSnapshot(path, file_bytes, ReadsFrom(device.get()), snapshot));
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  auto impl = std::make_unique<Impl>(PoolDirectory(), std::move(found.spec),
                                     std::move(found.layout), std::move(device), std::move(wakeup));
  impl->path = absl::StrCat(path, " at snapshot ", snapshot);
  impl->uuid = found.header.uuid;
  impl->committed = std::move(found.committed);
  impl->table = std::move(found.table);
  impl->repairs = std::move(found.repairs);
  impl->read_only = true;
  OFFLOAD_RETURN_IF_ERROR(impl->wakeup.Watch(impl->device->event_fd()));
  return impl;
}

absl::StatusOr<std::unique_ptr<Store>> Store::OpenOn(std::unique_ptr<aio::Device> device) {
  OFFLOAD_RETURN_IF_ERROR(FlushToEnd(*device));
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
  impl->generation_count = found.superblock.generation_count;
  impl->snapshot_places = std::move(found.snapshot_places);
  impl->snapshot_repairs = std::move(found.snapshot_repairs);
  for (std::optional<SnapshotInfo>& snapshot : found.snapshots) {
    if (snapshot) impl->snapshots.push_back(*std::move(snapshot));
  }
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

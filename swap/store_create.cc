// Store::Create and Store::Publish: a store is formatted whole under a temporary name and then gets
// its own.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "swap/building_file.h"
#include "swap/building_members.h"
#include "swap/member_files.h"
#include "swap/store_impl.h"
#include "swap/unmounted_drive.h"

namespace offload::swap {
namespace {

constexpr uint64_t kZeroBytes = uint64_t{1} << 20;
constexpr size_t kZeroQueueDepth = 16;

// Refuses a job that has a store, unless that is to be replaced, or is being built. A format that
// was killed a moment ago may still hold its lock, until its last writes have landed: that is
// waited for.
absl::StatusOr<BuildingFile> MakeBuildingFile(const PoolDirectory& directory,
                                              const std::string& job, const StoreOptions& options) {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration<double>(options.lock_timeout_seconds);
  for (;; std::this_thread::sleep_for(kLockPause)) {
    OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd lock,
                             directory.Lock(options.lock_timeout_seconds, options.cancelled));
    struct stat info;
    const std::string published = StoreFileName(job);
    const bool exists = fstatat(directory.fd(), published.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
    if (exists && !options.replaces) {
      return MakeError(
          ErrorId::kStoreLocked,
          absl::StrCat("job '", job, "' already has a store, ", directory.PathOf(published)),
          "Resume it, remove it with offloadctl rm, or choose another job name");
    }
    if (!exists && errno != ENOENT) {
      return MakeError(RefusalId(errno),
                       absl::StrCat(directory.PathOf(published), ": ", ErrnoText(errno)));
    }
    OFFLOAD_ASSIGN_OR_RETURN(const std::string alive, directory.RemoveLeftovers(job));
    if (alive.empty()) return BuildingFile::MakeFor(directory, job);
    if (std::chrono::steady_clock::now() >= deadline) {
      return MakeError(ErrorId::kStoreLocked,
                       absl::StrCat("job '", job, "' is being built: ", alive));
    }
    OFFLOAD_RETURN_IF_ERROR(CheckWanted(options.cancelled));
  }
}

// Writes zeros over everything, so that no block is left whose first use would have to allocate or
// convert anything.
class ZeroFill {
 public:
  ZeroFill(aio::Device* device, uint64_t file_bytes, const StoreOptions& options)
      : device_(device), file_bytes_(file_bytes), options_(options) {}

  absl::Status Run() {
    OFFLOAD_ASSIGN_OR_RETURN(zeros_, MappedRegion::Anonymous(kZeroBytes));
    while (done_bytes_ < file_bytes_ && status_.ok()) {
      while (in_flight_ < kZeroQueueDepth && started_bytes_ < file_bytes_) StartOne();
      device_->Poll(/*wait=*/true);
      status_.Update(CheckWanted(options_.cancelled));
    }
    while (in_flight_ > 0) device_->Poll(/*wait=*/true);
    return status_;
  }

 private:
  void StartOne() {
    const uint64_t size_bytes = std::min(kZeroBytes, file_bytes_ - started_bytes_);
    const iovec memory{zeros_.data(), size_bytes};
    ++in_flight_;
    device_->Write(started_bytes_, {&memory, 1}, [this, size_bytes](absl::Status status) {
      --in_flight_;
      if (status_.ok()) status_ = std::move(status);
      done_bytes_ += size_bytes;
      if (options_.progress) options_.progress(done_bytes_, file_bytes_);
    });
    started_bytes_ += size_bytes;
  }

  aio::Device* const device_;
  const uint64_t file_bytes_;
  const StoreOptions& options_;
  MappedRegion zeros_;
  uint64_t started_bytes_ = 0, done_bytes_ = 0;
  size_t in_flight_ = 0;
  absl::Status status_;
};

absl::Status WriteSpecAndHeader(aio::Device& device, const StoreSpec& spec, const Layout& layout,
                                const StoreUuid& uuid) {
  const std::string encoded = EncodeSpec(spec);
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes,
                           MappedRegion::Anonymous(RoundUpToPage(encoded.size())));
  std::memcpy(bytes.data(), encoded.data(), encoded.size());
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion page, MappedRegion::Anonymous(kPageBytes));
  for (uint32_t copy = 0; copy < 2; ++copy) {
    OFFLOAD_RETURN_IF_ERROR(
        WriteToEnd(device, Layout::SpecOffset(copy, encoded.size()), bytes.span()));
    HeaderPage header{.uuid = uuid,
                      .copy = copy,
                      .spec_crc = Crc32c(0, encoded.data(), encoded.size()),
                      .spec_bytes = encoded.size(),
                      .file_bytes = layout.file_bytes()};
    SealHeader(&header);
    std::memcpy(page.data(), &header, sizeof(header));
    OFFLOAD_RETURN_IF_ERROR(WriteToEnd(device, Layout::HeaderOffset(copy), page.span()));
  }
  return absl::OkStatus();
}

// Reserves the space of the one file, or of those in several pools, which are returned then.
absl::StatusOr<std::unique_ptr<BuildingMembers>> ReserveFiles(const BuildingMembers::Plan& plan,
                                                              const PoolDirectory& directory,
                                                              BuildingFile* file,
                                                              const StoreOptions& options) {
  if (plan.pools.size() > 1) return BuildingMembers::Make(plan, directory, file, options);
  OFFLOAD_RETURN_IF_ERROR(CheckNoStrayMembers(plan.pools, plan.job));
  OFFLOAD_RETURN_IF_ERROR(Allocate(directory, file->fd(), plan.store_bytes));
  return nullptr;
}

absl::Status CheckGenerations(uint32_t generations) {
  if (generations <= kGenerationsMax) return absl::OkStatus();
  return MakeError(ErrorId::kBadValue, absl::StrCat(generations, " spare generations; at most ",
                                                    kGenerationsMax, " are possible"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Create(const std::string& pool, const StoreSpec& spec,
                                                     const StoreOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(Layout layout, Layout::Make(spec));
  OFFLOAD_RETURN_IF_ERROR(CheckGenerations(options.generations));
  const uint64_t file_bytes = layout.file_bytes(options.generations);
  OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  if (options.replaces && pools.size() > 1) {
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat("job '", spec.job, "' is to be laid out anew over several pools"));
  }
  if (!options.replaces) {
    for (const std::string& each : pools) OFFLOAD_RETURN_IF_ERROR(CheckIsMounted(each));
  }
  OFFLOAD_ASSIGN_OR_RETURN(PoolDirectory directory, PoolDirectory::Open(pools.front()));
  StoreUuid uuid;
  OFFLOAD_RETURN_IF_ERROR(Random(uuid));
  OFFLOAD_ASSIGN_OR_RETURN(BuildingFile made, MakeBuildingFile(directory, spec.job, options));
  auto file = std::make_unique<BuildingFile>(std::move(made));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<BuildingMembers> members,
                           ReserveFiles({pools, spec.job, uuid, layout.PlaceOffset(0), file_bytes},
                                        directory, file.get(), options));
  FaultPoint("store.format_allocated");

  const int fd = file->fd();
  NamedFiles files;
  OFFLOAD_RETURN_IF_ERROR(files.Add(fd, pools.front(), StoreFileName(spec.job)));
  if (members != nullptr) OFFLOAD_RETURN_IF_ERROR(members->NameIn(&files));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<aio::Device> device,
                           members != nullptr
                               ? members->Compose(file->TakeFd(), options)
                               : aio::OpenDevice(file->TakeFd().release(), options.io));
  if (options.decorate) device = options.decorate(std::move(device));
  OFFLOAD_RETURN_IF_ERROR(ZeroFill(device.get(), file_bytes, options).Run());
  FaultPoint("store.format_zeroed");
  OFFLOAD_RETURN_IF_ERROR(WriteSpecAndHeader(*device, spec, layout, uuid));
  OFFLOAD_RETURN_IF_ERROR(FlushToEnd(*device));
  // The flush above is one of data; this one is of all that fallocate changed, and of the new name.
  OFFLOAD_RETURN_IF_ERROR(SyncFile(fd, directory.PathOf(spec.job)));
  if (members != nullptr) OFFLOAD_RETURN_IF_ERROR(members->Sync());
  OFFLOAD_RETURN_IF_ERROR(directory.Sync());
  FaultPoint("store.formatted");

  const std::string path = directory.PathOf(StoreFileName(spec.job));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                           Impl::OfFormat(std::move(directory), path, spec, std::move(layout), uuid,
                                          options.generations, std::move(device)));
  impl->files = std::move(files);
  impl->building_file = std::move(file);
  impl->replaces = options.replaces;
  impl->building_members = std::move(members);
  OFFLOAD_RETURN_IF_ERROR(impl->AllocateBuffers());
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Store>> Store::CreateOn(std::unique_ptr<aio::Device> device,
                                                       const StoreSpec& spec,
                                                       const std::array<uint8_t, 16>& uuid,
                                                       uint32_t generations) {
  OFFLOAD_ASSIGN_OR_RETURN(Layout layout, Layout::Make(spec));
  OFFLOAD_RETURN_IF_ERROR(CheckGenerations(generations));
  if (layout.file_bytes(generations) > device->geometry().size_bytes) {
    return MakeError(ErrorId::kPoolFull,
                     absl::StrCat("the store needs ", layout.file_bytes(generations),
                                  " bytes, the device has ", device->geometry().size_bytes));
  }
  OFFLOAD_RETURN_IF_ERROR(WriteSpecAndHeader(*device, spec, layout, uuid));
  OFFLOAD_RETURN_IF_ERROR(FlushToEnd(*device));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                           Impl::OfFormat({}, "the device", spec, std::move(layout), uuid,
                                          generations, std::move(device)));
  OFFLOAD_RETURN_IF_ERROR(impl->AllocateBuffers());
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Store::Impl>> Store::Impl::OfFormat(
    PoolDirectory&& pool, std::string path, const StoreSpec& spec, Layout layout,
    const StoreUuid& uuid, uint32_t generations, std::unique_ptr<aio::Device> device) {
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  OFFLOAD_ASSIGN_OR_RETURN(MappedRegion table, MappedRegion::Anonymous(layout.table_bytes()));
  auto impl = std::make_unique<Impl>(std::move(pool), spec, std::move(layout), std::move(device),
                                     std::move(wakeup));
  impl->path = std::move(path);
  impl->uuid = uuid;
  impl->generation_count = generations;
  impl->table = std::move(table);
  return impl;
}

absl::Status Store::Publish() {
  Impl& store = *impl_;
  if (store.building_file == nullptr)
    return absl::FailedPreconditionError(absl::StrCat(store.path, " is published"));
  if (store.committed.sequence == 0)
    return absl::FailedPreconditionError(absl::StrCat(store.path, " has no commit to publish"));
  if (store.failed) return store.FailedError();
  FaultPoint("store.before_publish");
  if (store.building_members != nullptr) OFFLOAD_RETURN_IF_ERROR(store.building_members->Publish());
  const std::string name = StoreFileName(store.spec.job);
  if (renameat2(store.directory.fd(), store.building_file->name().c_str(), store.directory.fd(),
                name.c_str(), store.replaces ? 0 : RENAME_NOREPLACE) != 0) {
    if (errno == EEXIST)
      return MakeError(ErrorId::kStoreLocked,
                       absl::StrCat("job '", store.spec.job, "' already has a store"));
    return MakeError(ErrorId::kIo, absl::StrCat("rename to ", store.path, ": ", ErrnoText(errno)));
  }
  if (store.building_members != nullptr) store.building_members->Keep();
  store.building_file->KeepName();
  store.building_members.reset();
  store.building_file.reset();
  FaultPoint("store.after_rename");
  return store.directory.Sync();
}

}  // namespace offload::swap

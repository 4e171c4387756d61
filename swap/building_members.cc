#include "swap/building_members.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "spdlog/spdlog.h"
#include "swap/member_files.h"
#include "swap/store_impl.h"

namespace offload::swap {
namespace {

constexpr uint64_t kMeasuredBytes = uint64_t{64} << 20;  // of each pool
constexpr uint64_t kMeasuredUnitBytes = uint64_t{1} << 20;
constexpr int kMeasuredDepth = 8;

// Bytes per second of writes of `size_bytes` to an allocated file, until they are durable. Behind
// the member page: a kill must still find it.
absl::StatusOr<double> MeasureWrites(int fd, uint64_t size_bytes, const aio::OpenOptions& io) {
  UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return MakeError(RefusalId(errno), absl::StrCat("dup: ", ErrnoText(errno)));
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<aio::Device> device,
                           aio::OpenDevice(copy.release(), io));
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion zeros, MappedRegion::Anonymous(kMeasuredUnitBytes));
  const auto begin = std::chrono::steady_clock::now();
  absl::Status status;
  for (uint64_t at = 0; at < size_bytes && status.ok(); at += kMeasuredUnitBytes) {
    const iovec memory{zeros.data(), std::min(kMeasuredUnitBytes, size_bytes - at)};
    device->Write(kMemberHeadBytes + at, {&memory, 1},
                  [&](absl::Status done) { status.Update(done); });
    while (device->in_flight() >= kMeasuredDepth) device->Poll(/*wait=*/true);
  }
  while (device->in_flight() > 0) device->Poll(/*wait=*/true);
  OFFLOAD_RETURN_IF_ERROR(status);
  OFFLOAD_RETURN_IF_ERROR(FlushToEnd(*device));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return static_cast<double>(size_bytes) / std::max(seconds.count(), 1e-9);
}

}  // namespace

absl::StatusOr<std::unique_ptr<BuildingMembers>> BuildingMembers::Make(
    const Plan& plan, const PoolDirectory& main_directory, BuildingFile* main_file,
    const StoreOptions& options) {
  const BuildingFile& main = *main_file;
  if (plan.pools.size() > kMembersMax) {
    return MakeError(ErrorId::kBadValue, absl::StrCat(plan.pools.size(), " pools; at most ",
                                                      kMembersMax, " are possible"));
  }
  OFFLOAD_RETURN_IF_ERROR(CheckNoStrayMembers(plan.pools, plan.job));
  std::unique_ptr<BuildingMembers> building(new BuildingMembers(plan, main_file));
  const std::string main_path = main_directory.PathOf(main.name());
  building->page_ = {.uuid = plan.uuid,
                     .age = 1,
                     .head_bytes = plan.head_bytes,
                     .member_count = static_cast<uint32_t>(plan.pools.size()),
                     .unit_bytes = kStripeUnitBytes};
  building->page_.weights.fill(1);
  std::vector<std::string> paths;
  for (const std::string& pool : plan.pools) {
    std::error_code error;
    paths.push_back(std::filesystem::canonical(pool, error).string());
  }
  OFFLOAD_RETURN_IF_ERROR(SetPaths(paths, &building->page_));
  OFFLOAD_RETURN_IF_ERROR(building->WriteFirstPage(main_directory, main));
  FaultPoint("store.member_page");
  OFFLOAD_RETURN_IF_ERROR(building->MakeFiles(main));
  std::vector<uint32_t> weights = options.stripe_weights;
  if (weights.size() != plan.pools.size()) {
    OFFLOAD_ASSIGN_OR_RETURN(weights, building->Measure(main_directory, main.fd(), options));
  }
  std::copy(weights.begin(), weights.end(), building->page_.weights.begin());
  OFFLOAD_RETURN_IF_ERROR(building->Reserve(main_directory, main.fd()));
  building->page_.store_bytes = plan.store_bytes;
  OFFLOAD_RETURN_IF_ERROR(building->WritePages(main_path, main.fd()));
  FaultPoint("store.members_made");
  return building;
}

BuildingMembers::~BuildingMembers() {
  bool removed_all = true;
  for (Member& member : members_) removed_all &= member.file == nullptr || member.file->Remove();
  if (!removed_all) main_file_->KeepName();
}

// Durable before any other file exists: it is how the next start finds them.
absl::Status BuildingMembers::WriteFirstPage(const PoolDirectory& directory,
                                             const BuildingFile& main) {
  OFFLOAD_RETURN_IF_ERROR(Allocate(directory, main.fd(), kMemberHeadBytes));
  const std::string path = directory.PathOf(main.name());
  OFFLOAD_RETURN_IF_ERROR(WriteMemberPage(main.fd(), path, &page_));
  OFFLOAD_RETURN_IF_ERROR(SyncFile(main.fd(), path));
  return directory.Sync();
}

absl::Status BuildingMembers::MakeFiles(const BuildingFile& main) {
  for (uint32_t index = 1; index < plan_.pools.size(); ++index) {
    OFFLOAD_ASSIGN_OR_RETURN(PoolDirectory directory, PoolDirectory::Open(plan_.pools[index]));
    Member& member = members_.emplace_back(std::move(directory));
    OFFLOAD_ASSIGN_OR_RETURN(
        BuildingFile file,
        BuildingFile::Make(member.directory, MemberBuildingName(plan_.job, index, main.name())));
    member.fd = file.fd();
    member.path = member.directory.PathOf(file.name());
    member.file = std::make_unique<BuildingFile>(std::move(file));
  }
  return absl::OkStatus();
}

// One after the other: pools that share a drive are told apart by nothing, and need not be.
absl::StatusOr<std::vector<uint32_t>> BuildingMembers::Measure(const PoolDirectory& main_directory,
                                                               int main_fd,
                                                               const StoreOptions& options) const {
  // A small store need not write more than itself.
  const uint64_t size_bytes =
      std::min(kMeasuredBytes, RoundUpToPage(plan_.store_bytes / plan_.pools.size()));
  std::vector<double> bandwidths;
  for (size_t index = 0; index < plan_.pools.size(); ++index) {
    const PoolDirectory& directory = index == 0 ? main_directory : members_[index - 1].directory;
    const int fd = index == 0 ? main_fd : members_[index - 1].fd;
    OFFLOAD_RETURN_IF_ERROR(Allocate(directory, fd, kMemberHeadBytes + size_bytes));
    OFFLOAD_ASSIGN_OR_RETURN(const double bandwidth, MeasureWrites(fd, size_bytes, options.io));
    bandwidths.push_back(bandwidth);
    OFFLOAD_RETURN_IF_ERROR(CheckWanted(options.cancelled));
  }
  std::vector<uint32_t> weights = WeightsOf(bandwidths);
  for (size_t index = 0; index < plan_.pools.size(); ++index) {
    spdlog::info("pool {}: {:.2f} GB/s written, {} of {} stripe units", plan_.pools[index],
                 bandwidths[index] / 1e9, weights[index], absl::StrJoin(weights, "+"));
  }
  return weights;
}

absl::Status BuildingMembers::Reserve(const PoolDirectory& main_directory, int main_fd) {
  OFFLOAD_ASSIGN_OR_RETURN(const StripeMap map, StripeMap::Make(NumbersOf(page_)));
  for (uint32_t index = 0; index < plan_.pools.size(); ++index) {
    const PoolDirectory& directory = index == 0 ? main_directory : members_[index - 1].directory;
    const int fd = index == 0 ? main_fd : members_[index - 1].fd;
    // What was measured may have been longer.
    if (ftruncate(fd, kMemberHeadBytes) != 0) {
      return MakeError(ErrorId::kIo,
                       absl::StrCat(directory.PathOf(""), ": ftruncate: ", ErrnoText(errno)));
    }
    OFFLOAD_RETURN_IF_ERROR(
        Allocate(directory, fd, kMemberHeadBytes + map.MemberBytes(index, plan_.store_bytes)));
  }
  return absl::OkStatus();
}

absl::Status BuildingMembers::WritePages(const std::string& main_path, int main_fd) {
  OFFLOAD_RETURN_IF_ERROR(WriteMemberPage(main_fd, main_path, &page_));
  for (uint32_t index = 1; index < plan_.pools.size(); ++index) {
    MemberPage page = page_;
    page.member = index;
    page.revision = 0;
    OFFLOAD_RETURN_IF_ERROR(
        WriteMemberPage(members_[index - 1].fd, members_[index - 1].path, &page));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<aio::Device>> BuildingMembers::Compose(UniqueFd main,
                                                                      const StoreOptions& options) {
  std::vector<UniqueFd> files;
  files.push_back(std::move(main));
  for (Member& member : members_) files.push_back(member.file->TakeFd());
  return OpenStripedDevice(page_, plan_.pools, std::move(files), options.io);
}

absl::Status BuildingMembers::NameIn(NamedFiles* files) const {
  for (uint32_t index = 1; index <= members_.size(); ++index) {
    OFFLOAD_RETURN_IF_ERROR(
        files->Add(members_[index - 1].fd, plan_.pools[index], MemberFileName(plan_.job, index)));
  }
  return absl::OkStatus();
}

absl::Status BuildingMembers::Sync() const {
  for (const Member& member : members_) {
    OFFLOAD_RETURN_IF_ERROR(SyncFile(member.fd, member.path));
    OFFLOAD_RETURN_IF_ERROR(member.directory.Sync());
  }
  return absl::OkStatus();
}

absl::Status BuildingMembers::Publish() {
  for (uint32_t index = 1; index <= members_.size(); ++index) {
    Member& member = members_[index - 1];
    const std::string name = MemberFileName(plan_.job, index);
    if (renameat2(member.directory.fd(), member.file->name().c_str(), member.directory.fd(),
                  name.c_str(), RENAME_NOREPLACE) != 0) {
      return MakeError(
          errno == EEXIST ? ErrorId::kStoreLocked : ErrorId::kIo,
          absl::StrCat("rename to ", member.directory.PathOf(name), ": ", ErrnoText(errno)));
    }
    member.file->Rename(name);
    OFFLOAD_RETURN_IF_ERROR(member.directory.Sync());
    FaultPoint("store.after_member_rename");
  }
  return absl::OkStatus();
}

void BuildingMembers::Keep() {
  for (Member& member : members_) member.file->KeepName();
}

}  // namespace offload::swap

#include "swap/member_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "spdlog/spdlog.h"
#include "swap/striped_device.h"

namespace offload::swap {
namespace {

constexpr std::string_view kBuilding = ".building-";

absl::Status Differs(std::string_view what, const MemberPage& main_page) {
  return MakeError(
      ErrorId::kPoolsDiffer, what,
      absl::StrCat("The job was made over ", JoinPools(PathsOf(main_page)),
                   ": name its pools in that order, each with its own file, all of one time"));
}

absl::Status CheckMember(const MemberFile& member, const std::optional<MemberPage>& page,
                         uint32_t index, const MemberPage& main) {
  if (!page) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat(member.path, ": neither copy of its member page is intact"));
  }
  if (page->uuid != main.uuid) {
    return Differs(absl::StrCat(member.path, " is of another store"), main);
  }
  if (page->member != index || page->member_count != main.member_count) {
    return Differs(absl::StrCat(member.path, " is member ", page->member, " of ",
                                page->member_count, ", not ", index, " of ", main.member_count),
                   main);
  }
  if (page->age != main.age && !(main.opening == 1 && page->age == main.age + 1)) {
    return Differs(absl::StrCat(member.path, " is of another time: opened ", page->age,
                                " times, the store ", main.age),
                   main);
  }
  if (page->weights != main.weights || page->head_bytes != main.head_bytes ||
      page->unit_bytes != main.unit_bytes || page->store_bytes != main.store_bytes) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat(member.path, " and the store's file contradict each other"));
  }
  return absl::OkStatus();
}

absl::Status CheckSize(const MemberFile& member, uint32_t index) {
  struct stat info {};
  if (fstat(member.fd.get(), &info) != 0)
    return MakeError(ErrorId::kIo, absl::StrCat(member.path, ": ", ErrnoText(errno)));
  OFFLOAD_ASSIGN_OR_RETURN(const StripeMap map, StripeMap::Make(NumbersOf(member.page)));
  const uint64_t expected_bytes =
      kMemberHeadBytes + map.MemberBytes(index, member.page.store_bytes);
  if (static_cast<uint64_t>(info.st_size) >= expected_bytes) return absl::OkStatus();
  return MakeError(ErrorId::kStoreDamaged, absl::StrCat(member.path, " has ", info.st_size,
                                                        " of its ", expected_bytes, " bytes"));
}

absl::StatusOr<MemberFile> OpenMember(const std::string& pool, const std::string& job,
                                      uint32_t index, const MemberPage& main_page,
                                      const StoreOptions& options) {
  MemberFile member;
  absl::StatusOr<PoolDirectory> directory = PoolDirectory::Open(pool);
  if (!directory.ok() && ErrorIdOf(directory.status()) == ErrorId::kPoolMissing) {
    return Differs(absl::StrCat("pool ", pool, " is not there"), main_page);
  }
  OFFLOAD_RETURN_IF_ERROR(directory.status());
  member.directory = *std::move(directory);
  const std::string name = MemberFileName(job, index);
  member.path = member.directory.PathOf(name);
  absl::StatusOr<UniqueFd> file = member.directory.OpenStoreFile(name, O_RDWR);
  if (absl::IsNotFound(file.status())) {
    return Differs(absl::StrCat("pool ", pool, " does not hold ", name), main_page);
  }
  OFFLOAD_RETURN_IF_ERROR(file.status());
  member.fd = *std::move(file);
  OFFLOAD_RETURN_IF_ERROR(
      LockWithin(member.fd.get(), options.lock_timeout_seconds, member.path, options.cancelled));
  OFFLOAD_RETURN_IF_ERROR(SyncFile(member.fd.get(), member.path));
  OFFLOAD_RETURN_IF_ERROR(member.directory.Sync());
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<MemberPage> page,
                           ReadMemberPage(member.fd.get(), member.path));
  OFFLOAD_RETURN_IF_ERROR(CheckMember(member, page, index, main_page));
  member.page = *page;
  OFFLOAD_RETURN_IF_ERROR(CheckSize(member, index));
  return member;
}

// Opens a member's file without waiting for anything; an invalid descriptor when there is none.
// That one is there and cannot be opened is an error: whoever took it for gone would lose its
// space.
absl::StatusOr<UniqueFd> OpenQuietly(const PoolDirectory& directory, const std::string& name) {
  UniqueFd file(
      openat(directory.fd(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.valid() || errno == ENOENT) return file;
  return MakeError(RefusalId(errno), absl::StrCat(directory.PathOf(name), ": ", ErrnoText(errno)));
}

// The same, of the store `uuid` only.
absl::StatusOr<UniqueFd> OpenOwn(const PoolDirectory& directory, const std::string& name,
                                 const StoreUuid& uuid) {
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, OpenQuietly(directory, name));
  if (!file.valid()) return file;
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<MemberPage> page,
                           ReadMemberPage(file.get(), directory.PathOf(name)));
  if (!page || page->uuid != uuid) file.reset();
  return file;
}

absl::Status Unlink(const PoolDirectory& directory, const std::string& name) {
  if (unlinkat(directory.fd(), name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  return MakeError(ErrorId::kPoolNotUsable,
                   absl::StrCat(directory.PathOf(name), ": ", ErrnoText(errno)));
}

// The files of one member that a format of `main_building_name` left, under either name.
absl::Status RemoveLeftoverMember(const std::string& pool, std::string_view job, uint32_t index,
                                  std::string_view main_building_name, const StoreUuid& uuid) {
  OFFLOAD_ASSIGN_OR_RETURN(const PoolDirectory directory, PoolDirectory::Open(pool));
  OFFLOAD_RETURN_IF_ERROR(Unlink(directory, MemberBuildingName(job, index, main_building_name)));
  const std::string name = MemberFileName(job, index);
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd file, OpenOwn(directory, name, uuid));
  if (file.valid()) OFFLOAD_RETURN_IF_ERROR(Unlink(directory, name));
  return directory.Sync();
}

}  // namespace

std::string MemberFileName(std::string_view job, uint32_t member) {
  return absl::StrCat(StoreFileName(job), ".member-", member);
}

std::string MemberBuildingName(std::string_view job, uint32_t member,
                               std::string_view main_building_name) {
  const size_t token = main_building_name.rfind(kBuilding);
  return absl::StrCat(".", MemberFileName(job, member), ToAbsl(main_building_name.substr(token)));
}

std::string JoinPools(const std::vector<std::string>& pools) { return absl::StrJoin(pools, ","); }

absl::StatusOr<std::optional<MemberPage>> ReadMemberPage(int fd, const std::string& path) {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes, MappedRegion::Anonymous(kPageBytes));
  std::optional<MemberPage> found;
  bool other_version = false;
  uint32_t unreadable_copies = 0;
  absl::Status failure;
  for (uint32_t copy = 0; copy < kMemberPageCopies; ++copy) {
    const absl::Status read = PreadFully(fd, copy * kPageBytes, bytes.span());
    if (!read.ok()) {
      // A file that ends here has no member page.
      unreadable_copies += !absl::IsDataLoss(read);
      failure.Update(read);
      continue;
    }
    const absl::StatusOr<MemberPage> page =
        DecodeMemberPage(bytes.span().first<kPageBytes>(), copy);
    other_version |= absl::IsFailedPrecondition(page.status());
    if (page.ok() && (!found || page->revision > found->revision)) found = *page;
  }
  if (!found && other_version) return MakeError(ErrorId::kStoreVersion, path);
  if (unreadable_copies == kMemberPageCopies)
    return MakeError(ErrorId::kIo, absl::StrCat(path, ": ", failure.message()));
  return found;
}

absl::Status WriteMemberPage(int fd, const std::string& path, MemberPage* page) {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes, MappedRegion::Anonymous(kPageBytes));
  ++page->revision;
  for (uint32_t copy = 0; copy < kMemberPageCopies; ++copy) {
    page->copy = copy;
    SealMemberPage(page);
    std::memcpy(bytes.data(), page, sizeof(*page));
    if (absl::Status status = PwriteFully(fd, copy * kPageBytes, bytes.span()); !status.ok())
      return MakeError(ErrorId::kIo, absl::StrCat(path, ": ", status.message()));
    if (fdatasync(fd) != 0)
      return MakeError(ErrorId::kIo, absl::StrCat("fdatasync of ", path, ": ", ErrnoText(errno)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<MemberFile>> OpenMembers(const std::vector<std::string>& pools,
                                                    const std::string& job,
                                                    const MemberPage& main_page,
                                                    const StoreOptions& options) {
  std::vector<MemberFile> members;
  for (uint32_t index = 1; index < pools.size(); ++index) {
    OFFLOAD_ASSIGN_OR_RETURN(MemberFile member,
                             OpenMember(pools[index], job, index, main_page, options));
    members.push_back(std::move(member));
  }
  return members;
}

absl::Status RaiseAge(int main_fd, const std::string& main_path, MemberPage* main_page,
                      std::vector<MemberFile>* members) {
  main_page->opening = 1;
  OFFLOAD_RETURN_IF_ERROR(WriteMemberPage(main_fd, main_path, main_page));
  for (MemberFile& member : *members) {
    member.page.age = main_page->age + 1;
    OFFLOAD_RETURN_IF_ERROR(WriteMemberPage(member.fd.get(), member.path, &member.page));
  }
  ++main_page->age;
  main_page->opening = 0;
  return WriteMemberPage(main_fd, main_path, main_page);
}

absl::Status CheckPoolsOf(const std::vector<std::string>& pools, const std::string& job,
                          const std::optional<MemberPage>& main_page) {
  if (!main_page && pools.size() == 1) return absl::OkStatus();
  if (!main_page) {
    return MakeError(ErrorId::kPoolsDiffer,
                     absl::StrCat("job '", job, "' lies in ", pools.front(), " alone, named are ",
                                  JoinPools(pools)),
                     absl::StrCat("Name only ", pools.front(), ", or choose another job name"));
  }
  if (main_page->member != 0) {
    return Differs(absl::StrCat("the file of job '", job, "' in ", pools.front(), " is member ",
                                main_page->member, ", not 0"),
                   *main_page);
  }
  if (main_page->member_count != pools.size()) {
    return Differs(absl::StrCat("job '", job, "' lies in ", main_page->member_count,
                                " pools, named is ", JoinPools(pools)),
                   *main_page);
  }
  return absl::OkStatus();
}

absl::Status CheckNoStrayMembers(const std::vector<std::string>& pools, const std::string& job) {
  for (const std::string& pool : pools) {
    OFFLOAD_ASSIGN_OR_RETURN(const PoolDirectory directory, PoolDirectory::Open(pool));
    for (uint32_t index = 1; index < kMembersMax; ++index) {
      const std::string name = MemberFileName(job, index);
      OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd file, OpenQuietly(directory, name));
      if (!file.valid()) continue;
      const std::string path = directory.PathOf(name);
      OFFLOAD_ASSIGN_OR_RETURN(const std::optional<MemberPage> page,
                               ReadMemberPage(file.get(), path));
      const std::string what =
          absl::StrCat(path, " is a member of a store whose file is not in ", pools.front());
      if (page) return Differs(what, *page);
      return MakeError(ErrorId::kPoolsDiffer, what);
    }
  }
  return absl::OkStatus();
}

bool RemoveLeftoverMembers(std::string_view job, std::string_view main_building_name,
                           const MemberPage& main_page) {
  const std::vector<std::string> pools = PathsOf(main_page);
  bool reached_all = true;
  for (uint32_t index = 1; index < pools.size(); ++index) {
    const absl::Status status =
        RemoveLeftoverMember(pools[index], job, index, main_building_name, main_page.uuid);
    if (status.ok()) continue;
    spdlog::warn("what a format left in {} cannot be removed: {}", pools[index],
                 ToStd(status.message()));
    reached_all = false;
  }
  return reached_all;
}

absl::Status RemoveMembers(std::string_view job, const MemberPage& main_page) {
  const std::vector<std::string> pools = PathsOf(main_page);
  for (uint32_t index = 1; index < pools.size(); ++index) {
    const absl::StatusOr<PoolDirectory> directory = PoolDirectory::Open(pools[index]);
    if (!directory.ok()) {
      return Differs(absl::StrCat("pool ", pools[index], ": ", directory.status().message()),
                     main_page);
    }
    const std::string name = MemberFileName(job, index);
    OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd file, OpenOwn(*directory, name, main_page.uuid));
    if (!file.valid()) continue;
    OFFLOAD_RETURN_IF_ERROR(LockWithin(file.get(), /*timeout_seconds=*/0, directory->PathOf(name)));
    OFFLOAD_RETURN_IF_ERROR(Unlink(*directory, name));
    OFFLOAD_RETURN_IF_ERROR(directory->Sync());
  }
  return absl::OkStatus();
}

absl::Status FindMembers(std::string_view job, const MemberPage& main_page) {
  const std::vector<std::string> pools = PathsOf(main_page);
  for (uint32_t index = 1; index < pools.size(); ++index) {
    const absl::StatusOr<PoolDirectory> directory = PoolDirectory::Open(pools[index]);
    if (!directory.ok())
      return Differs(absl::StrCat("pool ", pools[index], " is not there"), main_page);
    const std::string name = MemberFileName(job, index);
    OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd file, OpenOwn(*directory, name, main_page.uuid));
    if (!file.valid()) {
      return Differs(absl::StrCat("pool ", pools[index], " does not hold this store's ", name),
                     main_page);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<aio::Device>> OpenStripedDevice(
    const MemberPage& page, const std::vector<std::string>& pools, std::vector<UniqueFd> files,
    const aio::OpenOptions& io) {
  std::vector<StripeMember> members;
  for (UniqueFd& file : files) {
    OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<aio::Device> device,
                             aio::OpenDevice(file.release(), io));
    members.push_back({std::move(device), pools[members.size()], kMemberHeadBytes});
  }
  OFFLOAD_ASSIGN_OR_RETURN(StripeMap map, StripeMap::Make(NumbersOf(page)));
  return StripedDevice::Make(std::move(members), std::move(map), page.store_bytes);
}

}  // namespace offload::swap

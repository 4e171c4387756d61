// swap/member_files.h
//
// The files of a store over several pools that already exist. Member 0 is the store's own file,
// JOB.offload in the first pool; member m is JOB.offload.member-m in pool m. Internal to swap/.
//
// The main file is the only one whose name says that there is a store: members get their names
// before it, and lose them before it does. What a killed format left is found through the main
// file's leftover, which names the pools; a member alone is never removed, because its first pool
// may just not be mounted.
//
// Thread safety: none.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "swap/member_page.h"
#include "swap/pool_directory.h"
#include "swap/store.h"

namespace offload::swap {

// "JOB.offload.member-1".
std::string MemberFileName(std::string_view job, uint32_t member);
// ".JOB.offload.member-1.building-<digits>", with the digits of the main file's building name.
std::string MemberBuildingName(std::string_view job, uint32_t member,
                               std::string_view main_building_name);
// The pools as messages list them: "/nvme0,/nvme1".
std::string JoinPools(const std::vector<std::string>& pools);

// The newer intact copy; nothing when the file has none, so is none of several. OFD-1206.
absl::StatusOr<std::optional<MemberPage>> ReadMemberPage(int fd, const std::string& path);
// Writes both copies, with the next revision, each durable before the next is touched.
absl::Status WriteMemberPage(int fd, const std::string& path, MemberPage* page);

struct MemberFile {
  PoolDirectory directory;
  std::string path;
  UniqueFd fd;
  MemberPage page{};
};

// Opens, judges, locks and makes durable members 1, 2, … of the store whose main page is given;
// OFD-1212 when one is missing, of another store, another place or another age; OFD-1207 when one
// is too short.
absl::StatusOr<std::vector<MemberFile>> OpenMembers(const std::vector<std::string>& pools,
                                                    const std::string& job,
                                                    const MemberPage& main_page,
                                                    const StoreOptions& options);
// Counts an opening in all members, so that copies of before do not fit any more.
absl::Status RaiseAge(int main_fd, const std::string& main_path, MemberPage* main_page,
                      std::vector<MemberFile>* members);

// A store in one pool while several are named, or the other way round: OFD-1212. Also when the
// first pool has no store but one of them has a member of it.
absl::Status CheckPoolsOf(const std::vector<std::string>& pools, const std::string& job,
                          const std::optional<MemberPage>& main_page);
absl::Status CheckNoStrayMembers(const std::vector<std::string>& pools, const std::string& job);

// Removes what a killed format left in other pools; false when one of them could not be reached.
bool RemoveLeftoverMembers(std::string_view job, std::string_view main_building_name,
                           const MemberPage& main_page);
// Removes the members of a store that is locked. OFD-1212 when a pool is not there, OFD-1205.
absl::Status RemoveMembers(std::string_view job, const MemberPage& main_page);
// OK when all members stand where the main page says, without a look at their locks.
absl::Status FindMembers(std::string_view job, const MemberPage& main_page);

// One device over the files of a store's members, in their order, which it closes. `page` is that
// of any of them.
absl::StatusOr<std::unique_ptr<aio::Device>> OpenStripedDevice(
    const MemberPage& page, const std::vector<std::string>& pools, std::vector<UniqueFd> files,
    const aio::OpenOptions& io);

}  // namespace offload::swap

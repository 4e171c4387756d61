// swap/building_members.h
//
// The files of a store over several pools while it is formatted: measures the pools, decides the
// stripe map for good, reserves every member, and gives the members their names.
//
// A kill at any moment leaves a main file under its building name, from which the next start finds
// and removes everything else; or a whole store. An error leaves nothing, or, where a member cannot
// be removed, the main file for the next start.
//
// Internal to swap/. Thread safety: none.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device.h"
#include "swap/building_file.h"
#include "swap/member_page.h"
#include "swap/named_files.h"
#include "swap/store.h"

namespace offload::swap {

class BuildingMembers {
 public:
  struct Plan {
    std::vector<std::string> pools;  // two or more
    std::string job;
    StoreUuid uuid;
    uint64_t head_bytes;   // that lie on member 0
    uint64_t store_bytes;  // of the whole store
  };

  // `main_file` is member 0's, locked, under its building name, in the first pool, and outlives the
  // object. Reserves all members, that one too. OFD-1204 names the pool that is too small.
  static absl::StatusOr<std::unique_ptr<BuildingMembers>> Make(const Plan& plan,
                                                               const PoolDirectory& main_directory,
                                                               BuildingFile* main_file,
                                                               const StoreOptions& options);
  ~BuildingMembers();

  // One device over all members; takes over their descriptors and with them the locks.
  absl::StatusOr<std::unique_ptr<aio::Device>> Compose(UniqueFd main, const StoreOptions& options);
  // Adds all members but 0 with the names that they are going to have.
  absl::Status NameIn(NamedFiles* files) const;
  // All members but 0, with their directories.
  absl::Status Sync() const;
  // Names all members but 0. They lose the names again with this object, until Keep().
  absl::Status Publish();
  void Keep();

 private:
  struct Member {
    explicit Member(PoolDirectory pool) : directory(std::move(pool)) {}
    PoolDirectory directory;
    std::unique_ptr<BuildingFile> file;
    int fd = -1;  // of `file`, or of the device that has taken it over
    std::string path;
  };

  BuildingMembers(Plan plan, BuildingFile* main_file)
      : plan_(std::move(plan)), main_file_(main_file) {}
  absl::Status WriteFirstPage(const PoolDirectory& directory, const BuildingFile& main);
  absl::Status MakeFiles(const BuildingFile& main);
  absl::StatusOr<std::vector<uint32_t>> Measure(const PoolDirectory& main_directory, int main_fd,
                                                const StoreOptions& options) const;
  absl::Status Reserve(const PoolDirectory& main_directory, int main_fd);
  absl::Status WritePages(const std::string& main_path, int main_fd);

  Plan plan_;
  BuildingFile* const main_file_;
  MemberPage page_{};
  std::deque<Member> members_;  // 1, 2, …; stays where it is: files know their directories
};

}  // namespace offload::swap

// offloadd/membership.h
//
// Which ranks make up a job: pure. Every rank says where it stands in its launch and what it wants
// of the job; the first one decides, the others must want the same.
//
// Invariants
//   * A number is one process's.
//   * Whoever was refused is no member: the others go on waiting.
//
// Thread safety: none; one owner.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/offload.pb.h"

namespace offload::daemon {

// Where the sender of the request stands; alone when it does not say. OFD-1002 for a world that
// cannot be: of no ranks or too many, without this one, of several nodes, without a launch.
absl::StatusOr<proto::v1::World> WorldOf(const proto::v1::OpenJobRequest& request);

// "rank 2", "ranks 0, 3 and 4".
std::string NameRanks(const std::vector<uint32_t>& ranks);

class Membership {
 public:
  // OFD-1805 naming the first difference to the rank that came first, or both processes that claim
  // the same number.
  absl::Status Add(const proto::v1::World& world, const proto::v1::OpenJobRequest& request,
                   pid_t pid);

  // 0 before anybody is there.
  uint32_t world_size() const { return static_cast<uint32_t>(pids_.size()); }
  // Of all ranks alike.
  bool gradients_reduced() const { return first_.has_value() && first_->world.gradients_reduced(); }
  bool gradient_sum() const { return first_.has_value() && first_->world.gradient_sum(); }
  bool IsComplete() const;
  std::vector<uint32_t> Missing() const;
  // "ranks 2 and 3 of 4".
  std::string DescribeMissing() const;

 private:
  struct Terms {
    proto::v1::World world;
    proto::v1::OpenJobRequest request;
  };
  std::optional<Terms> first_;              // of the rank that came first
  std::vector<std::optional<pid_t>> pids_;  // by number
};

}  // namespace offload::daemon

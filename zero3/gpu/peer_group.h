// zero3/gpu/peer_group.h
//
// The ranks of a node whose devices reach each other: what they agree on, their connection, and
// whether all of them are still there.
//
// Thread safety: all methods may be called from any thread; joining once, by all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "accelerator/peers.h"
#include "base/named_memory.h"
#include "zero3/gpu/gather_agreement.h"
#include "zero3/gpu/peer_watch.h"

namespace offload::zero3 {

class PeerGroup {
 public:
  // Gives every rank what every rank says, any bytes; collective.
  using Exchange = std::function<absl::StatusOr<std::vector<std::string>>(const std::string&)>;
  struct Joined {
    std::unique_ptr<PeerGroup> group;  // null: each rank copies for itself
    std::string why_not;               // the same in all ranks
  };
  struct Rank {
    uint32_t rank = 0, world_size = 1;
    bool takes_part = true;  // otherwise no rank does
    bool asks = true;        // whether its device reaches the others'; else it is taken as given
  };

  // Collective: all ranks get a group, or none does. Fails when the exchange does.
  static absl::StatusOr<Joined> Join(accelerator::Accelerator* accelerator, size_t tensor_count,
                                     const Rank& self, const Exchange& exchange);

  // What a rank without a device calls meanwhile: then no rank has a group.
  static absl::Status StayOut(const Exchange& exchange);

  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  GatherAgreement& agreement() { return *agreement_; }
  accelerator::Collectives& collectives() { return *collectives_; }

  // Why gathers can no longer be relied on: OFD-1803 names the rank that is gone or has failed,
  // OFD-2004 for the connection itself. Never waits.
  absl::Status Health();

 private:
  PeerGroup() = default;

  uint32_t rank_ = 0, world_size_ = 1;
  NamedMemory memory_;
  std::optional<GatherAgreement> agreement_;
  PeerWatch watch_;
  std::vector<int> pids_;  // by rank
  std::unique_ptr<accelerator::Collectives> collectives_;
};

}  // namespace offload::zero3

// offloadd/rank.h
//
// One process of a job: its number, its region, its rings, and what was said to it. What ranks
// share is their job's.
//
//   kJoined → kMapped → kLeft (it has closed the job) or kLost
//
// Invariants
//   * A rank's memory stays where it is until the job is drained: the store may be reading it after
//   the process is gone.
//   * What a rank submitted is answered in its own ring, or not at all once it has none.
//
// Thread safety: the job's loop only; but MakeRegion() may run off it, before anybody else asks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "offloadd/machine.h"
#include "proto/daemon_rings.h"
#include "proto/offload.pb.h"
#include "proto/shared_memory.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "proto/step_words.h"

namespace offload::daemon {

// Of the region before there is a plan.
inline constexpr uint64_t kOpenRegionBytes = proto::kRegionFixedBytes + proto::kLoadingStagingBytes;

class Rank {
 public:
  // How a session stands to its job.
  struct Member {
    uint64_t session = 0;
    pid_t pid = 0;
    uint32_t number = 0;                // among the ranks of the job
    std::function<void()> end_session;  // the rank has broken the protocol; any thread
  };

  enum class State : uint8_t { kJoined, kMapped, kLeft, kLost };
  using Done = std::function<void(absl::Status)>;
  using OpenDone = std::function<void(absl::StatusOr<proto::v1::OpenJobReply>)>;
  using StepDone = std::function<void(absl::StatusOr<uint64_t> durable_step)>;
  using ExchangeDone = std::function<void(absl::StatusOr<std::vector<std::string>>)>;

  // Calls that wait for other ranks; empty when there is none.
  struct Calls {
    OpenDone open;
    double open_since_seconds = 0;
    Done seal;
    Done publish;
    StepDone step;
    ExchangeDone exchange;
  };

  explicit Rank(Member member) : member_(std::move(member)) {}
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  uint32_t number() const { return member_.number; }
  uint64_t session() const { return member_.session; }
  pid_t pid() const { return member_.pid; }

  State state = State::kJoined;
  bool is_open = false;      // OpenJob has been answered
  bool is_connected = true;  // its session has not ended
  Calls calls;
  // True while the others may count on it.
  bool is_here() const { return state == State::kJoined || state == State::kMapped; }

  // What it said, kept until all have said it.
  std::vector<proto::Tensor> declared;
  std::vector<proto::v1::SealRequest> plan;
  std::string exchanged;
  uint64_t exchange_number = 0;
  std::optional<std::string> trainer_state;  // with a step that is not recorded yet
  uint64_t step = 0;                         // the last one that it has called for

  // `address_bytes` of address space, of which kOpenRegionBytes have pages.
  absl::Status MakeRegion(Machine& machine, uint64_t address_bytes, const Placement& placement);
  proto::SharedMemory& region() { return region_; }
  const proto::SharedMemory& region() const { return region_; }

  // The rank has mapped its memories: its rings are read from now on.
  void AttachRings(proto::Doorbell doorbell) {
    rings_.emplace(region_.data(), std::move(doorbell));
  }
  void DetachRings() { rings_.reset(); }
  // Null before the rank has mapped its memory and after it is gone.
  proto::DaemonRings* rings() { return rings_.has_value() ? &*rings_ : nullptr; }
  // Where it is in its schedule; 0 without rings.
  uint32_t position() const { return rings_.has_value() ? rings_->schedule_position() : 0; }

  // What it says of its time; nothing without rings.
  proto::StepSums sums() const {
    return rings_.has_value() ? proto::ReadStepWords(rings_->step_words()) : proto::StepSums();
  }

  void Complete(uint64_t tag, const absl::Status& status, uint64_t value);
  // Empty when the operation did not fail, or long ago.
  std::string ExplainFailure(uint64_t tag) const;

  // It broke the protocol: its session is told to end.
  void EndSession() const { member_.end_session(); }

 private:
  Member member_;
  proto::SharedMemory region_;
  std::optional<proto::DaemonRings> rings_;
  std::deque<std::pair<uint64_t, std::string>> failure_texts_;
};

}  // namespace offload::daemon

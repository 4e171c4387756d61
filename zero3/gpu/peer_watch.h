// zero3/gpu/peer_watch.h
//
// Notices when processes of other ranks end, also where nobody has waited for them yet.
//
// Thread safety: Ended() from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace offload::zero3 {

class PeerWatch {
 public:
  // `pids`: of all ranks, in their order. Fails where a process cannot be watched: it has ended, is
  // of another PID namespace, or the kernel cannot do it.
  static absl::StatusOr<PeerWatch> Open(std::span<const int> pids);

  // Ranks whose processes have ended. Never waits.
  std::vector<uint32_t> Ended() const;

 private:
  std::vector<UniqueFd> processes_;  // by rank
};

}  // namespace offload::zero3

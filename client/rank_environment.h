// client/rank_environment.h
//
// Where this process stands among the ranks of its launch, as its launcher says in the environment:
// torchrun, Open MPI, MPICH and its relatives, Slurm; the first one whose variables are complete. A
// process without a launcher is a world of its own.
//
// Thread safety: pure functions over `lookup`.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace offload::client {

inline constexpr uint32_t kWorldSizeMax = 64;

struct World {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t local_rank = 0;  // on this node
  uint32_t local_world_size = 1;
  std::string run_id;    // tells launches apart; equal in all ranks of one
  std::string launcher;  // for messages
};

// The value of a variable; missing when it is not set.
using Lookup = std::function<std::optional<std::string>(const char* name)>;
Lookup EnvironmentOfProcess();

// `parent_pid`: what ranks have in common whose launcher says nothing else. OFD-1002 for values
// that are no numbers, and as CheckWorld().
absl::StatusOr<World> WorldFromEnvironment(const Lookup& lookup, pid_t parent_pid);

// OFD-1002 for a world of no ranks or too many, without this rank, or of several nodes.
absl::Status CheckWorld(const World& world);

}  // namespace offload::client

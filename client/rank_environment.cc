#include "client/rank_environment.h"

#include <cstdlib>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::client {
namespace {

// Steps of Slurm that are no step of srun: batch scripts, interactive shells.
constexpr uint64_t kFirstSpecialStep = 4'294'967'280;

// The names of a launcher's numbers.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;  // null: LocalTasksOfSlurm
  std::string (*run_id)(const Lookup& lookup, pid_t parent_pid);
};

std::string Value(const Lookup& lookup, const char* name) { return lookup(name).value_or(""); }

// torchrun calls every launch "none" that was given no id; the folder of its logs is its own.
std::string RunIdOfTorchrun(const Lookup& lookup, pid_t) {
  const std::string error_file = Value(lookup, "TORCHELASTIC_ERROR_FILE");
  return absl::StrCat(Value(lookup, "TORCHELASTIC_RUN_ID"), ".",
                      Value(lookup, "TORCHELASTIC_RESTART_COUNT"), ".",
                      Value(lookup, "MASTER_ADDR"), ".", Value(lookup, "MASTER_PORT"), ".",
                      error_file.substr(0, error_file.find("/attempt_")));
}

std::string RunIdOfOpenMpi(const Lookup& lookup, pid_t parent_pid) {
  const std::string name = Value(lookup, "PMIX_NAMESPACE");
  return absl::StrCat("openmpi.", name.empty() ? absl::StrCat(parent_pid) : name);
}

// Its variables name the process, or a descriptor: the proxy that starts all ranks of a node is
// what they have in common.
std::string RunIdOfMpich(const Lookup& lookup, pid_t parent_pid) {
  const std::string port = Value(lookup, "PMI_PORT");
  return absl::StrCat("mpich.", port.empty() ? absl::StrCat(parent_pid) : port);
}

std::string RunIdOfSlurm(const Lookup& lookup, pid_t) {
  return absl::StrCat("slurm.", Value(lookup, "SLURM_JOB_ID"), ".", Value(lookup, "SLURM_STEP_ID"),
                      ".", Value(lookup, "SLURM_RESTART_COUNT"));
}

constexpr Launcher kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", RunIdOfTorchrun},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", RunIdOfOpenMpi},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", RunIdOfMpich},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, RunIdOfSlurm},
};

absl::StatusOr<uint32_t> Number(const std::string& name, const std::string& text) {
  uint32_t number = 0;
  if (absl::SimpleAtoi(text, &number)) return number;
  return MakeError(ErrorId::kBadValue, absl::StrCat(name, " is \"", text, "\""),
                   "Let the launcher set it, or set it to a number");
}

// "4" on one node; "2(x3),1" on several: those of the first.
std::optional<std::string> LocalTasksOfSlurm(const Lookup& lookup) {
  std::optional<std::string> tasks = lookup("SLURM_STEP_TASKS_PER_NODE");
  if (!tasks.has_value()) tasks = lookup("SLURM_TASKS_PER_NODE");
  if (tasks.has_value()) tasks->resize(std::min(tasks->size(), tasks->find_first_of("(,")));
  return tasks;
}

// A batch script or an interactive shell has most of the variables, and is no rank.
bool IsStepOfSrun(const Lookup& lookup) {
  uint64_t step = 0;
  return absl::SimpleAtoi(Value(lookup, "SLURM_STEP_ID"), &step) && step < kFirstSpecialStep;
}

// Missing when the launcher is not the one of this process.
absl::StatusOr<std::optional<World>> WorldOf(const Launcher& launcher, const Lookup& lookup,
                                             pid_t parent_pid) {
  const bool is_slurm = launcher.local_world_size == nullptr;
  if (is_slurm && !IsStepOfSrun(lookup)) return std::nullopt;
  const char* const local_name = is_slurm ? "SLURM_STEP_TASKS_PER_NODE" : launcher.local_world_size;
  const std::optional<std::string> rank = lookup(launcher.rank),
                                   world_size = lookup(launcher.world_size),
                                   local_rank = lookup(launcher.local_rank),
                                   local_world_size =
                                       is_slurm ? LocalTasksOfSlurm(lookup) : lookup(local_name);
  if (!rank.has_value() || !world_size.has_value() || !local_rank.has_value() ||
      !local_world_size.has_value())
    return std::nullopt;
  World world{.launcher = launcher.name};
  OFFLOAD_ASSIGN_OR_RETURN(world.rank, Number(launcher.rank, *rank));
  OFFLOAD_ASSIGN_OR_RETURN(world.world_size, Number(launcher.world_size, *world_size));
  OFFLOAD_ASSIGN_OR_RETURN(world.local_rank, Number(launcher.local_rank, *local_rank));
  OFFLOAD_ASSIGN_OR_RETURN(world.local_world_size, Number(local_name, *local_world_size));
  world.run_id = launcher.run_id(lookup, parent_pid);
  return world;
}

// Whether a rank of several, of this launcher, is what the process may be.
bool MayBeRank(const Launcher& launcher, const Lookup& lookup) {
  if (launcher.local_world_size != nullptr || IsStepOfSrun(lookup)) return true;
  if (lookup("SLURM_STEP_ID").has_value()) return false;  // a special step
  // The first rank may be a batch script, which knows its job.
  return Value(lookup, launcher.rank) != "0" || !lookup("SLURM_JOB_ID").has_value();
}

// Ranks that somebody has numbered by hand, a launcher that does not say how many of them are on
// this node, or variables of which a part got lost on the way (into a container): one of several
// that trained alone would be silently wrong.
absl::Status CheckNobodyNumbersRanks(const Lookup& lookup) {
  for (const Launcher& launcher : kLaunchers) {
    uint32_t world_size = 0;
    if (!lookup(launcher.rank).has_value() ||
        !absl::SimpleAtoi(Value(lookup, launcher.world_size), &world_size) || world_size < 2 ||
        !MayBeRank(launcher, lookup))
      continue;
    std::vector<std::string> missing;
    if (!lookup(launcher.local_rank).has_value()) missing.emplace_back(launcher.local_rank);
    if (launcher.local_world_size == nullptr) {
      if (!LocalTasksOfSlurm(lookup).has_value()) missing.emplace_back("SLURM_STEP_TASKS_PER_NODE");
      if (!lookup("SLURM_STEP_ID").has_value()) missing.emplace_back("SLURM_STEP_ID");
    } else if (!lookup(launcher.local_world_size).has_value()) {
      missing.emplace_back(launcher.local_world_size);
    }
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat(launcher.rank, " and ", launcher.world_size, " say that this is one of ",
                     world_size, " ranks, ", absl::StrJoin(missing, " and "),
                     missing.size() == 1 ? " is" : " are", " not set"),
        absl::StrCat("Start the ranks with torchrun, set RANK, WORLD_SIZE, LOCAL_RANK and "
                     "LOCAL_WORLD_SIZE, or, to train alone, unset ",
                     launcher.rank));
  }
  return absl::OkStatus();
}

absl::Status BadWorld(const World& world, const std::string& what, const std::string& way_out) {
  const std::string said = world.launcher.empty() ? "" : absl::StrCat(world.launcher, " says ");
  return MakeError(ErrorId::kBadValue, absl::StrCat(said, what), way_out);
}

}  // namespace

Lookup EnvironmentOfProcess() {
  return [](const char* name) -> std::optional<std::string> {
    const char* const value = std::getenv(name);
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

absl::StatusOr<World> WorldFromEnvironment(const Lookup& lookup, pid_t parent_pid) {
  for (const Launcher& launcher : kLaunchers) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::optional<World> world,
                             WorldOf(launcher, lookup, parent_pid));
    if (!world.has_value()) continue;
    OFFLOAD_RETURN_IF_ERROR(CheckWorld(*world));
    return *world;
  }
  OFFLOAD_RETURN_IF_ERROR(CheckNobodyNumbersRanks(lookup));
  return World();
}

absl::Status CheckWorld(const World& world) {
  const std::string size = absl::StrCat("a world of ", world.world_size, " ranks");
  if (world.world_size == 0 || world.world_size > kWorldSizeMax) {
    return BadWorld(world, size, absl::StrCat("Start between 1 and ", kWorldSizeMax, " ranks"));
  }
  if (world.rank >= world.world_size) {
    return BadWorld(world, absl::StrCat("rank ", world.rank, " in ", size),
                    "Ranks are counted from 0: correct the rank or the size of the world");
  }
  if (world.local_world_size != world.world_size) {
    return BadWorld(world,
                    absl::StrCat(size, ", ", world.local_world_size, " of them on this node"),
                    "Start all ranks on one node: several nodes are not supported yet");
  }
  return absl::OkStatus();
}

}  // namespace offload::client

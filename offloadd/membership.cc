#include "offloadd/membership.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "offloadd/limits.h"

namespace offload::daemon {
namespace {

using proto::v1::OpenJobRequest;
using proto::v1::World;

// What all ranks must want, in the words of who sets it.
struct Term {
  const char* name;
  std::string (*value)(const World& world, const OpenJobRequest& request);
};

std::string OrDefault(const std::string& text) { return text.empty() ? "the default" : text; }
std::string Truth(bool value) { return value ? "true" : "false"; }

const Term kTerms[] = {
    {"world size", [](auto& world, auto&) { return absl::StrCat(world.world_size()); }},
    {"library version", [](auto& world, auto&) { return world.library_version(); }},
    {"ram", [](auto&, auto& request) { return absl::StrCat(request.ram_bytes(), " bytes"); }},
    {"pool", [](auto&, auto& request) { return OrDefault(request.pool()); }},
    {"io_engine", [](auto&, auto& request) { return OrDefault(request.io_engine()); }},
    {"durability", [](auto&, auto& request) { return OrDefault(request.durability()); }},
    {"update_in_backward",
     [](auto&, auto& request) { return OrDefault(request.update_in_backward()); }},
    {"update_threads", [](auto&, auto& request) { return absl::StrCat(request.update_threads()); }},
    {"generations", [](auto&, auto& request) { return absl::StrCat(request.generations()); }},
    {"gradient sum", [](auto& world, auto&) { return Truth(world.gradient_sum()); }},
    {"gradients reduced by the trainer",
     [](auto& world, auto&) { return Truth(world.gradients_reduced()); }},
};

absl::Status BadWorld(const std::string& what, const std::string& way_out) {
  return MakeError(ErrorId::kBadValue, what, way_out);
}

}  // namespace

absl::StatusOr<World> WorldOf(const OpenJobRequest& request) {
  World world = request.world();
  if (!request.has_world()) {
    world.set_world_size(1);
    world.set_local_world_size(1);
    return world;
  }
  const std::string said = absl::StrCat("a world of ", world.world_size(), " ranks");
  if (world.world_size() == 0 || world.world_size() > kLimits.ranks_max) {
    return BadWorld(said, absl::StrCat("Start between 1 and ", kLimits.ranks_max, " ranks"));
  }
  if (world.rank() >= world.world_size()) {
    return BadWorld(absl::StrCat("rank ", world.rank(), " in ", said),
                    "Ranks are counted from 0: correct RANK or WORLD_SIZE");
  }
  if (world.world_size() == 1) return world;
  if (world.local_world_size() != world.world_size()) {
    return BadWorld(absl::StrCat(said, ", ", world.local_world_size(), " of them on this node"),
                    "Start all ranks on one node: several nodes are not supported yet");
  }
  if (world.run_id().empty()) {
    return BadWorld(absl::StrCat(said, " of a launch without an id"),
                    "Start the ranks with torchrun, mpirun or srun, or give them a common run id");
  }
  return world;
}

std::string NameRanks(const std::vector<uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    absl::StrAppend(&text, ranks[i]);
  }
  return text;
}

absl::Status Membership::Add(const World& world, const OpenJobRequest& request, pid_t pid) {
  if (!first_.has_value()) {
    first_ = Terms{world, request};
    pids_.resize(world.world_size());
  }
  for (const Term& term : kTerms) {
    const std::string wanted = term.value(first_->world, first_->request);
    const std::string other = term.value(world, request);
    if (wanted == other) continue;
    return MakeError(ErrorId::kRanksDiffer,
                     absl::StrCat(term.name, " is ", wanted, " in rank ", first_->world.rank(),
                                  " and ", other, " in rank ", world.rank()));
  }
  std::optional<pid_t>& member = pids_[world.rank()];
  if (member.has_value()) {
    return MakeError(ErrorId::kRanksDiffer,
                     absl::StrCat("processes ", *member, " and ", pid, " both are rank ",
                                  world.rank(), " of ", world_size()),
                     "Give every process a RANK of its own");
  }
  member = pid;
  return absl::OkStatus();
}

bool Membership::IsComplete() const { return !pids_.empty() && Missing().empty(); }

std::vector<uint32_t> Membership::Missing() const {
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < pids_.size(); ++rank) {
    if (!pids_[rank].has_value()) missing.push_back(rank);
  }
  return missing;
}

std::string Membership::DescribeMissing() const {
  return absl::StrCat(NameRanks(Missing()), " of ", world_size());
}

}  // namespace offload::daemon

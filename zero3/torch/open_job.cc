#include "zero3/torch/open_job.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/slab_layout.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// Throws OFD-1002 for less than `least`.
uint32_t AtLeast(int least, const char* name, int value) {
  if (value >= least) return static_cast<uint32_t>(value);
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat(name, " is ", value),
                        absl::StrCat("Set it to ", least, " or more, or leave it out")));
}

// Without the number of ranks the others would count for nothing, and each rank would train alone.
void CheckNamesNoRank(const Options& options) {
  const auto refuse = [](const char* name, int value) {
    ThrowStatus(MakeError(ErrorId::kBadValue,
                          absl::StrCat(name, " is ", value, ", and world_size is not set"),
                          "Set rank and world_size both, or leave them to the launcher"));
  };
  if (options.rank != -1) refuse("rank", options.rank);
  if (options.local_rank != -1) refuse("local_rank", options.local_rank);
  if (options.local_world_size != 0) refuse("local_world_size", options.local_world_size);
}

}  // namespace

client::World WorldOf(const Options& options) {
  const absl::StatusOr<client::World> launched =
      client::WorldFromEnvironment(client::EnvironmentOfProcess(), ::getppid());
  client::World world = launched.value_or(client::World());
  if (options.world_size == 0) {
    CheckNamesNoRank(options);
    ThrowIfError(launched.status());
  } else {
    world.world_size = AtLeast(1, "world_size", options.world_size);
    world.rank = AtLeast(0, "rank", options.rank);
    world.local_rank =
        options.local_rank == -1 ? world.rank : AtLeast(0, "local_rank", options.local_rank);
    world.local_world_size = options.local_world_size == 0
                                 ? world.world_size
                                 : AtLeast(1, "local_world_size", options.local_world_size);
    world.launcher = "options";
  }
  if (options.run_id != "auto") world.run_id = options.run_id;
  ThrowIfError(client::CheckWorld(world));
  return world;
}

OpenedJob OpenJob(const Options& options, const client::World& world, uint64_t ram_bytes) {
  client::ConnectOptions connect;
  connect.world = world;
  OpenedJob opened{.session = ValueOrThrow(client::Session::Connect(connect)), .info = {}};
  client::JobOptions job;
  job.world = world;
  job.gradient_sum = !options.gradient_average;
  job.gradients_reduced = ReducesGradients(options);
  job.job = options.job;
  job.pool = options.nvme_path;
  // With less than that not even a plan can be made; it says what the model needs, and refuses.
  job.ram_bytes = std::max(ram_bytes, proto::OpenBytes(world.world_size));
  job.io_engine = options.io;
  job.durability = options.durability;
  job.update_in_backward = options.update_in_backward;
  job.generations = AtLeast(0, "generations", options.generations);
  job.update_threads = AtLeast(0, "update_threads", options.update_threads);
  opened.info = ValueOrThrow(opened.session->OpenJob(job));
  return opened;
}

}  // namespace offload::zero3

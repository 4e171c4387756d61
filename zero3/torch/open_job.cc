#include "zero3/torch/open_job.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "proto/slab_layout.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

client::World WorldOf(const Options& options) {
  const absl::StatusOr<client::World> launched =
      client::WorldFromEnvironment(client::EnvironmentOfProcess(), ::getppid());
  client::World world = launched.value_or(client::World());
  if (options.world_size == 0) {
    ThrowIfError(launched.status());
  } else {
    const auto given = [](int value, int otherwise, int none) {
      return static_cast<uint32_t>(value == none ? otherwise : value);
    };
    world.rank = static_cast<uint32_t>(options.rank);
    world.world_size = static_cast<uint32_t>(options.world_size);
    world.local_rank = given(options.local_rank, options.rank, -1);
    world.local_world_size = given(options.local_world_size, options.world_size, 0);
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
  job.generations = static_cast<uint32_t>(std::max(options.generations, 0));
  job.update_threads = static_cast<uint32_t>(std::max(options.update_threads, 0));
  opened.info = ValueOrThrow(opened.session->OpenJob(job));
  return opened;
}

}  // namespace offload::zero3

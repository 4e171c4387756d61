// zero3/torch/open_job.h
//
// From options to a job that is open at the daemon: where the process stands among the ranks, the
// daemon, the job.
//
// Thread safety: one thread at a time.
#pragma once

#include <offload/torch.h>

#include <cstdint>
#include <memory>

#include "client/rank_environment.h"
#include "client/session.h"

namespace offload::zero3 {

// What the options say, else the launcher. Throws OFD-1002.
client::World WorldOf(const Options& options);

struct OpenedJob {
  std::unique_ptr<client::Session> session;
  client::JobInfo info;
};
// Connects to the node's daemon or starts a private one. Throws what the daemon says.
OpenedJob OpenJob(const Options& options, const client::World& world, uint64_t ram_bytes);

}  // namespace offload::zero3

// client/session.h
//
// A rank's connection to the node's daemon: control calls, the mapped slab and region, and the
// rings. Knows nothing of torch.
//
// Invariants
//   * A tensor that Acquire() returned stays where it is until Release(): the pin word is held from
//   before the first look.
//   * Every submitted operation is answered exactly once; when the daemon is gone, with OFD-1801,
//   within a second.
//   * After a fork the child's session is dead (OFD-1802); the parent's goes on.
//
// Thread safety: Acquire, Release, Prefetch, Submit and Wait may be called from any thread; the
// rest from one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload::client {

struct ConnectOptions {
  // Tried in order: OFFLOADD_SOCKET, $XDG_RUNTIME_DIR/offloadd/offloadd.sock,
  // /run/offloadd/offloadd.sock; then a private daemon is started: OFFLOADD_BINARY, else `offloadd`
  // beside the running program or in ../offloadd, else on PATH.
  bool allow_private = true;
  bool only_private = false;
};

struct JobOptions {
  std::string job;
  std::string pool;  // a directory, or several over which the store is striped: "/nvme0,/nvme1"
  uint64_t ram_bytes = 0;
  std::string io_engine = "auto";
  uint32_t update_threads = 0;
  // "step": every step is committed. "checkpoint:N": those whose number is a multiple of N, and
  // what there is at WaitDurable and at the end; after a crash the job resumes at the last of them.
  std::string durability = "step";
  uint32_t generations = 0;  // spare ones that a new store is formatted with, for snapshots
};
struct JobInfo {
  bool exists = false;
  uint64_t step = 0;
  std::string trainer_state;
  uint64_t slab_bytes = 0, region_bytes = 0;
  std::string io_engine;
};

// The optimizer of tensors that share its parameters.
using Group = kernels::OptimizerSpec;
struct TensorUpdate {
  uint32_t tensor = 0;
  uint32_t group = 0;
  uint64_t update_count = 1;    // of this tensor, 1 at its first update
  float gradient_scale = 1.0f;  // multiplies the gradient first
};
struct StepCommand {
  uint64_t step = 0;
  std::vector<Group> groups;
  std::vector<TensorUpdate> updates;  // tensors that have a gradient, in any order
  bool has_trainer_state = false;
  std::string trainer_state;
};

using Ticket = uint64_t;  // never 0

class Session {
 public:
  // OFD-1501, 1502, 1504.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(const ConnectOptions& options);
  ~Session();  // closes; a private daemon drains and ends
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  absl::StatusOr<JobInfo> OpenJob(const JobOptions& options);  // and maps slab and region
  absl::Status DeclareTensors(std::span<const proto::Tensor> tensors);
  absl::Status ReserveScratch(uint64_t bytes);
  absl::Status Seal(const kernels::OptimizerSpec& optimizer, const proto::MemoryPlan& plan,
                    uint64_t pins_offset,
                    const std::function<void(uint64_t formatted, uint64_t total)>& progress);
  absl::Status Publish(const std::string& trainer_state);
  absl::Status SetSchedule(std::span<const uint32_t> tensors);
  absl::Status Step(const StepCommand& command);
  absl::StatusOr<uint64_t> WaitDurable();
  absl::Status CloseJob();

  // Pins a tensor and blocks until it is resident and up to date; the pointer is into the slab
  // (read-only) and good until as many Release() as Acquire(). Resident tensors cost no message.
  // Requires Seal. Errors: OFD-1801, 1303, or what failed the job.
  absl::StatusOr<const std::byte*> Acquire(uint32_t tensor);
  void Release(uint32_t tensor);
  // Asks for a tensor that will be needed; never blocks, never fails. False when it is resident or
  // the ring has no room.
  bool Prefetch(uint32_t tensor);
  proto::TensorState State(uint32_t tensor) const;
  void SetSchedulePosition(uint32_t position);

  // Transfers between the region and the daemon (proto/shm_abi.h); buffers stay untouched until the
  // ticket is waited for.
  Ticket Put(uint32_t tensor, uint64_t element_offset, uint64_t element_count,
             uint64_t region_offset);
  Ticket Get(uint32_t tensor, proto::Plane plane, uint64_t element_offset, uint64_t element_count,
             uint64_t region_offset);
  Ticket ScratchWrite(uint64_t scratch_offset, uint64_t length_bytes, uint64_t region_offset);
  Ticket ScratchRead(uint64_t scratch_offset, uint64_t length_bytes, uint64_t region_offset);
  // Blocks until it is done. Every ticket must be waited for exactly once.
  absl::Status Wait(Ticket ticket);

  std::byte* region() const;
  uint64_t region_bytes() const;
  const proto::SlabHeader& slab_header() const;
  int daemon_pid() const;
  bool daemon_is_private() const;
  // OK, or why nothing works any more.
  absl::Status health() const;
  double wait_seconds()
      const;  // that threads spent blocked in Acquire, Wait, Step and WaitDurable, in all

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace offload::client

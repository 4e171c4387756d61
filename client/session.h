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
// Thread safety: Acquire, Release, Prefetch, ReleaseGradient, Submit and Wait may be called from
// any thread; the rest from one thread at a time.
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
#include "client/rank_environment.h"
#include "kernels/optimizer.h"
#include "kernels/square_root.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload::client {

struct ConnectOptions {
  // Tried in order: OFFLOADD_SOCKET, $XDG_RUNTIME_DIR/offloadd/offloadd.sock,
  // /run/offloadd/offloadd.sock; then a private daemon is started: OFFLOADD_BINARY, else `offloadd`
  // beside the running program or in ../offloadd, else on PATH.
  bool allow_private = true;
  bool only_private = false;
  // Of several ranks, which share a private daemon: the first one starts it, the others find it.
  World world;
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
  // "auto": what the next step needs is read, and tensors that BeginStep() and ReleaseGradient()
  // name are updated, before the step is called for, as far as memory reaches. "never": nothing is.
  std::string update_in_backward = "auto";
  uint32_t generations = 0;  // spare ones that a new store is formatted with, for snapshots
  // Where this rank stands; what follows is for several ranks only. Nearly all calls wait until all
  // ranks have made them.
  World world;
  bool gradient_sum = false;       // parts are added as they are, not averaged
  bool gradients_reduced = false;  // by the trainer: every rank has the whole gradient
  // Says whom OpenJob() waits for; none: standard error.
  std::function<void(const std::string& text)> on_wait;
};
struct JobInfo {
  bool exists = false;
  uint64_t step = 0;
  std::string trainer_state;
  bool trainer_state_is_own = true;  // else the first rank's, of a run with fewer ranks
  uint64_t slab_bytes = 0, region_bytes = 0;
  std::string io_engine;
  uint32_t pipeline_blocks = 0;  // that a plan may use well (proto/depths.h)
  double write_cost = 0;         // of the pool, as measured (proto/depths.h)
  std::vector<bool> trainable;   // of a job that exists: which of its tensors are, in their order
};

// For a job that exists and gets other tensors than its store has.
struct OtherTensors {
  std::vector<std::string> stored_names;  // by tensor: what it is called there; empty: not there
  std::string trainer_state;              // of the last epoch, from then on
};

// The optimizer of tensors that share its parameters.
using Group = kernels::OptimizerSpec;
struct TensorUpdate {
  uint32_t tensor = 0;
  uint32_t group = 0;
  uint64_t update_count = 1;  // of this tensor, 1 at its first update
  double gradient_scale = 1;  // multiplies the gradient first
  // With several ranks, for a gradient that every rank has whole: where it is in the region, if the
  // trainer has written it instead of the sum, and the crc32c of its bytes.
  uint64_t own_gradient_offset = 0;
  uint32_t own_gradient_crc = 0;
};
struct StepCommand {
  uint64_t step = 0;
  std::vector<Group> groups;
  std::vector<TensorUpdate> updates;  // tensors that have a gradient, in any order
  bool has_trainer_state = false;
  std::string trainer_state;
  uint32_t passes = 0;  // with several ranks: backward passes that this one has made
  // The caller has what further tensors become with this step, and puts it before the next one that
  // is not partial, or before EndLoad(): nothing is committed in between. One rank, in an interval.
  bool is_partial = false;
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
  // A job that exists may have frozen tensors that are trainable now: its store is laid out anew,
  // and what the optimizer keeps of them is zeros. The other way round it is OFD-1602. With
  // `others`, and one rank, it is laid out anew for other tensors: those that have a stored name
  // keep what it has of them, the others are zeros, stored ones that no name stands for are gone.
  absl::Status Seal(const kernels::OptimizerSpec& optimizer, const proto::MemoryPlan& plan,
                    uint64_t pins_offset,
                    const std::function<void(uint64_t formatted, uint64_t total)>& progress,
                    const OtherTensors* others = nullptr);
  absl::Status Publish(const std::string& trainer_state);
  // Makes the puts since the last step durable, all or none, under the step that there is. Without
  // it they are durable with the next step, and dropped when the job ends before one. Every put is
  // waited for before.
  absl::Status EndLoad();
  absl::Status SetSchedule(std::span<const uint32_t> tensors);
  // Where in the region it is counted how long each tensor is in use (proto/step_words.h,
  // UseTimes), for people to see. Without it nobody counts. Requires Seal, before the first use.
  // OFD-1503 when the table would stand outside.
  absl::Status CountUses(uint64_t use_times_offset);
  // For optimizers whose TakesLibraryRoots() is true: those of the library that they follow. Once,
  // before the first step of one; without it they take the nearest roots.
  absl::Status SetSquareRoots(const kernels::SquareRoots& roots);
  // What the next Step() will probably say, once its backward has begun: updates of tensors that
  // ReleaseGradient() names may begin then. Binds nobody, changes nothing that anybody sees, and is
  // of use as far as the step says the same and gradients stay as they were released. For one rank
  // and gradients in the region. From any thread, one at a time.
  absl::Status BeginStep(const StepCommand& command);
  // The tensor's gradient is probably final. Never blocks, never fails; after BeginStep().
  void ReleaseGradient(uint32_t tensor);
  absl::Status Step(const StepCommand& command);
  // Returns, when every step that was recorded is committed, the last of them.
  absl::StatusOr<uint64_t> WaitDurable();
  // Has the last step that was recorded committed, whatever `durability` says, beside the steps
  // that follow; returns that step at once. WaitDurable() waits for it.
  absl::StatusOr<uint64_t> Checkpoint();
  // Gives every rank what every rank said, at most 1 MiB each, in the order of ranks. Returns when
  // all have called.
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& data);
  absl::Status CloseJob();
  const World& world() const;  // as OpenJob() was told

  // Pins a tensor and blocks until it is resident and up to date; the pointer is into the slab
  // (read-only) and good until as many Release() as Acquire(). Resident tensors cost no message.
  // Requires Seal. Errors: OFD-1801, 1303, or what failed the job.
  absl::StatusOr<const std::byte*> Acquire(uint32_t tensor);
  void Release(uint32_t tensor);
  // The same for a tensor that is resident and up to date now, else null. Never blocks.
  absl::StatusOr<const std::byte*> TryAcquire(uint32_t tensor);
  // Asks for a tensor that will be needed; never blocks, never fails. False when it is resident or
  // the ring has no room.
  bool Prefetch(uint32_t tensor);
  proto::TensorState State(uint32_t tensor) const;
  void SetSchedulePosition(uint32_t position);

  // Transfers between the region and the daemon (proto/shm_abi.h); buffers stay untouched until the
  // ticket is waited for.
  Ticket Put(uint32_t tensor, uint64_t element_offset, uint64_t element_count,
             uint64_t region_offset) {
    return PutPlane(tensor, proto::Plane::kWeight, element_offset, element_count, region_offset);
  }
  // Weights, or values of bf16 and fp16 masters or of a plane that the optimizer keeps: fp32, of an
  // fp64 tensor fp64.
  // `digest`, with several ranks: of the whole tensor, when it was made from the old one; 0 else.
  Ticket PutPlane(uint32_t tensor, proto::Plane plane, uint64_t element_offset,
                  uint64_t element_count, uint64_t region_offset, uint64_t digest = 0);
  // With several ranks: the first one ends the puts that overwrite a tensor with it; the others say
  // with it that they overwrite it, too, and read it no more. Theirs is done when the first's is.
  // Errors, of all that write the tensor: OFD-1606 when digests differ, 1805 when one of them will
  // not come to it.
  Ticket FollowPut(uint32_t tensor, uint64_t digest = 0);
  Ticket Get(uint32_t tensor, proto::Plane plane, uint64_t element_offset, uint64_t element_count,
             uint64_t region_offset);
  Ticket ScratchWrite(uint64_t scratch_offset, uint64_t length_bytes, uint64_t region_offset);
  Ticket ScratchRead(uint64_t scratch_offset, uint64_t length_bytes, uint64_t region_offset);

  // Gradients of several ranks (proto/DESIGN.md): the parts of a rank go to the daemon, which adds
  // them. Tickets are waited for as those of transfers; a part's buffer is free when it was added.
  //
  // `step` begins; this rank reads nothing of the sums of the step before any more.
  Ticket BeginGradients(uint64_t step);
  // Elements of a tensor's gradient of backward pass `pass` (from 0 in each step), in the dtype of
  // the tensor; offset and count as for Put().
  Ticket DeliverGradient(uint32_t tensor, uint32_t pass, proto::GradientStart start,
                         uint64_t element_offset, uint64_t element_count, uint64_t region_offset);
  // What was not delivered for the pass does not exist. With `wait` it is done when every other
  // rank has ended the pass, too, or makes it no more.
  Ticket EndPass(uint32_t pass, bool wait);
  // Blocks until no rank adds to the tensor's sum any more; its gradient word then. `passes`: how
  // many this rank has made in this step.
  absl::StatusOr<uint64_t> AwaitGradient(uint32_t tensor, uint32_t passes);
  // Tells the other ranks the norm of a sum that is final.
  Ticket PublishNorm(uint32_t tensor, float norm);
  // As the daemon wrote it last (proto/shm_abi.h); 0 with one rank. Requires Seal.
  uint64_t GradientWord(uint32_t tensor) const;

  // Blocks until it is done. Every ticket must be waited for exactly once.
  absl::Status Wait(Ticket ticket);
  // Whether it would not block.
  bool IsDone(Ticket ticket) const;

  const std::byte* slab() const;  // all of it, read-only; where sums are, SlabLayout says
  uint64_t slab_bytes() const;
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

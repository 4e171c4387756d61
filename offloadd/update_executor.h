// offloadd/update_executor.h
//
// Runs a step: every extent of every updated tensor is read, updated in one pass by a worker, and
// written to its other place; when all are written the epoch is committed, or, in an interval of
// steps that end in one checkpoint, left to be rewritten by the next step. Inside an interval, what
// stays in memory for good is not written at all before the commit (WriteBack). Runs ahead of the
// next forward and shares its reads: updated weights stay in the window.
//
// Between two steps, while ranks compute their backward, work for the next one begins: state that
// it needs is read into free blocks (ReadAhead), and where the step is announced, extents are
// updated beside the state that there is (UpdateAhead). The checkpoint that ends an interval is
// written and committed beside the steps that follow.
//
// Invariants
//   * At most one step is recorded and not written. A step begins after the commit of the one
//   before it, or after its last write inside an interval.
//   * At most one commit is under way. Until its end nothing is written but what belongs to it, and
//   planes that live in DRAM change only once they are written: beside a checkpoint only tensors
//   that stay in memory are updated, each after its last write.
//   * An extent is in one of: waiting for a buffer → reading → computing → writing → done; its
//   buffers are its own from start to end. What was read and does not have its checksum is read
//   again, with all that the update has changed before it knew, and computed anew.
//   * A tensor is resident for its ranks when its last extent is computed; its slot stays where it
//   is until its last write is done.
//   * A tensor whose update needs its norms is swept twice; the first sweep writes nothing.
//   * Nothing here waits for anything that waits for it: slots are taken before blocks, blocks come
//   back by themselves, and a tensor
//     that a rank waits for goes first and may evict whatever nobody uses.
//
// Thread safety: the loop's thread only; computations run on workers.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"
#include "offloadd/pipeline_blocks.h"
#include "offloadd/pipeline_exchange.h"
#include "offloadd/read_ahead.h"
#include "offloadd/resident_state.h"
#include "offloadd/step_plan.h"
#include "offloadd/update_ahead.h"
#include "offloadd/update_order.h"
#include "offloadd/weight_cache.h"
#include "offloadd/write_back.h"

namespace offload::daemon {

class UpdateExecutor {
 public:
  // `on_computed` runs when the updates of some tensors are computed and their gradients not needed
  // any more, `on_updated` when all of a step are, `on_written` when it is written and the next one
  // may begin before it is durable (inside intervals and at their ends), `on_committed` when it is.
  struct Events {
    std::function<void(std::span<const uint32_t> tensors)> on_computed;
    std::function<void(uint64_t step)> on_updated;
    std::function<void(uint64_t step)> on_written;
    std::function<void(uint64_t step)> on_committed;
  };
  UpdateExecutor(JobContext* context, WeightCache* cache, ResidentState* state, Events events);

  // False while another step is under way, or a commit that no step may begin beside.
  bool MayBegin() const {
    return !step_.has_value() && (!commit_.has_value() || context_->durability.has_intervals());
  }
  // Records a step. Requires MayBegin(). Its tensors are pending from here on, and what was put
  // before it is part of its epoch.
  void Begin(StepPlan plan);
  // Commits what HasUncommitted() means, without waiting for the end of the interval: together with
  // the step that is under way, else at once. Does nothing when there is nothing, or when the
  // commit that is under way holds it, or after a partial step.
  void CommitSoon();
  // True while a commit is under way; it holds all steps before the one that is.
  bool committing() const { return commit_.has_value(); }
  // True when a step is written, or puts are settled, that are not committed. Unsettled puts and
  // partial steps do not count, and while there are any nothing else does.
  bool HasUncommitted() const;

  // The step that ranks will probably call for, and which of its gradients are final (UpdateAhead).
  void Expect(StepPlan plan);
  void ReleaseGradient(uint32_t tensor) { update_ahead_.Release(tensor); }
  // Somebody is about to put values of the tensor: what was done ahead for it is forgotten. False
  // while something of it is under way.
  bool Forget(uint32_t store_tensor);

  // True from Begin() to the commit, or to the last write of a step inside an interval; and while a
  // commit is under way.
  bool busy() const { return step_.has_value() || commit_.has_value(); }
  // True when the tensor's update is not written yet.
  bool Updating(uint32_t store_tensor) const { return unfinished_.count(store_tensor) != 0; }
  // A rank or a transfer waits for this tensor.
  void Demand(uint32_t store_tensor);
  // How much may be under way at a time has changed; the number of blocks follows at the ends of
  // steps.
  void TakeDepths();
  // True when it has, and with it what stays in memory, since the last call.
  bool TakeExchanged() { return std::exchange(has_exchanged_, false); }
  // The schedule has changed.
  void Reorder();
  // Somebody waits for the whole step: do not wait for the forward.
  void Hurry() { hurry_ = true; }

  // Starts what can be started. True while it waits for room or for pins, which no message
  // announces.
  bool Turn();

  uint64_t buffer_bytes() const { return blocks_.bytes_in_use(); }
  // Since the job began: extents that were updated before their step was called for, of use or not.
  uint64_t used_ahead() const { return update_ahead_.used_extents(); }
  uint64_t lost_ahead() const { return update_ahead_.lost_extents(); }

  // For the simulator, which breaks what they promise, and for tests.
  PipelineExchange& exchange() { return exchange_; }
  PipelineBlocks& blocks() { return blocks_; }
  // What is wrong with the places of state; empty: nothing. Requires that nothing is under way.
  std::string AuditPlaces() const;

 private:
  struct Task {
    TaskPlan plan;
    bool reads_weights = false;  // they were not in the slab
    uint32_t extent_count = 0;
    uint32_t next_extent = 0;     // turn of the next one to be started
    std::vector<uint32_t> again;  // these, too: what was done ahead was for another gradient
    uint32_t computed = 0;
    uint32_t written = 0;
    // The first of two sweeps over the extents, which only adds up norms: per extent, per member.
    bool norms_only = false;
    std::vector<std::vector<kernels::Norms>> norms;
  };
  struct Extent {
    Task* task = nullptr;
    std::byte* block = nullptr;  // null: needs none
    uint32_t transfers = 0;      // reads under way
    int tries = 1;               // of the update, which finds out whether what was read is right
    // It was updated ahead, and only its weights are brought.
    std::optional<UpdateAhead::Updated> ahead;
    ExtentUpdate update;
    absl::Status status;
  };

  // A commit: what the store is to hold, once all of it is written.
  struct Commit {
    uint64_t epoch = 0;
    std::string blob;
    bool in_store = false;  // the store is about to end it
  };

  bool MayChange(uint32_t store_tensor) const;
  Readiness Look(uint32_t store_tensor);
  bool StartTask();
  // Whether there are extents to be started.
  static bool HasMore(const Task& task) {
    return task.next_extent < task.extent_count || !task.again.empty();
  }
  void StartExtents(Task& task);
  void StartAgain(Task& task);
  bool NeedsBlock(const Task& task, uint32_t index) const;
  bool HasBlock() { return blocks_.free_count() > 0 || read_ahead_.GiveBack(); }
  std::shared_ptr<Extent> MakeExtent(Task& task, uint32_t index);
  bool StartExtent(Task& task, uint32_t index);
  void PlacePlanes(Extent& extent);
  PlaneMemory PlaceWeights(const ExtentUpdate& update) const;
  void Read(const std::shared_ptr<Extent>& extent, const std::shared_ptr<ReadAhead::Piece>& piece);
  void ReadAgain(const std::shared_ptr<Extent>& extent);
  void ReadGradient(const std::shared_ptr<Extent>& extent);
  void CompareGradient(Task& task, uint32_t index, UpdateAhead::Updated updated);
  void Adopt(const std::shared_ptr<Extent>& extent, bool is_right);
  void FinishRead(const std::shared_ptr<Extent>& extent, const absl::Status& status);
  void Compute(const std::shared_ptr<Extent>& extent);
  void FinishCompute(const std::shared_ptr<Extent>& extent);
  void FinishNorms(Extent& extent);
  void Write(const std::shared_ptr<Extent>& extent);
  void FinishWrite(const std::shared_ptr<Extent>& extent, const absl::Status& status);
  void Release(Extent& extent);
  // What was asked for before a partial step comes with the next whole one.
  bool CommitsStep() const {
    return !context_->is_partial && ((step_.has_value() && step_is_checkpoint_) || commit_asked_);
  }
  bool HasNews() const;
  void ExchangePlaces();
  void FinishStep();
  void BeginCommit();
  void ContinueCommit();
  void FinishCommit(const absl::Status& status);
  bool MayWorkAhead() const;
  void WorkAhead();

  JobContext* context_;
  WeightCache* cache_;
  ResidentState* state_;
  Events events_;
  WriteBack write_back_;
  PipelineBlocks blocks_;
  ReadAhead read_ahead_;
  UpdateAhead update_ahead_;
  PipelineExchange exchange_;
  UpdateOrder order_;
  Pace pace_;

  std::optional<uint64_t> step_;              // recorded and not finished
  std::optional<uint64_t> written_step_;      // the last one that is finished and in no commit
  std::optional<std::string> trainer_state_;  // of the last step that had one and is in no commit
  bool step_is_checkpoint_ = false;
  double committed_seconds_ = 0;  // the time of the last commit
  bool hurry_ = false;
  bool updated_ahead_ = false;  // of the last step, by UpdateAhead
  bool has_exchanged_ = false;
  std::optional<Commit> commit_;                   // under way
  bool commit_asked_ = false;                      // of what is in no commit
  std::unordered_map<uint32_t, Task> unfinished_;  // by store tensor: recorded and not all written
  std::list<Task*> started_;                       // with extents to be started, in order
  uint32_t uncomputed_tasks_ = 0;
  uint32_t extents_in_flight_ = 0;
  uint32_t extents_in_flight_max_ = 0;
  uint64_t gradient_offset_ = 0;                    // in a block
  std::vector<std::shared_ptr<Extent>> held_back_;  // computed, to be written after the commit
};

}  // namespace offload::daemon

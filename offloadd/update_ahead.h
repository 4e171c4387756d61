// offloadd/update_ahead.h
//
// Updates for the next step before it is called for, while ranks compute their backward: a rank
// says what the step will probably be (BeginStep) and which gradients are final (kReleaseGradient).
// All of that is a guess. The trainer may still change a gradient or a hyper-parameter, take no
// step, or go on with the weights as they are; so an update that begins here changes nothing that
// anybody sees. It reads state and weights where they are, computes in blocks of the pipeline, and
// writes to the places that the store does not use (Store::WriteAside). When the step is called for
// with the same numbers, and the gradient still has the digest that it had when it was read, the
// places become those of the step (Store::Adopt); else they are forgotten.
//
// Which extents: of tensors with a slot of their own, whose gradient is in memory and whose
// optimizer takes no norms; whose state is not kept in memory; of jobs that commit every step,
// since within an interval the other place holds the step before.
//
// Invariants
//   * Weights in the slab, state in memory, the store's open epoch and every word that ranks see
//   are untouched here.
//   * Of an extent at most one update is under way, and nobody else writes its places meanwhile:
//   IsUnderWay() is asked by updates of the step, Forget() by puts.
//
// Thread safety: the loop's thread only; computations run on workers.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "offloadd/ahead_policy.h"
#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"
#include "offloadd/pipeline_blocks.h"
#include "offloadd/read_ahead.h"
#include "offloadd/resident_state.h"
#include "offloadd/step_plan.h"
#include "offloadd/weight_cache.h"
#include "swap/store.h"

namespace offload::daemon {

class UpdateAhead {
 public:
  // An extent whose update is written aside.
  struct Updated {
    uint64_t sequence = 0;                   // that its checksums bind
    std::vector<swap::WriteRequest> writes;  // without bytes
    uint64_t gradient_digest = 0;            // DigestGradients() of what was taken
    const uint32_t* roots = nullptr;         // as ExtentUpdate has them
  };

  UpdateAhead(JobContext* context, WeightCache* cache, const ResidentState* state,
              PipelineBlocks* blocks, ReadAhead* read_ahead)
      : context_(context), cache_(cache), state_(state), blocks_(blocks), read_ahead_(read_ahead) {}

  // What the next step will probably do, instead of what was expected before.
  void Expect(StepPlan plan);
  bool expects() const { return expects_; }
  // The gradient of a tensor of the expected step is probably final.
  void Release(uint32_t tensor);
  // Starts what can be started. Requires that no step, no commit and no put is under way.
  void Turn();

  bool WaitsForBlocks() const { return allowed_extents_ > 0 && !released_.empty(); }
  // False when no further extent will be updated for the step that is expected.
  bool HasWork() const { return allowed_extents_ > 0 && waiting_tensors_ > 0; }
  // True when some were begun for it.
  bool HasStarted() const { return has_started_; }
  // The extent is updated, or is about to be.
  bool Has(uint32_t store_tensor, uint32_t index) const;

  // The step is called for: what was done for another one is forgotten.
  void BeginStep(const StepPlan& plan);
  // Gives away what was updated of an extent; missing: nothing that fits the step that has begun,
  // gradients apart. Who takes it says by Judge() whether its gradient was the step's.
  std::optional<Updated> Take(uint32_t store_tensor, uint32_t index);
  void Judge(bool is_right) { ++(is_right ? used_extents_ : lost_extents_); }
  // True when nothing is under way here, nor waits for its step.
  bool empty() const { return tensors_.empty() && of_step_.empty(); }
  // True while an extent of the tensor is read, computed or written here.
  bool IsUnderWay(uint32_t store_tensor) const;
  // Forgets what was done for a tensor. False while something of it is under way.
  bool Forget(uint32_t store_tensor);

  uint64_t used_extents() const { return used_extents_; }  // since the job began
  uint64_t lost_extents() const { return lost_extents_; }

 private:
  struct Tensor {
    TaskPlan plan;
    bool is_released = false;
    // It is there only for what is under way: of no use, or of the step that has begun.
    bool is_forgotten = false, is_of_step = false;
    uint32_t next_extent = 0;
    uint32_t under_way = 0;
    std::map<uint32_t, Updated> updated;
    bool is_waiting = false;  // it has extents to be started, and may
  };
  struct Extent {
    std::byte* state_block = nullptr;
    std::byte* weight_block = nullptr;  // null: the weights are in the block of the state
    bool holds_weights = false;         // in the slab
    uint32_t transfers = 0;             // reads under way
    ExtentUpdate update;
    std::vector<swap::WriteRequest> writes;
    absl::Status status;
  };

  bool IsEligible(const TaskPlan& plan) const;
  bool IsEligible(uint32_t store_tensor, uint32_t index) const;
  bool Start(Tensor& tensor, uint32_t index);
  bool NeedsTwoBlocks(uint32_t store_tensor) const;
  void PlacePlanes(Extent& extent);
  void Read(const std::shared_ptr<Extent>& extent, const std::shared_ptr<ReadAhead::Piece>& piece);
  void FinishRead(const std::shared_ptr<Extent>& extent, const absl::Status& status);
  void Write(const std::shared_ptr<Extent>& extent);
  void FinishWrite(const std::shared_ptr<Extent>& extent, const absl::Status& status);
  void End(Extent& extent);
  void Forget(Tensor& tensor);
  void StopWaiting(Tensor& tensor) { waiting_tensors_ -= std::exchange(tensor.is_waiting, false); }

  JobContext* context_;
  WeightCache* cache_;
  const ResidentState* state_;
  PipelineBlocks* blocks_;
  ReadAhead* read_ahead_;
  AheadPolicy policy_;
  bool expects_ = false;
  bool has_started_ = false;
  uint64_t allowed_extents_ = 0;              // to be started still, for the expected step
  uint64_t waiting_tensors_ = 0;              // of tensors_
  std::map<uint32_t, Tensor> tensors_;        // by store tensor
  using Key = std::pair<uint32_t, uint32_t>;  // store tensor and index
  std::map<Key, Updated> of_step_;            // of the step that has begun, and not taken yet
  std::deque<uint32_t> released_;             // store tensors with extents to be started, in order
  uint64_t used_extents_ = 0, lost_extents_ = 0;
  uint64_t judged_used_ = 0, judged_lost_ = 0;  // of these, by policy_
};

// True when both say the same of every tensor, gradients by their place.
bool SaySame(const TaskPlan& a, const TaskPlan& b);

}  // namespace offload::daemon

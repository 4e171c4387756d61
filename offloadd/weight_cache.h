// offloadd/weight_cache.h
//
// The weights of a job in its slab: which are there, which are on their way, which make room. Keeps
// the tensor words of the slab (proto/shm_abi.h) and answers acquires.
//
// Invariants
//   * A word says kResident only while the bytes at its offset are the tensor's and nobody writes
//   them.
//   * A slot is given away only after the three moves of shm_abi.h, and never while it is held,
//   loading, being updated or written
//     to the drive.
//   * Every acquire is completed exactly once: resident, or with the reason why not.
//   * Of several ranks, the one that is behind all others is served first: what it waits for is
//   what the others wait for in the end.
//
// A tensor of the store passes through: absent → loading → loaded; or absent → claimed (by an
// update that reads the weights itself) → loaded; loaded → claimed → loaded. Bundles and resident
// weights have a slot for good and are never absent again.
//
// Thread safety: the loop's thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/residency.h"
#include "offloadd/job_context.h"

namespace offload::daemon {

class WeightCache {
 public:
  // `new_store`: all weights are zeros, so those with a slot for good are there already.
  WeightCache(JobContext* context, bool new_store);

  // ---- Ranks.
  void Acquire(uint32_t rank, uint32_t tensor, uint64_t tag);
  void Prefetch(uint32_t tensor);
  void SetSchedule(std::span<const uint32_t> tensors);
  // Where a rank is: the step that it called for last, and the touch in its schedule.
  struct Position {
    uint32_t rank = 0;
    uint64_t step = 0;
    uint32_t touch = 0;
  };
  // Of all ranks, at least one.
  void SetPositions(std::span<const Position> positions);
  // Of the rank that is behind all others.
  uint32_t position() const { return last_.touch; }
  bool has_schedule() const { return !order_.empty(); }
  // Touches until the next use, by the rank that is nearest to it.
  uint64_t NextUse(uint32_t store_tensor) const;

  // Called when a rank waits for a tensor whose update is pending.
  void SetOnDemand(std::function<void(uint32_t store_tensor)> on_demand) {
    on_demand_ = std::move(on_demand);
  }

  // ---- The update.
  // From now on nobody may begin to use these tensors.
  void MarkPending(std::span<const uint32_t> tensors);
  // True once nobody uses the tensor any more: every pin left is that of a waiting acquire.
  bool Unused(uint32_t tensor) const;
  // Takes the tensor for an update: gives it a slot, evicting only what is needed later than
  // `needed` if given. The caller writes the slot until Updated(); it must fill it from the store
  // unless loaded() was true.
  bool Claim(uint32_t store_tensor, std::optional<uint64_t> needed);
  // True when Claim() would need no room.
  bool HasSlot(uint32_t store_tensor) const;
  // The bytes are the new ones; words become kResident and waiters are answered.
  void Updated(uint32_t store_tensor);

  // ---- Both.
  bool loaded(uint32_t store_tensor) const { return states_[store_tensor].phase == Phase::kLoaded; }
  bool loading(uint32_t store_tensor) const {
    return states_[store_tensor].phase == Phase::kLoading;
  }
  bool claimed(uint32_t store_tensor) const {
    return states_[store_tensor].phase == Phase::kClaimed;
  }
  bool pending(uint32_t tensor) const { return pending_[tensor]; }
  std::byte* slot(uint32_t store_tensor) const {
    return context_->slab + states_[store_tensor].offset_bytes;
  }
  // A held tensor is neither loaded nor evicted.
  void Hold(uint32_t store_tensor) { ++states_[store_tensor].holds; }
  void Unhold(uint32_t store_tensor) { --states_[store_tensor].holds; }
  bool held(uint32_t store_tensor) const { return states_[store_tensor].holds > 0; }
  // Loads a tensor that has a slot for good, if it is not there.
  void EnsureLoading(uint32_t store_tensor);

  // Weights are being read from the drive.
  bool reading() const { return loads_in_flight_ > 0; }
  // Somebody waits for a tensor that has no slot yet, or whose update is pending.
  bool demanded() const { return !demands_.empty(); }
  // Every rank that is here waits, for weights or for others, so that none computes. (Of a rank
  // with several threads, one of them.)
  bool AllRanksWait() const;

  // Starts what can be started. True while somebody waits for room, which no message announces.
  bool Turn();
  // Answers all waiters with `status`.
  void FailWaiters(const absl::Status& status);
  // Forgets the wishes of a rank that is gone.
  void DropWishes() { wishes_.clear(); }

  uint64_t resident_bytes() const { return permanent_loaded_bytes_ + window_.occupied_bytes(); }

 private:
  enum class Phase : uint8_t { kAbsent, kLoading, kLoaded, kClaimed };
  struct Waiter {
    uint32_t rank;
    uint32_t tensor;
    uint64_t tag;
    ActivityLog::WaitCause cause = ActivityLog::WaitCause::kMiss;
    int64_t since_nanoseconds = 0;
  };
  struct State {
    Phase phase = Phase::kAbsent;
    bool permanent = false;
    bool demanded = false;  // in demands_
    uint32_t holds = 0;
    uint64_t offset_bytes = 0;  // in the slab; meaningless while absent, unless permanent
    uint64_t arrival = 0;       // order of loading, for first in, first out without a schedule
    uint32_t next_extent = 0;   // of a load
    uint32_t extents_left = 0;
    double waiting_since = 0;
    std::vector<Waiter> waiters;
  };

  std::atomic<uint64_t>& Word(uint32_t tensor) const;
  ActivityLog::WaitCause CauseOfWait(uint32_t tensor) const;
  void StoreWord(uint32_t tensor, proto::TensorState state) const;
  void Answer(const Waiter& waiter) const;
  void AnswerWaiters(uint32_t store_tensor);
  void CountWait(const Waiter& waiter, int32_t change);
  void Demand(uint32_t store_tensor);
  bool Pinned(const proto::StoreTensor& tensor) const;
  bool AnyPending(const proto::StoreTensor& tensor) const;
  Occupant Look(uint32_t store_tensor) const;
  bool Evict(uint32_t store_tensor);
  bool GiveSlot(uint32_t store_tensor, std::optional<uint64_t> needed);
  bool TryLoad(uint32_t store_tensor, std::optional<uint64_t> needed);
  void StartLoad(uint32_t store_tensor, bool urgent);
  void IssueLoads();
  void IssueExtent(uint32_t store_tensor, uint32_t index);
  void FinishExtent(uint32_t store_tensor, const absl::Status& status);
  void BecomeLoaded(uint32_t store_tensor);
  void PutLastRankFirst();
  bool ServeDemands();
  bool ServeWishes();
  bool IsWaitingForWeights(uint32_t rank) const { return waits_of_rank_[rank] > 0; }
  bool IsWaitingForRanks(uint32_t rank) const;
  bool Computes(uint32_t rank) const;  // it is here and waits for nothing
  bool IsUsingWeights(uint32_t rank) const;
  std::string WhoMayLetGo() const;
  void CheckPatience(uint32_t store_tensor);

  JobContext* context_;
  WeightWindow window_;
  UseOrder order_;
  std::vector<Position> positions_ = {{}};
  Position last_;                        // of positions_
  std::vector<State> states_;            // per store tensor
  std::vector<bool> pending_;            // per tensor
  std::vector<uint32_t> waiting_count_;  // per tensor: acquires that wait
  std::vector<uint32_t> waits_of_rank_;  // the same per rank
  std::deque<uint32_t> demands_;         // store tensors that somebody waits for, without a slot
  std::deque<uint32_t> wishes_;          // store tensors that somebody will want
  std::deque<uint32_t> loads_;           // store tensors with extents to be issued
  uint32_t loads_in_flight_ = 0;         // extents
  uint64_t arrivals_ = 0;
  uint64_t permanent_loaded_bytes_ = 0;
  std::function<void(uint32_t)> on_demand_;
};

}  // namespace offload::daemon

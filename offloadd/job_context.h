// offloadd/job_context.h
//
// What the parts of a sealed job share: its store, its memory, where everything stands in it, and
// the ways to compute off the loop, to answer the rank and to fail.
//
// Invariants
//   * `outstanding` counts every transfer and computation whose callback has not run. Nothing of a
//   job is freed while it is not 0.
//   * `ranks` has one entry per rank, by number, from the beginning; a rank that is gone leaves its
//   memory, since what it handed over may still be read, and no pins.
//   * After `failure` is set nothing new is started, and nothing more is committed.
//
// Thread safety: the loop's thread only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/durability.h"
#include "kernels/square_root.h"
#include "offloadd/activity_log.h"
#include "offloadd/core_share.h"
#include "offloadd/core_time.h"
#include "offloadd/event_loop.h"
#include "offloadd/machine.h"
#include "proto/depths.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "swap/scratch.h"
#include "swap/store.h"

namespace offload::daemon {

// What the parts see of a rank.
struct RankMemory {
  std::byte* region = nullptr;
  uint64_t region_bytes = 0;             // that have pages
  const proto::PinWord* pins = nullptr;  // null without a rank: it uses nothing
  bool is_here = false;                  // neither gone nor ready with the job
  bool is_stepping = false;              // has called Step, and waits for the others
  bool is_exchanging = false;            // the same of Exchange
};

struct JobContext {
  EventLoop* loop = nullptr;
  CoreShare workers;  // on which Compute() computes
  const Clock* clock = nullptr;
  ActivityLog* activity = nullptr;
  swap::Store* store = nullptr;
  swap::Scratch* scratch = nullptr;  // null until somebody needs one

  proto::Catalogue catalogue;
  kernels::OptimizerSpec optimizer;  // that the job was sealed for
  // Of the trainer's vector library, for optimizers that follow it. Null: the nearest.
  std::shared_ptr<const kernels::SquareRoots> square_roots;
  proto::MemoryPlan plan;
  proto::Depths depths;       // how much is under way at a time
  double write_cost = 0;      // of the pool, for plans
  bool gradient_sum = false;  // of ranks: parts are added as they are, not averaged
  proto::SlabLayout layout;

  std::byte* slab = nullptr;
  std::vector<RankMemory> ranks;

  Durability durability;       // which steps are committed
  bool reads_ahead = true;     // for the next step before it is called for (ReadAhead)
  bool updates_ahead = false;  // too, where it is announced (update_in_backward = auto)
  bool published = false;      // the store has its name; before that the weights are being put
  bool commit_wanted = false;  // no write may begin until the commit is done
  // Puts lie in the open epoch that no step and no end of a load has made part of it: nothing is
  // committed while it is so. All steps are committed then.
  bool unsettled_puts = false;
  // The last step was partial: what other tensors have become its rank has elsewhere, so that
  // nothing is committed before the next whole step or the end of a load.
  bool is_partial = false;
  bool changing_snapshots = false;  // or about to: no put begins, and nothing is committed
  uint32_t writes_in_flight = 0;
  uint32_t writes_aside = 0;  // of these: to places that are in no epoch (UpdateAhead)
  uint64_t outstanding = 0;
  uint64_t scrubbing = 0;           // of these: to find rot, for which nobody waits
  CoreTime computed;                // by workers, all together
  double room_timeout_seconds = 0;  // after which an acquire that nothing can serve fails
  absl::Status failure;

  // Answers an operation of a rank's ring.
  std::function<void(uint32_t rank, uint64_t tag, absl::Status status, uint64_t value)> complete;
  // Makes the job failed; the first status stays.
  std::function<void(absl::Status)> fail;
  // The rank is in a step, an exchange, a look at gradients or a transfer that has not begun, which
  // wait for the others. Empty: no rank ever is.
  std::function<bool(uint32_t rank)> waits_for_ranks;
  // The rank waits for gradients of another one, which is not as far in its program. Empty: no rank
  // ever does.
  std::function<bool(uint32_t rank, uint32_t other)> is_ahead_of;

  const proto::StoreTensor& store_tensor(uint32_t index) const {
    return catalogue.store_tensors[index];
  }
  bool failed() const { return !failure.ok(); }
  // What there is may not be committed.
  bool is_unsettled() const { return unsettled_puts || is_partial; }

  // Of a tensor, by all ranks: a rank acquires after it has looked, so both look in one order
  // (shm_abi.h).
  uint64_t Pins(uint32_t tensor) const {
    uint64_t pins = 0;
    for (const RankMemory& rank : ranks) {
      if (rank.pins != nullptr) pins += rank.pins[tensor].load(std::memory_order_seq_cst);
    }
    return pins;
  }
  // False when nobody can use a tensor any more.
  bool HasPins() const {
    for (const RankMemory& rank : ranks) {
      if (rank.pins != nullptr) return true;
    }
    return false;
  }

  // Runs `work` on a worker and then `done` on the loop.
  void Compute(std::function<void()> work, std::function<void()> done) {
    ++outstanding;
    workers.Run([this, work = std::move(work), done = std::move(done)]() mutable {
      const CoreTime before = CoreTime::Now();
      work();
      loop->Post([this, spent = CoreTime::Now().Since(before), done = std::move(done)] {
        --outstanding;
        workers.Finished();
        computed.Add(spent);
        done();
      });
    });
  }

  // Wraps a callback of store or scratch so that it is counted.
  swap::Store::Done Counted(std::function<void(absl::Status)> done) {
    ++outstanding;
    return [this, done = std::move(done)](absl::Status status) {
      --outstanding;
      done(std::move(status));
    };
  }
  swap::Store::Done CountedWrite(std::function<void(absl::Status)> done) {
    ++writes_in_flight;
    return Counted([this, done = std::move(done)](absl::Status status) {
      --writes_in_flight;
      done(std::move(status));
    });
  }
};

// Bytes of an element in a plane.
inline uint64_t WeightBytes(const proto::StoreTensor& tensor, uint64_t elements) {
  return elements * proto::DtypeBytes(tensor.dtype);
}
// Where extent `index` of a weight begins in its slot.
inline uint64_t WeightExtentOffset(const proto::StoreTensor& tensor, uint32_t index) {
  return WeightBytes(tensor, uint64_t{index} * proto::kExtentElements);
}

inline bool HasResidual(const proto::StoreTensor& tensor) {
  return tensor.planes.Has(proto::Plane::kResidual);
}
// Its residual has tie bits (kernels/split.h).
inline bool HasTies(const proto::StoreTensor& tensor) {
  return tensor.planes.Has(proto::Plane::kTies);
}

}  // namespace offload::daemon

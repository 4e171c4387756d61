// zero3/planner.h
//
// Decides, from tensors, optimizer and budget, where every plane lives, how big the weight window,
// the update pipeline and the gradient accumulators are: a pure function, the same for attaching
// and for `offloadctl plan`. What it promises is what the budget sum says: slab + region + overhead
// ≤ ram, always.
//
// Order of spending: what must be (bundles, minimal window, minimal pipeline, region, overhead),
// where gradients in DRAM come before spilling them through a window; a deeper pipeline; as many
// gradients as fit when some are spilled; then, beside a window that grows with ram, what saves
// most of a step's traffic: weights of whole tensors, the largest first (a byte of them saves two
// read ones), and state in extents (one), each also its written bytes where durability leaves what
// stays in memory unwritten, counted as `write_cost` read ones. What stays lies evenly over the
// model (zero3/keep_order.h). More ram never means more predicted traffic. A policy
// (zero3/zero_policy.h) changes that order, and what may and what must stay.
//
// With several ranks the slab holds the sums of gradients, and every rank a ring through which it
// delivers its own: a few extents of it at least (ZeRO stage 2); a good one comes before weights,
// and what is left when everything is in memory makes rings up to whole gradients (stage 1). Where
// the trainer reduces gradients there are neither: every region holds whole ones.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/durability.h"
#include "proto/depths.h"
#include "proto/slab_layout.h"
#include "zero3/zero_policy.h"

namespace offload::zero3 {

struct PlanInput {
  proto::Catalogue catalogue;
  uint64_t ram_bytes = 0;
  bool always_spill_gradients = false;
  // Of several ranks: the trainer makes their gradients one, and each holds its own, in memory.
  bool gradients_reduced = false;
  uint32_t world_size = 1;  // ranks on this node
  Durability durability;
  uint32_t good_pipeline_blocks = proto::Depths().pipeline_blocks;  // ChooseDepths()
  double write_cost = proto::kWriteCost;  // of a written byte, in read ones: WriteCost()
  ZeroPolicy policy;
  bool more_may_come = false;  // the catalogue is of what is known so far; a refusal says so

  // Whether the daemon makes one gradient of the ranks'.
  bool AddsGradients() const { return world_size > 1 && !gradients_reduced; }
};

struct Plan {
  proto::MemoryPlan memory;
  proto::SlabLayout slab;
  // The region: fixed part, staging (at the same place before there is a plan), pins with times of
  // use, window for spilled gradients, gradients. Of several ranks: fixed part, staging, pins,
  // ring, window, at the same places for all, and gradients that the trainer reduces; behind that
  // the first rank has the rest of its staging.
  uint64_t staging_offset = 0;  // one writable copy of the largest tensor, at least
                                // kLoadingStagingBytes; used for loading, too
  uint64_t staging_bytes = 0;
  uint64_t pins_offset = 0;
  uint64_t use_times_offset = 0;  // behind the pins (proto/step_words.h)
  uint64_t gradient_window_offset =
      0;  // spilled gradients pass through here: at least twice the largest gradient
  uint64_t gradient_window_bytes = 0;  // 0 when gradients stay in DRAM
  // Where the daemon adds; ring_bytes is 0 otherwise.
  uint64_t ring_offset = 0, ring_bytes = 0;  // of each rank's region: what it delivers
  uint64_t first_staging_offset = 0, first_staging_bytes = 0;  // of the first rank's region: room
                                                               // for a copy of the largest tensor
                                                               // that staging_bytes does not hold
  uint64_t overhead_bytes = 0;
  uint64_t total_bytes = 0;  // slab + regions + overhead

  uint64_t parameter_count = 0, trainable_count = 0;
  uint64_t state_bytes = 0;     // weights, masters, moments: 12 per trainable parameter
  uint64_t gradient_bytes = 0;  // in the gradients' dtype
  uint64_t store_bytes = 0;     // on the drive, both places
  uint64_t resident_weight_bytes = 0, resident_state_bytes = 0;
  bool gradients_spilled = false;
  // Predicted traffic of a step of one micro-batch, and of each further one, bytes per parameter:
  // where not every step is committed, on average over the steps of an interval; of intervals by
  // the clock without their checkpoints.
  double read_bytes_per_parameter = 0, write_bytes_per_parameter = 0,
         bytes_per_further_micro_batch = 0;
  // Of a further micro-batch: spilled gradients, which it also reads.
  double further_write_bytes_per_parameter() const {
    return parameter_count == 0
               ? 0
               : static_cast<double>(memory.scratch_bytes) / static_cast<double>(parameter_count);
  }
  // What a checkpoint writes more than the other steps: all that is trained and stays in memory. 0
  // where every step is one.
  uint64_t checkpoint_bytes = 0;
  // The smallest ram that runs, and the smallest that runs without spilling.
  uint64_t floor_bytes = 0, floor_without_spilling_bytes = 0;
};

// OFD-1301 with the whole sum and both floors when ram is too small. OFD-1002 when gradients that
// the trainer reduces are to be spilled.
absl::StatusOr<Plan> MakePlan(const PlanInput& input);

// The sum as a table for people, one line per item, units MiB/GiB.
std::string DescribePlan(const PlanInput& input, const Plan& plan);

}  // namespace offload::zero3

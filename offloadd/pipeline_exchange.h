// offloadd/pipeline_exchange.h
//
// Memory that passes between the update pipeline and the state that stays, when a replan asks for
// another depth: a deeper pipeline takes the places of extents whose state was kept, a shallower
// one gives blocks to extents whose state was read in every step. The sum is what `ram` pays for,
// and a place has one owner at any time.
//
// Invariants
//   * Places move between two steps only, when no update and no transfer works in them.
//   * A place is taken only from what the store has, too; what begins to stay is read once more.
//   * Every tensor keeps about the same share of its state, as it was planned; where the plan keeps
//   none at all, it was perhaps demanded, and only what was taken is given.
//
// Thread safety: the loop's thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "offloadd/job_context.h"
#include "offloadd/pipeline_blocks.h"
#include "offloadd/resident_state.h"
#include "offloadd/weight_cache.h"

namespace offload::daemon {

class PipelineExchange {
 public:
  PipelineExchange(JobContext* context, const WeightCache* cache, ResidentState* state,
                   PipelineBlocks* blocks);

  // The pipeline is to have so many blocks, as far as there are places.
  void Want(uint32_t block_count);
  // Moves some of what can be moved now; true when anything was. Requires that no step is under way
  // and that nothing is read or updated ahead of one.
  bool Turn();
  // Since the job began.
  uint64_t taken() const { return taken_; }
  uint64_t given() const { return given_; }

  // What is wrong with the places, when `blocks_in_use` blocks ought to be with somebody; empty:
  // nothing.
  std::string Audit(uint64_t blocks_in_use) const;

 private:
  bool IsFree(uint32_t store_tensor) const;
  // By share of what is kept; missing: nobody's fits.
  std::optional<uint32_t> WhoKeepsMost() const;
  std::optional<uint32_t> WhoKeepsLeast() const;
  bool Take();
  bool Give();

  JobContext* context_;
  const WeightCache* cache_;
  ResidentState* state_;
  PipelineBlocks* blocks_;
  uint64_t place_count_ = 0;    // blocks, and kept extents
  uint64_t passing_count_ = 0;  // extents whose state does not stay
  bool may_keep_ = false;       // the plan keeps some
  std::optional<uint32_t> wanted_;
  uint64_t taken_ = 0, given_ = 0;
};

}  // namespace offload::daemon

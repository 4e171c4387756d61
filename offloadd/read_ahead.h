// offloadd/read_ahead.h
//
// State of the extents that the next step will probably update first, read before the step is
// called for: into blocks of the pipeline that are free while ranks compute. What a step updates is
// what the last one has updated, in the same order.
//
// Invariants
//   * What is kept of an extent is what the store has of it: puts make it forgotten, and nothing is
//   read while one may be under way.
//   * A block is given back to whoever needs one now.
//
// Thread safety: the loop's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"
#include "offloadd/pipeline_blocks.h"
#include "offloadd/resident_state.h"

namespace offload::daemon {

class ReadAhead {
 public:
  // Of one extent.
  struct Piece {
    std::byte* block = nullptr;
    ExtentUpdate update;  // its planes of state have bytes in the block, and stamps
    bool is_read = false;
    bool is_forgotten = false;
    absl::Status status;                        // of the read
    std::function<void(absl::Status)> on_read;  // of who has taken it before
  };

  ReadAhead(JobContext* context, const ResidentState* state, PipelineBlocks* blocks)
      : context_(context), state_(state), blocks_(blocks) {}

  // The tensors of a step that begins, first ones first. What was read of others is forgotten.
  void BeginStep(std::vector<uint32_t> store_tensors);
  // Starts what can be started, but for extents that `is_done` is true of. Requires that no step
  // and no put is under way.
  void Turn(const std::function<bool(uint32_t store_tensor, uint32_t index)>& is_done);

  // Gives away what was read of an extent, or is being read; null: nothing. The block goes along.
  std::shared_ptr<Piece> Take(uint32_t store_tensor, uint32_t index);
  bool Has(uint32_t store_tensor, uint32_t index) const {
    return pieces_.count({store_tensor, index}) != 0;
  }
  void Forget(uint32_t store_tensor);
  size_t piece_count() const { return pieces_.size(); }
  // Gives a block back, of what is needed last. False when there is none that is not being read.
  bool GiveBack();

 private:
  using Key = std::pair<uint32_t, uint32_t>;  // store tensor and index
  using Pieces = std::map<Key, std::shared_ptr<Piece>>;

  bool NeedsReading(uint32_t store_tensor, uint32_t index) const;
  void Start(uint32_t store_tensor, uint32_t index);
  void Finish(Piece& piece, const absl::Status& status);
  void Forget(Piece& piece);

  JobContext* context_;
  const ResidentState* state_;
  PipelineBlocks* blocks_;
  std::vector<uint32_t> order_;  // of the last step
  size_t next_tensor_ = 0;       // in order_, to be looked at
  uint32_t next_extent_ = 0;     // of that
  Pieces pieces_;
  std::deque<Key>
      sequence_;  // keys of pieces_, and of some that were forgotten, as they were started
};

}  // namespace offload::daemon

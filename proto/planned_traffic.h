// proto/planned_traffic.h
//
// What a step moves between memory and drive, as planned: pure arithmetic over tensors, memory plan
// and, once it is known, the order in which a step touches tensors. Daemon and planner go by the
// same.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "proto/slab_layout.h"

namespace offload::proto {

// Bytes of the drive, padding included.
struct StepTraffic {
  // Weights that pass through the window. The update reads them with the state, for the forward
  // that follows, too.
  uint64_t weight_read_bytes = 0;
  uint64_t state_read_bytes = 0;
  // Of gradients that are spilled.
  uint64_t gradient_read_bytes = 0, gradient_written_bytes = 0;
  // Weights and state that pass through memory, by every step.
  uint64_t written_bytes = 0;
  // What a checkpoint writes beside that: what is trained and stays in memory. Where every step is
  // committed, every step is one.
  uint64_t checkpoint_bytes = 0;
  uint32_t passes = 1;       // backward passes, as the order shows them
  bool order_known = false;  // else one forward and one backward is assumed, and that both read all

  uint64_t ReadBytes() const { return weight_read_bytes + state_read_bytes + gradient_read_bytes; }
  // Of a step that is no checkpoint.
  uint64_t WrittenBytes() const { return written_bytes + gradient_written_bytes; }
  friend bool operator==(const StepTraffic&, const StepTraffic&) = default;
};

// Orders of more touches are taken as not known.
inline constexpr size_t kPlannedTouchesMax = size_t{1} << 17;

// `touches`: of one step, tensors of the trainer in order, as SetSchedule has them; empty: not
// known. What is trainable and has no touch, though it has to be brought, is taken as not trained.
StepTraffic PlanTraffic(const Catalogue& catalogue, const MemoryPlan& plan,
                        std::span<const uint32_t> touches);

}  // namespace offload::proto

// offloadd/plan_comparison.h
//
// What steps have been since the plan was made that they are compared with. A plan is another one
// when the order of tensors is known, and when it was made anew; the step that was under way then
// is none of its own.
//
// Pure. Thread safety: none.
#pragma once

#include <cstdint>

#include "offloadd/step_history.h"

namespace offload::daemon {

class PlanComparison {
 public:
  struct Steps {
    uint64_t first_step = 0, step_count = 0, checkpoints = 0;
    uint64_t bytes_read = 0, bytes_written = 0;
    double seconds = 0;
    double compute_seconds = 0;  // of the phases of the ranks, without what they waited for
  };

  // The plan is another one.
  void Begin() {
    steps_ = {};
    is_under_way_ = true;
  }
  // A single step.
  void Add(const StepRecord& record) {
    if (is_under_way_) {
      is_under_way_ = false;
      return;
    }
    if (steps_.step_count++ == 0) steps_.first_step = record.first_step;
    steps_.checkpoints += record.commits;
    steps_.bytes_read += record.bytes_read;
    steps_.bytes_written += record.bytes_written;
    steps_.seconds += record.seconds;
    const uint64_t all = record.sums.AllNanoseconds(), stall = record.sums.StallNanoseconds();
    steps_.compute_seconds += all > stall ? static_cast<double>(all - stall) * 1e-9 : 0;
  }
  const Steps& steps() const { return steps_; }

 private:
  Steps steps_;
  bool is_under_way_ = true;
};

}  // namespace offload::daemon

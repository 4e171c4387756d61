// zero3/schedule.h
//
// The order in which a step touches tensors: recorded while the first step runs, replayed as
// prefetch afterwards. A step may take another path than the recorded one; the schedule is only a
// hint, so that a wrong one costs time and never correctness.
//
// Pure: knows tensors by number and bytes, does no I/O. Not thread safe; the caller locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace offload::zero3 {

class Schedule {
 public:
  // `slot_bytes`: of each tensor in the weight window; 0 for tensors that are always resident (they
  // are not recorded). `window_bytes`: how far ahead, in bytes of distinct tensors, Touch() asks
  // for prefetches.
  Schedule(std::vector<uint64_t> slot_bytes, uint64_t window_bytes);

  // An operator is about to use `tensor`. Records it and moves the cursor; calls `prefetch` for
  // each tensor that now enters the window and was not asked for since it was last touched.
  // Immediate repetitions of one tensor are one touch.
  void Touch(uint32_t tensor, const std::function<void(uint32_t tensor)>& prefetch);

  // The optimizer step: what was touched since the last one becomes the schedule if it differs from
  // it. Returns true when it changed and must be sent to the daemon. The cursor goes to the start
  // of the next step, and its window is asked for. Touches under evaluation (`recording` false)
  // move the cursor but are not recorded.
  bool EndStep(const std::function<void(uint32_t tensor)>& prefetch);
  void SetRecording(bool recording);

  std::span<const uint32_t> order() const;  // touches of one step; empty before the first EndStep
  uint32_t position() const;                // of the next expected touch
  uint64_t mismatches() const;              // touches that were not the expected next one, in all

 private:
  static constexpr size_t kTouchesMax = size_t{1}
                                        << 22;  // of one step; what comes later is not recorded
  static constexpr uint32_t kNone = UINT32_MAX;

  void MoveTo(size_t position);
  void FillWindow(const std::function<void(uint32_t tensor)>& prefetch);
  void Advance();
  // Where `tensor` is expected next: after `last_` if the schedule knows that pair, else its next
  // position, cyclically.
  size_t Locate(uint32_t tensor) const;
  void Rebuild();

  const std::vector<uint64_t> slot_bytes_;
  const uint64_t window_bytes_;
  bool recording_ = true;
  uint32_t last_ = kNone;           // touched
  std::vector<uint32_t> order_;     // of the schedule
  std::vector<uint32_t> recorded_;  // since the last EndStep
  // Positions of each tensor in order_, ascending: those of tensor t begin at positions_begin_[t].
  std::vector<uint32_t> positions_, positions_begin_;
  // The window is order_[cursor_, ahead_): how often each tensor is in it, and the bytes of the
  // distinct ones.
  size_t cursor_ = 0, ahead_ = 0;
  std::vector<uint32_t> in_window_;
  uint64_t in_window_bytes_ = 0;
  std::vector<bool> asked_;  // since it was last touched
  uint64_t mismatches_ = 0;
};

}  // namespace offload::zero3

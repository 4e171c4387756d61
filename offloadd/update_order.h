// offloadd/update_order.h
//
// In which order the tensors of a step are updated and how far ahead of the forward: pure policy.
//
// Invariants
//   * A tensor is handed out once.
//   * A tensor that a rank waits for comes before all others and may evict anything.
//   * Others come in the order of the next forward and do not evict what is used before them,
//   unless the pace says so: then the
//     update goes on at the price of reading some weights again, so that it ends whatever the rank
//     does.
//
// Thread safety: none; one owner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace offload::daemon {

// What stands between a tensor and its update.
enum class Readiness : uint8_t {
  kReady,      // nothing: its weights have a slot
  kNeedsRoom,  // a slot in the window
  kBusy,       // somebody uses it, or it is on its way
};

class UpdateOrder {
 public:
  struct Task {
    uint32_t store_tensor = 0;
    uint64_t next_use = 0;
  };
  using Look = std::function<Readiness(uint32_t store_tensor)>;
  // Tries to make room, evicting only what is needed later than `needed`, if given.
  using MakeRoom = std::function<bool(uint32_t store_tensor, std::optional<uint64_t> needed)>;

  // Replaces all tasks.
  void Reset(std::vector<Task> tasks);
  // Sorts the remaining tasks anew.
  void Reorder(const std::function<uint64_t(uint32_t store_tensor)>& next_use);
  // Moves a tensor to the front; does nothing when it was handed out.
  void Demand(uint32_t store_tensor);

  // Hands out the next tensor that can be updated now. Once room was refused, only tensors that
  // need none are handed out: a later tensor must not take the place of an earlier one. `polite`
  // false: may evict anything.
  std::optional<uint32_t> Next(bool polite, const Look& look, const MakeRoom& make_room);

  bool empty() const { return tasks_.empty(); }
  size_t size() const { return tasks_.size(); }

 private:
  void Sort();
  std::deque<Task> tasks_;
  std::unordered_set<uint32_t> demanded_;
};

// Which of `count` extents of a tensor comes at `turn`, when those before `resident` have their
// state in memory: the two kinds take turns evenly, each in its own order, so that some are read
// while others are computed.
inline uint32_t ExtentAtTurn(uint32_t turn, uint32_t count, uint32_t resident) {
  const auto before = static_cast<uint32_t>(uint64_t{turn} * resident / count);
  const auto behind = static_cast<uint32_t>((uint64_t{turn} + 1) * resident / count);
  return behind > before ? before : resident + turn - before;
}

// Decides when the update stops waiting for the forward. A forward that is slow but moves is waited
// for: patience is at least `stall_seconds` and some multiple of the longest pause between two
// touches in this step and the one before, up to a bound.
class Pace {
 public:
  explicit Pace(double stall_seconds) : stall_seconds_(stall_seconds) {}

  void Begin(uint32_t position, double now_seconds) {
    previous_pause_ = std::exchange(longest_pause_, 0);
    position_ = position;
    moved_at_ = now_seconds;
  }
  // True while the forward can be waited for.
  bool Polite(bool hurry, bool has_schedule, uint32_t position, double now_seconds) {
    const double pause = now_seconds - moved_at_;
    if (position != position_) {
      longest_pause_ = std::max(longest_pause_, pause);
      position_ = position;
      moved_at_ = now_seconds;
      return !hurry && has_schedule;
    }
    return !hurry && has_schedule && pause < Patience();
  }

 private:
  static constexpr double kPauses = 3;
  static constexpr double kPatienceMaxSeconds = 5;
  double Patience() const {
    return std::max(stall_seconds_, std::min(kPatienceMaxSeconds,
                                             kPauses * std::max(previous_pause_, longest_pause_)));
  }

  double stall_seconds_;
  double moved_at_ = 0;
  double longest_pause_ = 0, previous_pause_ = 0;
  uint32_t position_ = 0;
};

}  // namespace offload::daemon

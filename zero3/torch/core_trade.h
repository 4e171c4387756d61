// zero3/torch/core_trade.h
//
// Whether updates are begun in the backward where torch computes on every core: pure policy. There
// they take from the backward what they compute, and give the forward what it waited for them. So
// steps are looked at for which nothing was begun: when what their forwards waited is more than
// what their updates computed, by a margin, the next ones are begun; and every now and then some
// are not, to look again.
//
// Thread safety: none; one owner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace offload::zero3 {

// Sums that only grow.
struct StepCosts {
  uint64_t forward_wait_nanoseconds = 0;  // of the rank, for weights that are updated or read
  uint64_t computed_nanoseconds = 0;      // processor time of the daemon's computations for the job
};

class CoreTrade {
 public:
  // A step was called for, and this is what was spent until then. True: the next one is begun.
  bool Judge(const StepCosts& now);

 private:
  static constexpr size_t kSamples = 3;
  // A second of an update costs the backward up to one, and not all of a wait is saved.
  static constexpr double kMargin = 2;
  // Steps that are begun, and not, in turn.
  static constexpr uint32_t kBegun = 62, kLookedAt = 2;

  bool IsWorthIt() const;

  StepCosts before_;
  std::array<StepCosts, kSamples> samples_{};  // of steps beside which nothing was begun
  uint64_t sample_count_ = 0;
  uint64_t steps_ = 0;
  bool begins_ = false, began_ = false;  // what the last call said, and that before it
  uint32_t turn_ = 0;                    // steps since it last changed
};

}  // namespace offload::zero3

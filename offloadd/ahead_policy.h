// offloadd/ahead_policy.h
//
// How much of the next step is worth updating for before it is called for: pure policy. Work for a
// step that turned out otherwise (clipped, with other hyper-parameters, or none) is lost, and its
// bytes cross the drive once more. So the first step of a job, and that after one that was mostly
// lost, are begun with a few extents only, and each step that was of use doubles them; after steps
// that were lost some are left out, after several of them in a row more, up to a bound; and where
// some are lost now and then, as many extents are updated as keep what is lost below a share of the
// drive's traffic.
//
// Thread safety: none; one owner.
#pragma once

#include <algorithm>
#include <cstdint>

namespace offload::daemon {

class AheadPolicy {
 public:
  // A step has begun: of what was done for it, so many extents were of use and were lost.
  void Judge(uint64_t used, uint64_t lost) {
    if (used + lost == 0) return;
    pause_ = lost > used ? std::min(2 * pause_ + 1, kPauseMax) : 0;
    left_ = pause_;
    share_ = lost > used ? kFirstShare : std::min(2 * share_, 1.0);
    const double fraction = static_cast<double>(lost) / static_cast<double>(used + lost);
    lost_fraction_ += (fraction - lost_fraction_) / kSteps;
  }
  // Asked once for each step that is expected: how many of so many extents.
  uint64_t Allowed(uint64_t extents) {
    if (left_ > 0) return --left_, 0;
    const double share =
        lost_fraction_ <= kLostShare ? share_ : std::min(share_, kLostShare / lost_fraction_);
    const auto allowed = static_cast<uint64_t>(share * static_cast<double>(extents));
    return std::min(extents, std::max(allowed, kFewExtents));
  }

 private:
  static constexpr uint32_t kPauseMax = 15;  // steps
  static constexpr double kSteps = 64;       // that are remembered
  static constexpr double kFirstShare = 1.0 / 16;
  static constexpr uint64_t kFewExtents = 16;  // some hundred megabytes of traffic
  // Of the extents of a step, on average. An extent that is lost costs the drive 22 bytes for each
  // bf16 parameter beside the 26 of an update: so all of it stays below half a byte.
  static constexpr double kLostShare = 0.35 / 22;
  uint32_t pause_ = 0, left_ = 0;
  double share_ = kFirstShare;  // of the extents that are asked for
  double lost_fraction_ = 0;    // of what was done, on average
};

}  // namespace offload::daemon

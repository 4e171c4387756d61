// zero3/gpu/gradients_ahead.h
//
// Which gradients come back to a device ahead of their use. The order in which the passes of a step
// add to them is recorded, as that of weights is (zero3/schedule.h); when one was added to, those
// that are next are asked to come, in that order, as far as there is room, and those behind them
// to be read from the drive. A pass that takes another path is only slower.
//
// Thread safety: all methods may be called from any thread. What comes is asked under the lock, and
// must not call back.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "zero3/schedule.h"

namespace offload::zero3 {

class GradientsAhead {
 public:
  class Awaited {
   public:
    // Starts to come, where that is of use. False: there is no room yet.
    virtual bool ComeAhead() = 0;
    // The same for its way from the drive to the host. Throws what a write of another has met.
    virtual bool ReadAhead() { return true; }

   protected:
    ~Awaited() = default;
  };

  // `slot_bytes`: of each gradient, by number; 0 for those that never come. `ahead_bytes`: how much
  // is asked for ahead of what was added to. `read_bytes`: of those that may be on the drive, and
  // how much of them is to be in memory of the host or the device; none, where there are none.
  GradientsAhead(std::vector<uint64_t> slot_bytes, uint64_t ahead_bytes,
                 std::vector<uint64_t> read_bytes = {}, uint64_t read_ahead_bytes = 0);

  // A gradient is asked from then on, until it leaves.
  void Join(uint32_t tensor, Awaited* gradient);
  void Leave(uint32_t tensor, const Awaited* gradient);

  // A pass has added to it.
  void Added(uint32_t tensor);
  // The optimizer's step: what was added to since the last one becomes the schedule.
  void EndStep();

 private:
  std::mutex mutex_;
  Schedule schedule_, reads_;
  std::vector<Awaited*> gradients_;             // by number; null: none
  std::deque<uint32_t> wanted_, wanted_reads_;  // in the schedules' order
};

}  // namespace offload::zero3

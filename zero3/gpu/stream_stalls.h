// zero3/gpu/stream_stalls.h
//
// How long streams of a device wait for bytes: a wait stands between two events of its stream,
// whose times are read when both are done. Nobody waits for them.
//
// Thread safety: as its owner: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "accelerator/accelerator.h"
#include "accelerator/timing.h"
#include "zero3/gpu/event_pool.h"

namespace offload::zero3 {

class StreamStalls {
 public:
  // Of an accelerator that tells no time (accelerator/timing.h) nothing is measured. It outlives
  // this.
  explicit StreamStalls(accelerator::Accelerator* accelerator)
      : accelerator_(accelerator),
        timing_(accelerator::TimingDeviceOf(accelerator)),
        events_(accelerator, timing_) {}
  StreamStalls(const StreamStalls&) = delete;
  StreamStalls& operator=(const StreamStalls&) = delete;

  // As StreamWaitEvent, and measures it. Of more than kWaitsMax that are not done yet some go
  // unmeasured.
  absl::Status Wait(accelerator::Stream stream, accelerator::Event event);
  // Of the oldest waits, up to the first that is not known to have ended; of a device that has
  // failed what was known before.
  double Seconds();

 private:
  static constexpr size_t kWaitsMax = 1024;

  struct Measured {
    RecordedEvent begin, end;
  };
  enum class Upto : uint8_t { kFirstUnknown, kEnd };
  absl::Status Collect(Upto upto);

  accelerator::Accelerator* const accelerator_;
  accelerator::TimingDevice* const timing_;
  EventPool events_;
  std::deque<Measured> waits_;  // oldest first
  double seconds_ = 0;
};

}  // namespace offload::zero3

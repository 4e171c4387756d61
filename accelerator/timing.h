// accelerator/timing.h
//
// Devices that can say how long lay between two of their events.
//
// Errors: OFD-2004, as accelerator.h.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

// An Accelerator may be one of these, too.
class TimingDevice {
 public:
  virtual ~TimingDevice() = default;

  // An event whose time counts, otherwise as EventCreate()'s, and destroyed as that.
  virtual absl::StatusOr<Event> TimedEventCreate() = 0;
  // From the execution of one to that of another that was recorded behind it on the same stream;
  // nothing while one of them is not done. Both are timed. It is no wait: that they are done says
  // nothing of memory.
  virtual absl::StatusOr<std::optional<double>> SecondsBetween(Event begin, Event end) = 0;
};

// Of a device that is none: null.
inline TimingDevice* TimingDeviceOf(Accelerator* device) {
  return dynamic_cast<TimingDevice*>(device);
}

}  // namespace offload::accelerator

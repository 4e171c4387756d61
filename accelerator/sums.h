// accelerator/sums.h
//
// Devices that add.
//
// Errors: OFD-2004, as accelerator.h.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include "absl/status/status.h"
#include "accelerator/accelerator.h"
#include "kernels/device_sum.h"

namespace offload::accelerator {

// An Accelerator may be one of these, too.
class SummingDevice {
 public:
  virtual ~SummingDevice() = default;

  // Launches an ordered sum of parts that are in device memory.
  virtual absl::Status AddParts(const kernels::DeviceSum& sum, Stream stream) = 0;
};

// Of a device that is none: null.
inline SummingDevice* SummingDeviceOf(Accelerator* device) {
  return dynamic_cast<SummingDevice*>(device);
}

}  // namespace offload::accelerator

// accelerator/copy_rates.h
//
// How fast a device copies from page-locked memory of the host and to it, measured; and whether it
// may read memory that is mapped as a job's slab is: sealed, and read-only. Where it may not,
// weights pass through a staging ring, which costs a copy by the processor.
//
// Thread safety: one thread per accelerator; waits for what it measures.
#pragma once

#include <cstddef>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

struct CopyRates {
  double to_device = 0, to_host = 0;  // bytes a second
  double both = 0;                    // of both directions at once, in all
  bool registers_slab = false;
};

inline constexpr size_t kMeasuredBytes = size_t{64} << 20;

// Copies `size_bytes` several times each way. OFD-2003 when the device has no room for twice that,
// OFD-2001 when the host's memory cannot be page-locked.
absl::StatusOr<CopyRates> MeasureCopyRates(Accelerator* accelerator,
                                           size_t size_bytes = kMeasuredBytes);

}  // namespace offload::accelerator

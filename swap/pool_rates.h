// swap/pool_rates.h
//
// What a pool gives, measured the way its stores will use it: large direct writes and reads side by
// side through the scratch file's devices, over all drives of the pool, and single sectors for the
// latency.
//
// Thread safety: blocks for some hundredths of a second; any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "aio/device.h"

namespace offload::swap {

struct PoolRates {
  double read_bytes_per_second = 0, write_bytes_per_second = 0;  // each alone
  double latency_seconds = 0;                                    // of a sector's read, the shortest
};

// Leaves nothing behind. Errors as Scratch::Create and Scratch::Reserve, and OFD-1209.
absl::StatusOr<PoolRates> MeasurePool(const std::string& pool, const aio::OpenOptions& io);

}  // namespace offload::swap

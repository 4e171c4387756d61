// tools/drive_benchmark.h
//
// Measures what a drive gives our own I/O path: O_DIRECT through aio::Device, on a scratch file
// without a name, so that nothing can be left behind.
//
// Three patterns, each for a set time, in the order of the file and with a flush at the end: reads,
// writes, and the mix of a step. A step of a bf16 model with all state on the drive moves, per
// extent of 256 Ki elements, 2.5 MiB of residual and moments and twice 512 KiB of weights in, and 3
// MiB out: 14 B read for 12 B written per parameter, eight extents being read while eight others
// are written.
//
// Thread safety: pure; blocks for about the time that it is given.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "aio/device.h"

namespace offload::tools {

struct DriveBenchmarkOptions {
  uint64_t file_bytes = uint64_t{1} << 30;  // at most; at least kSmallestScratchBytes
  double seconds_per_pattern = 2;           // and as much again for filling the file, at most
  aio::Engine engine = aio::Engine::kAuto;
};
inline constexpr uint64_t kSmallestScratchBytes = uint64_t{96} << 20;

// Bytes per second; mixed counts both directions.
struct DriveRates {
  double read = 0, write = 0, mixed = 0;
  uint64_t file_bytes = 0;  // that the patterns ran over
  std::string engine;
};

// OFD-1201…1204 for a pool that cannot be used, OFD-1211, or the drive's own errors.
absl::StatusOr<DriveRates> MeasureDrive(const std::string& pool,
                                        const DriveBenchmarkOptions& options);

}  // namespace offload::tools

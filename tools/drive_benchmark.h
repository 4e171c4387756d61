// tools/drive_benchmark.h
//
// Measures what a drive gives our own I/O path: blocks of one size, moved as fast as it goes,
// through the bare device or through the store, checksums taken and verified.
//
// `depth` blocks are under way at a time, in the order of the file, with a flush or commit at the
// end. The patterns are reads, writes, and the mix of a step: a block is read, worked on and
// written to its other place, and every sixth is read once more, which makes 7 reads for 6 writes
// (14 bytes read for 12 written per parameter). Checksums are taken on a thread, as the daemon
// does, or on the one that polls where that is asked for. Memory is as the daemon's slab.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "aio/device.h"

namespace offload::tools {

struct DriveBenchmarkOptions {
  std::string pool;
  std::string scratch_path;  // of the device's file; "": it has no name, and nothing can be left
  aio::Engine engine = aio::Engine::kAuto;
  uint64_t block_bytes = 1 << 20;             // a power of two, 4 KiB to 16 MiB
  uint64_t file_bytes = uint64_t{512} << 20;  // two places of each block
  uint32_t depth = 32;
  // Unwritten blocks are read without the drive, and are slower to write: where the time does not
  // do for the whole file, only what is filled counts.
  double fill_seconds_max = std::numeric_limits<double>::infinity();
  bool has_store = false;  // beside the device, of the same size, filled whole
  bool checksums_on_thread = true;
  bool registers_buffers = true;
};

class DriveBenchmark {
 public:
  enum class Through { kDevice, kStore };
  enum class Pattern { kRead, kWrite, kMixed };

  // Makes a scratch file, and a store if asked for, in the pool, both full of noise. They are gone
  // with the object, but for a scratch file with a name. OFD-1201…1204 for a pool that cannot be
  // used, OFD-1211, or the drive's own errors.
  static absl::StatusOr<std::unique_ptr<DriveBenchmark>> Make(const DriveBenchmarkOptions& options);
  ~DriveBenchmark();

  // Bytes per second in both directions, the commit or flush at the end included.
  absl::StatusOr<double> Run(Through through, Pattern pattern, double seconds);

  uint64_t file_bytes() const;  // of the device's file that are filled and used
  std::string engine() const;

 private:
  struct Impl;
  explicit DriveBenchmark(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Bytes per second; mixed counts both directions.
struct DriveRates {
  double read = 0, write = 0, mixed = 0;
  uint64_t file_bytes = 0;
  std::string engine;
};

// Runs the three patterns on the bare device, for so long each; filling takes as long again, at
// most. The file has kMeasuredBytesMin at least.
absl::StatusOr<DriveRates> MeasureDrive(DriveBenchmarkOptions options, double seconds_per_pattern);
inline constexpr uint64_t kMeasuredBytesMin = uint64_t{96} << 20;

}  // namespace offload::tools

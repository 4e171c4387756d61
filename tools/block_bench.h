// tools/block_bench.h
//
// Moves blocks of one size as fast as it can, either through the store, checksums taken and
// verified, or through the bare device: what the store costs.
//
// `depth` blocks are under way at a time, in the order of the file. The mix is that of a step: a
// block is read, worked on and written to its other place, and every sixth is read once more, which
// makes 7 reads for 6 writes (14 bytes read for 12 written per parameter). Checksums are taken on
// a thread, as the daemon does, or on the one that polls where that is asked for.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "aio/device.h"

namespace offload::tools {

struct BlockBenchOptions {
  std::string pool;
  std::string scratch_path;  // of the device's file; "": it has no name
  aio::Engine engine = aio::Engine::kAuto;
  uint64_t block_bytes = 1 << 20;  // a power of two, 4 KiB to 16 MiB
  uint64_t data_bytes = uint64_t{256} << 20;
  uint32_t depth = 16;
  bool checksums_on_thread = true;
  bool registers_buffers = true;
};

class BlockBench {
 public:
  enum class Pattern { kRead, kWrite, kMixed };

  // Makes a store and a scratch file of twice data_bytes in the pool, both full of noise. They are
  // gone with the object, but for a scratch file with a name.
  static absl::StatusOr<std::unique_ptr<BlockBench>> Make(const BlockBenchOptions& options);
  ~BlockBench();

  // Bytes per second in both directions, the commit or flush at the end included.
  absl::StatusOr<double> RunStore(Pattern pattern, double seconds);
  absl::StatusOr<double> RunDevice(Pattern pattern, double seconds);

  std::string engine() const;

 private:
  struct Impl;
  explicit BlockBench(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace offload::tools

// accelerator/peers.h
//
// Several devices of a node, one for each rank, that copy from each other without the host: on CUDA
// by NCCL, on the stand-in by memory that its processes share.
//
// Errors: OFD-2004 from everything after a failure or Abort().
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

// A range of device memory that is divided among the ranks: slice r is
// [offsets_bytes[r], offsets_bytes[r + 1]) of it.
struct SlicedRange {
  const std::byte* from = nullptr;    // this rank's bytes, of which it reads the others' slices
  std::vector<size_t> offsets_bytes;  // the same in all ranks; of one more than there are ranks
  // By rank: where its bytes of this rank's own slice are written. The own one is not used.
  std::vector<std::byte*> to;
};

// A rank's end of the connection between all ranks.
class Collectives {
 public:
  virtual ~Collectives() = default;  // what is under way has ended, or is aborted

  // Collective: all ranks call it in the same order, with the same `part_bytes`, on one stream
  // each. `bytes`, device memory, are as many parts as there are ranks: the rank's own, at
  // rank · part_bytes, is read and the others are written. Returns without waiting for the device.
  // A rank that does not come leaves the others' streams where they are until Abort().
  virtual absl::Status AllGather(std::byte* bytes, size_t part_bytes, Stream stream) = 0;
  // Collective, as above: of every range each rank gets its own slice from every other one. What a
  // rank moves is what a reduce-scatter moves; nothing is computed.
  virtual absl::Status ExchangeSlices(std::span<const SlicedRange> ranges, Stream stream) = 0;
  // Why the connection has failed, as far as it knows; never waits. It may not notice that a rank
  // has died.
  virtual absl::Status AsyncError() = 0;
  // What is under way ends soon, and leaves any bytes where those of other ranks come. Of this rank
  // only: the others have to be told.
  virtual void Abort() = 0;
};

// What a device knows of others.
class Peers {
 public:
  virtual ~Peers() = default;

  // The device's name for all processes of the node.
  virtual std::string Address() const = 0;
  // Whether this device reads and writes the memory of another one directly. Not of itself.
  virtual bool CanAccess(const std::string& address) const = 0;
  // Names a connection of `world_size` ranks: called by one of them, which tells the others, any
  // bytes.
  virtual absl::StatusOr<std::string> MakeId(uint32_t world_size) = 0;
  // Collective: connects the ranks. Waits for all of them, a minute at most.
  virtual absl::StatusOr<std::unique_ptr<Collectives>> Join(const std::string& id, uint32_t rank,
                                                            uint32_t world_size) = 0;
};

// An Accelerator may be one of these, too.
class PeerDevice {
 public:
  virtual ~PeerDevice() = default;

  // How the devices of other ranks are reached, for the life of this one; null when they are not.
  virtual Peers* peers() = 0;
};

// Of a device that is none: null.
Peers* PeersOf(Accelerator* device);

}  // namespace offload::accelerator

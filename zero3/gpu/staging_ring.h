// zero3/gpu/staging_ring.h
//
// Copies to the device from host memory that could not be registered: the processor puts the bytes
// into a ring that is, piece by piece, and the device takes them from there. Costs a core its
// bandwidth; what it buys is that nothing pageable is ever copied.
//
// Thread safety: none; the owner's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "zero3/gpu/event_pool.h"

namespace offload::zero3 {

class StagingRing {
 public:
  // `ring` is registered and outlives this; it holds at least kPieces bytes.
  StagingRing(accelerator::Accelerator* accelerator, EventPool* events, std::span<std::byte> ring);

  // Copies on `stream`. When it returns the source has been read; waits on the host for room.
  absl::Status CopyToDevice(std::byte* device, std::span<const std::byte> source,
                            accelerator::Stream stream);
  // Whether a copy of `size_bytes` would find room without waiting, or has the ring for itself.
  absl::StatusOr<bool> HasRoom(uint64_t size_bytes);

  static constexpr uint64_t kPieces = 8;  // of the longest size in a ring

 private:
  struct Piece {
    uint64_t begin, end;
    RecordedEvent copied;
  };

  absl::StatusOr<uint64_t> TakePiece(uint64_t size_bytes);

  accelerator::Accelerator* const accelerator_;
  EventPool* const events_;
  const std::span<std::byte> ring_;
  std::deque<Piece> pieces_;  // whose copies may be under way, in their order
  uint64_t head_ = 0;
  uint64_t under_way_bytes_ = 0;
};

}  // namespace offload::zero3

// zero3/torch/tier_transfers.h
//
// Moves what a device keeps of tensors (device_tier.h) into the daemon's planes and back, block by
// block through the staging buffer, which is page-locked: no copy has a pageable end. While the
// device copies one block, the host works on the one before, and the daemon has those before that.
//
// A device has masters of bf16 and fp16 tensors in two parts, as kernels/split.h says, and bf16
// ones with tie bits of its own (kernels/device_update.h). They are put together, and taken apart,
// where they are in the staging buffer.
//
// A call returns when everything has arrived. It waits for the oldest copy at a time, once a block.
//
// Errors: those of the device and of the session. Nothing is on its way after one.
//
// Thread safety: none; the owner's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "client/session.h"
#include "proto/plane_set.h"
#include "zero3/gpu/event_pool.h"
#include "zero3/torch/attachment.h"

namespace offload::zero3 {

class TierTransfers {
 public:
  // One of the daemon's planes, and where the device has it.
  struct Source {
    uint32_t tensor = 0;
    proto::Plane plane = proto::Plane::kWeight;
    std::byte* bytes = nullptr;     // of masters in parts: the weights
    std::byte* residual = nullptr;  // of masters in parts
    std::byte* ties = nullptr;      // of bf16 masters
  };

  // Both outlive this. Throws when the device cannot.
  TierTransfers(Attachment& attachment, accelerator::Accelerator* accelerator);
  ~TierTransfers();
  TierTransfers(const TierTransfers&) = delete;
  TierTransfers& operator=(const TierTransfers&) = delete;

  // On which copies are made: what they come after is for the caller to say.
  accelerator::Stream stream() const { return copies_; }

  // Into the daemon's planes; out of them.
  absl::Status Put(std::span<const Source> sources);
  absl::Status Fetch(std::span<const Source> sources);
  // From memory of any kind.
  absl::Status Upload(std::byte* device, std::span<const std::byte> bytes);

 private:
  enum class Direction : uint8_t { kPut, kFetch };

  // So many elements of a plane, in a piece of the staging buffer: as the daemon has them, and
  // behind that the part of a master that finds no place there, with its tie bits.
  struct Block {
    const Source* source = nullptr;
    uint64_t begin = 0, count = 0;
    uint64_t region_offset = 0, size_bytes = 0;
    std::byte* plane = nullptr;
    std::byte* part = nullptr;
    std::byte* ties = nullptr;
    client::Ticket ticket = 0;
    RecordedEvent copied;
  };

  absl::Status Run(Direction direction, std::span<const Source> sources);
  absl::Status RunAll(std::span<const Source> sources);
  absl::Status Begin(const Source& source, uint64_t begin, uint64_t count);
  absl::Status Continue();
  absl::Status End();
  void Abandon();
  absl::StatusOr<uint64_t> TakeRoom(uint64_t size_bytes);
  absl::Status WaitForCopy(const Block& block);
  absl::Status StartCopies(Block& block);
  void Merge(const Block& block) const;
  void Split(const Block& block) const;
  bool IsInParts(const Source& source) const { return source.residual != nullptr; }
  bool HasTies(const Source& source) const { return source.ties != nullptr; }
  uint64_t ElementBytes(const Source& source) const;
  uint64_t RoomBytes(const Source& source, uint64_t count) const;

  Attachment& attachment_;
  accelerator::Accelerator* const accelerator_;
  EventPool events_;
  accelerator::Stream copies_;
  // ---- Of the call that runs ----
  Direction direction_ = Direction::kPut;
  uint64_t ring_begin_ = 0, ring_bytes_ = 0, head_ = 0;  // of the staging buffer
  // Oldest first. Of puts the device has the first and the daemon the second; of fetches it is the
  // other way round. All of the second are older than the first.
  std::deque<Block> first_, second_;
};

}  // namespace offload::zero3

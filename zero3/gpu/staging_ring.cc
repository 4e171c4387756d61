#include "zero3/gpu/staging_ring.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/status_macros.h"

namespace offload::zero3 {

StagingRing::StagingRing(accelerator::Accelerator* accelerator, EventPool* events,
                         std::span<std::byte> ring)
    : accelerator_(accelerator), events_(events), ring_(ring) {
  OFFLOAD_CHECK(ring.size() >= kPieces) << ring.size() << " B";
}

absl::Status StagingRing::CopyToDevice(std::byte* device, std::span<const std::byte> source,
                                       accelerator::Stream stream) {
  const uint64_t longest_bytes = ring_.size() / kPieces;
  while (!source.empty()) {
    const uint64_t size_bytes = std::min<uint64_t>(source.size(), longest_bytes);
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t begin, TakePiece(size_bytes));
    std::byte* const piece = ring_.data() + begin;
    accelerator_->NoteHostUse(accelerator::Use::kWrite, piece, size_bytes);
    std::memcpy(piece, source.data(), size_bytes);
    OFFLOAD_RETURN_IF_ERROR(accelerator_->MemcpyToDevice(device, piece, size_bytes, stream));
    OFFLOAD_ASSIGN_OR_RETURN(RecordedEvent copied, events_->Record(stream));
    pieces_.push_back({begin, begin + size_bytes, std::move(copied)});
    under_way_bytes_ += size_bytes;
    device += size_bytes;
    source = source.subspan(size_bytes);
  }
  return absl::OkStatus();
}

// Pieces lie one behind the other and are copied in that order, so the oldest one is the first in
// the way.
absl::StatusOr<uint64_t> StagingRing::TakePiece(uint64_t size_bytes) {
  const uint64_t begin = head_ + size_bytes <= ring_.size() ? head_ : 0;
  const uint64_t end = begin + size_bytes;
  const auto is_in_the_way = [&](const Piece& piece) {
    return piece.begin < end && begin < piece.end;
  };
  while (std::ranges::any_of(pieces_, is_in_the_way)) {
    OFFLOAD_RETURN_IF_ERROR(accelerator_->EventSynchronize(*pieces_.front().copied));
    under_way_bytes_ -= pieces_.front().end - pieces_.front().begin;
    pieces_.pop_front();
  }
  head_ = end;
  return begin;
}

absl::StatusOr<bool> StagingRing::HasRoom(uint64_t size_bytes) {
  while (!pieces_.empty()) {
    OFFLOAD_ASSIGN_OR_RETURN(const bool is_copied,
                             accelerator_->EventQuery(*pieces_.front().copied));
    if (!is_copied) break;
    under_way_bytes_ -= pieces_.front().end - pieces_.front().begin;
    pieces_.pop_front();
  }
  // At the end of the ring, now and at the last turn, less than a piece each may be left out.
  const uint64_t left_out_bytes = 2 * (ring_.size() / kPieces);
  return pieces_.empty() || under_way_bytes_ + size_bytes + left_out_bytes <= ring_.size();
}

}  // namespace offload::zero3

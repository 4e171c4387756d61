#include "zero3/torch/tier_transfers.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/status_macros.h"
#include "kernels/device_update.h"
#include "kernels/split.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/staging_ring.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using proto::Plane;

// Of the staging buffer, whose other half the window may have for weights.
constexpr uint64_t kRingBytesMax = proto::kLoadingStagingBytes / 2;
// Blocks that the device copies beside the newest one, and that the daemon reads: the drive answers
// later than the link.
constexpr size_t kCopiesAhead = 1, kReadsAhead = 2;
// Masters are put together and taken apart in place, by way of so many at a time.
constexpr uint64_t kChunkElements = 1024;

uint64_t TieBytes(uint64_t count) { return kernels::TieWords(count) * sizeof(uint32_t); }

template <class Work>
void ForEachChunk(uint64_t count, const Work& work) {
  for (uint64_t begin = 0; begin < count; begin += kChunkElements)
    work(begin, std::min(kChunkElements, count - begin));
}

}  // namespace

TierTransfers::TierTransfers(Attachment& attachment, accelerator::Accelerator* accelerator)
    : attachment_(attachment),
      accelerator_(accelerator),
      events_(accelerator),
      copies_(ValueOrThrow(accelerator->StreamCreate())) {}

TierTransfers::~TierTransfers() { accelerator_->StreamDestroy(copies_).IgnoreError(); }

absl::Status TierTransfers::Put(std::span<const Source> sources) {
  return Run(Direction::kPut, sources);
}

absl::Status TierTransfers::Fetch(std::span<const Source> sources) {
  return Run(Direction::kFetch, sources);
}

absl::Status TierTransfers::Upload(std::byte* device, std::span<const std::byte> bytes) {
  const DaemonWait wait(attachment_);
  const Staging::Piece piece = attachment_.staging().Take(kRingBytesMax);
  StagingRing ring(accelerator_, &events_,
                   {attachment_.region() + piece.region_offset(), kRingBytesMax});
  Block all;
  absl::Status copied = ring.CopyToDevice(device, bytes, copies_);
  if (absl::StatusOr<RecordedEvent> event = events_.Record(copies_); event.ok())
    all.copied = *std::move(event);
  copied.Update(WaitForCopy(all));
  return copied;
}

// ---- Blocks ------------------------------------------------------------------------------------

absl::Status TierTransfers::Run(Direction direction, std::span<const Source> sources) {
  if (sources.empty()) return absl::OkStatus();
  const DaemonWait wait(attachment_);
  uint64_t all_bytes = 0;
  for (const Source& source : sources) {
    const uint64_t count = attachment_.tensor(source.tensor).element_count;
    all_bytes += RoomBytes(source, proto::kExtentElements) * (count / proto::kExtentElements) +
                 RoomBytes(source, count % proto::kExtentElements);
  }
  const Staging::Piece piece = attachment_.staging().Take(std::min(all_bytes, kRingBytesMax));
  direction_ = direction;
  ring_begin_ = piece.region_offset();
  ring_bytes_ = piece.size_bytes();
  head_ = 0;
  const absl::Status status = RunAll(sources);
  if (!status.ok()) Abandon();
  return status;
}

absl::Status TierTransfers::RunAll(std::span<const Source> sources) {
  for (const Source& source : sources) {
    const uint64_t element_count = attachment_.tensor(source.tensor).element_count;
    for (uint64_t begin = 0; begin < element_count; begin += proto::kExtentElements) {
      OFFLOAD_RETURN_IF_ERROR(
          Begin(source, begin, std::min<uint64_t>(element_count - begin, proto::kExtentElements)));
      const size_t ahead = direction_ == Direction::kPut ? kCopiesAhead : kReadsAhead;
      while (first_.size() > ahead) OFFLOAD_RETURN_IF_ERROR(Continue());
    }
  }
  while (!first_.empty()) OFFLOAD_RETURN_IF_ERROR(Continue());
  while (!second_.empty()) OFFLOAD_RETURN_IF_ERROR(End());
  return absl::OkStatus();
}

absl::Status TierTransfers::Begin(const Source& source, uint64_t begin, uint64_t count) {
  const bool is_put = direction_ == Direction::kPut;
  const bool is_master = source.plane == Plane::kWeight || source.plane == Plane::kMaster;
  if (is_put && is_master && begin == 0) FaultPoint("tier.put");
  Block block{.source = &source, .begin = begin, .count = count};
  block.size_bytes = RoomBytes(source, count);
  OFFLOAD_ASSIGN_OR_RETURN(block.region_offset, TakeRoom(block.size_bytes));
  block.plane = attachment_.region() + block.region_offset;
  block.part = block.plane + proto::PaddedBytes(count * ElementBytes(source));
  block.ties = block.part + proto::PaddedBytes(count * sizeof(uint16_t));
  first_.push_back(std::move(block));
  if (is_put) return StartCopies(first_.back());
  accelerator_->NoteHostUse(accelerator::Use::kWrite, first_.back().plane,
                            first_.back().size_bytes);
  first_.back().ticket = attachment_.session().Get(source.tensor, source.plane, begin, count,
                                                   first_.back().region_offset);
  return absl::OkStatus();
}

// The device has brought the oldest of the first, and the daemon gets it; or the other way round.
absl::Status TierTransfers::Continue() {
  Block& block = first_.front();
  const Source& source = *block.source;
  if (direction_ == Direction::kPut) {
    OFFLOAD_RETURN_IF_ERROR(WaitForCopy(block));
    accelerator_->NoteHostUse(accelerator::Use::kWrite, block.plane, block.size_bytes);
    if (IsInParts(source)) Merge(block);
    block.ticket = attachment_.session().PutPlane(source.tensor, source.plane, block.begin,
                                                  block.count, block.region_offset);
  } else {
    const absl::Status got =
        attachment_.session().Wait(std::exchange(block.ticket, client::Ticket{}));
    OFFLOAD_RETURN_IF_ERROR(got);
    if (IsInParts(source)) Split(block);
    OFFLOAD_RETURN_IF_ERROR(StartCopies(block));
  }
  second_.push_back(std::move(block));
  first_.pop_front();
  return absl::OkStatus();
}

absl::Status TierTransfers::End() {
  Block block = std::move(second_.front());
  second_.pop_front();
  return direction_ == Direction::kPut ? attachment_.session().Wait(block.ticket)
                                       : WaitForCopy(block);
}

// Whatever has begun ends before the staging buffer is somebody else's. A device that has failed
// copies nothing any more.
void TierTransfers::Abandon() {
  for (std::deque<Block>* const blocks : {&second_, &first_}) {
    for (const Block& block : *blocks) {
      if (block.ticket != 0) attachment_.session().Wait(block.ticket).IgnoreError();
      WaitForCopy(block).IgnoreError();
    }
    blocks->clear();
  }
}

// Blocks lie one behind the other and end in that order, so the oldest one is the first in the way.
absl::StatusOr<uint64_t> TierTransfers::TakeRoom(uint64_t size_bytes) {
  const uint64_t offset = head_ + size_bytes <= ring_bytes_ ? head_ : 0;
  const uint64_t begin = ring_begin_ + offset, end = begin + size_bytes;
  const auto is_in_the_way = [&](const Block& block) {
    return block.region_offset < end && begin < block.region_offset + block.size_bytes;
  };
  while (std::ranges::any_of(first_, is_in_the_way) || std::ranges::any_of(second_, is_in_the_way))
    OFFLOAD_RETURN_IF_ERROR(second_.empty() ? Continue() : End());
  head_ = offset + size_bytes;
  return begin;
}

absl::Status TierTransfers::WaitForCopy(const Block& block) {
  if (block.copied == nullptr) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const bool is_there, accelerator_->EventQuery(*block.copied));
  return is_there ? absl::OkStatus() : accelerator_->EventSynchronize(*block.copied);
}

uint64_t TierTransfers::ElementBytes(const Source& source) const {
  return attachment_.input().catalogue.planes(source.tensor).Bits(source.plane) / 8;
}

uint64_t TierTransfers::RoomBytes(const Source& source, uint64_t count) const {
  uint64_t size_bytes = proto::PaddedBytes(count * ElementBytes(source));
  if (IsInParts(source)) size_bytes += proto::PaddedBytes(count * sizeof(uint16_t));
  if (HasTies(source)) size_bytes += proto::PaddedBytes(TieBytes(count));
  return size_bytes;
}

// ---- What a block holds ------------------------------------------------------------------------
//
// A master in parts, element by element: of bf16 the weights (2 B) are in the plane (4 B) and the
// residual beside it; of fp16 the residual (4 B) and the weights (2 B). While masters are put
// together the weights of bf16 lie in the second half of the plane, so that none is overwritten
// before it is read; while they are taken apart, in the first.

absl::Status TierTransfers::StartCopies(Block& block) {
  const Source& source = *block.source;
  const bool is_put = direction_ == Direction::kPut;
  const auto copy = [&](std::byte* host, std::byte* device, uint64_t size_bytes) {
    return is_put ? accelerator_->MemcpyToHost(host, device, size_bytes, copies_)
                  : accelerator_->MemcpyToDevice(device, host, size_bytes, copies_);
  };
  constexpr uint64_t kNarrow = sizeof(uint16_t), kWide = sizeof(uint32_t);
  if (!IsInParts(source)) {
    const uint64_t element_bytes = ElementBytes(source);
    OFFLOAD_RETURN_IF_ERROR(
        copy(block.plane, source.bytes + block.begin * element_bytes, block.count * element_bytes));
  } else if (HasTies(source)) {
    OFFLOAD_RETURN_IF_ERROR(copy(block.plane + (is_put ? block.count * kNarrow : 0),
                                 source.bytes + block.begin * kNarrow, block.count * kNarrow));
    OFFLOAD_RETURN_IF_ERROR(
        copy(block.part, source.residual + block.begin * kNarrow, block.count * kNarrow));
    // Blocks begin at whole words of tie bits.
    OFFLOAD_RETURN_IF_ERROR(
        copy(block.ties, source.ties + TieBytes(block.begin), TieBytes(block.count)));
  } else {
    OFFLOAD_RETURN_IF_ERROR(
        copy(block.plane, source.residual + block.begin * kWide, block.count * kWide));
    OFFLOAD_RETURN_IF_ERROR(
        copy(block.part, source.bytes + block.begin * kNarrow, block.count * kNarrow));
  }
  OFFLOAD_ASSIGN_OR_RETURN(block.copied, events_.Record(copies_));
  return absl::OkStatus();
}

void TierTransfers::Merge(const Block& block) const {
  const auto chunk_of = [&](uint64_t begin) { return block.plane + begin * sizeof(uint32_t); };
  if (!HasTies(*block.source)) {
    const auto* const weights = reinterpret_cast<const kernels::Half*>(block.part);
    uint32_t residual[kChunkElements];
    ForEachChunk(block.count, [&](uint64_t begin, uint64_t count) {
      std::memcpy(residual, chunk_of(begin), count * sizeof(uint32_t));
      kernels::MergeHalf(weights + begin, residual, count,
                         reinterpret_cast<float*>(chunk_of(begin)));
    });
    return;
  }
  const auto* const hi = block.plane + block.count * sizeof(uint16_t);
  const auto* const lo = reinterpret_cast<const int16_t*>(block.part);
  std::vector<uint8_t> packed(block.count / 8 + 1);
  kernels::TieWriter writer{packed.data()};
  kernels::PackTies(lo, block.count, reinterpret_cast<const uint32_t*>(block.ties), &writer);
  kernels::TieReader reader{packed.data()};
  uint16_t weights[kChunkElements];
  ForEachChunk(block.count, [&](uint64_t begin, uint64_t count) {
    std::memcpy(weights, hi + begin * sizeof(uint16_t), count * sizeof(uint16_t));
    kernels::Merge(weights, lo + begin, count, reinterpret_cast<uint32_t*>(chunk_of(begin)),
                   &reader);
  });
}

void TierTransfers::Split(const Block& block) const {
  const auto chunk_of = [&](uint64_t begin) { return block.plane + begin * sizeof(uint32_t); };
  if (!HasTies(*block.source)) {
    auto* const weights = reinterpret_cast<kernels::Half*>(block.part);
    float masters[kChunkElements];
    ForEachChunk(block.count, [&](uint64_t begin, uint64_t count) {
      std::memcpy(masters, chunk_of(begin), count * sizeof(float));
      kernels::SplitHalf(masters, count, weights + begin,
                         reinterpret_cast<uint32_t*>(chunk_of(begin)));
    });
    return;
  }
  auto* const hi = reinterpret_cast<uint16_t*>(block.plane);
  auto* const lo = reinterpret_cast<int16_t*>(block.part);
  std::vector<uint8_t> packed(block.count / 8 + 1);
  kernels::TieWriter writer{packed.data()};
  uint32_t masters[kChunkElements];
  ForEachChunk(block.count, [&](uint64_t begin, uint64_t count) {
    std::memcpy(masters, chunk_of(begin), count * sizeof(uint32_t));
    kernels::Split(masters, count, hi + begin, lo + begin, &writer);
  });
  kernels::TieReader reader{packed.data()};
  kernels::UnpackTies(lo, block.count, &reader, reinterpret_cast<uint32_t*>(block.ties));
}

}  // namespace offload::zero3

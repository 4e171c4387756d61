#include "aio/memory_device.h"

#include <cstring>
#include <utility>

#include "aio/errno_status.h"

namespace offload::aio {

MemoryDevice::MemoryDevice(uint64_t size_bytes, std::optional<uint64_t> seed,
                           uint32_t offset_alignment, uint32_t memory_alignment)
    : geometry_{size_bytes, offset_alignment, memory_alignment}, bytes_(size_bytes), queue_(seed) {}

size_t MemoryDevice::Poll(bool wait) {
  size_t completed = CompleteRefused();
  for (size_t count = queue_.ChooseCount(); count > 0; --count, ++completed) {
    std::unique_ptr<Op> op = queue_.Pop();
    absl::Status status = Transfer(*op);
    Complete(std::move(op), std::move(status));
  }
  return completed;
}

absl::Status MemoryDevice::Transfer(const Op& op) {
  uint64_t offset_bytes = op.offset_bytes;
  for (const iovec& piece : op.pieces) {
    if (offset_bytes + piece.iov_len > bytes_.size()) {
      return ShortTransferStatus(op.kind, op.offset_bytes, op.size_bytes,
                                 offset_bytes - op.offset_bytes);
    }
    std::byte* stored = bytes_.data() + offset_bytes;
    if (op.kind == Kind::kRead) {
      std::memcpy(piece.iov_base, stored, piece.iov_len);
    } else {
      std::memcpy(stored, piece.iov_base, piece.iov_len);
    }
    offset_bytes += piece.iov_len;
  }
  return absl::OkStatus();
}

}  // namespace offload::aio

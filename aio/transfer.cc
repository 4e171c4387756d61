#include "aio/transfer.h"

#include <cerrno>
#include <utility>

#include "aio/errno_status.h"
#include "base/check.h"
#include "base/checked.h"

namespace offload::aio {
namespace {

std::byte* EndOf(const iovec& piece) {
  return static_cast<std::byte*>(piece.iov_base) + piece.iov_len;
}

}  // namespace

Transfer::Transfer(Device::Kind kind, uint64_t offset_bytes, const std::vector<iovec>& pieces,
                   uint32_t offset_alignment)
    : kind_(kind), offset_bytes_(offset_bytes), offset_alignment_(offset_alignment) {
  pieces_.reserve(pieces.size());
  for (const iovec& piece : pieces) {
    size_bytes_ += piece.iov_len;
    if (!pieces_.empty() && EndOf(pieces_.back()) == piece.iov_base) {
      pieces_.back().iov_len += piece.iov_len;
    } else {
      pieces_.push_back(piece);
    }
  }
}

std::optional<absl::Status> Transfer::Advance(int64_t result) {
  if ((result == -EAGAIN || result == -EINTR) && ++retry_count_ <= kRetriesMax) return std::nullopt;
  if (result < 0) {
    return IoErrorStatus(static_cast<int>(-result), kind_, offset_bytes_, size_bytes_);
  }
  if (kind_ == Device::Kind::kFlush) return absl::OkStatus();
  const auto bytes = static_cast<uint64_t>(result);
  OFFLOAD_CHECK(bytes <= size_bytes_ - done_bytes_) << bytes << " of " << size_bytes_;
  done_bytes_ += bytes;
  if (done_bytes_ == size_bytes_) return absl::OkStatus();
  if (bytes == 0 || !IsAligned(bytes, offset_alignment_)) {
    return ShortTransferStatus(kind_, offset_bytes_, size_bytes_, done_bytes_);
  }
  retry_count_ = 0;
  Skip(bytes);
  return std::nullopt;
}

void Transfer::Skip(uint64_t bytes) {
  while (bytes >= pieces_[first_piece_].iov_len) bytes -= pieces_[first_piece_++].iov_len;
  iovec& piece = pieces_[first_piece_];
  piece.iov_base = static_cast<std::byte*>(piece.iov_base) + bytes;
  piece.iov_len -= bytes;
}

}  // namespace offload::aio

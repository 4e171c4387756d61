// aio/transfer.h
//
// One operation on its way through system calls: what is left of it, and what a call's result
// means. Pure; all engines of the kernel drive it, so that their rules are the same.
//
//   result of a call            meaning
//   -EAGAIN, -EINTR             the same again, at most kRetriesMax times in a row; then that error
//   other negative              that error
//   0 for a read or write       the file ended: DATA_LOSS
//   fewer bytes than asked      go on behind them; inside a sector, where direct I/O cannot go
//                               on, the file ended: DATA_LOSS
//   all                         done
//
// Thread safety: none.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "aio/device.h"

namespace offload::aio {

class Transfer {
 public:
  static constexpr uint32_t kRetriesMax = 64;

  // `pieces` are those of a checked operation; empty for a flush. Neighbours in memory become one.
  Transfer(Device::Kind kind, uint64_t offset_bytes, const std::vector<iovec>& pieces,
           uint32_t offset_alignment);

  Device::Kind kind() const { return kind_; }
  uint64_t offset_bytes() const { return offset_bytes_ + done_bytes_; }
  uint64_t left_bytes() const { return size_bytes_ - done_bytes_; }
  // What is still to be transferred. Stays where it is until Advance().
  std::span<const iovec> pieces() const { return std::span(pieces_).subspan(first_piece_); }

  // Takes the result of a call for all of pieces(): bytes or a negated errno. Returns the outcome,
  // or nothing when another call is needed.
  std::optional<absl::Status> Advance(int64_t result);

 private:
  void Skip(uint64_t bytes);

  Device::Kind kind_;
  uint64_t offset_bytes_;
  uint64_t size_bytes_ = 0;
  uint64_t done_bytes_ = 0;
  uint32_t offset_alignment_;
  uint32_t retry_count_ = 0;
  size_t first_piece_ = 0;
  std::vector<iovec> pieces_;
};

}  // namespace offload::aio

// swap/traced_device.h
//
// Stands between a store, which owns its device, and a drive that outlives it; writes down what
// passes, so that two runs of a simulation can be compared. Internal to the simulator.
//
// Thread safety: as Device.
#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "aio/device.h"
#include "aio/faulty_device.h"
#include "base/crc32c.h"
#include "base/random.h"

namespace offload::swap {

// A hash over everything that happened, in order.
class Trace {
 public:
  void Add(uint64_t value) {
    hash_ ^= value;
    hash_ = SplitMix64(hash_);
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0;
};

// Where the bytes of each buffer were last read from.
using ReadRanges = std::map<const void*, aio::ByteRange>;

class TracedDevice final : public aio::Device {
 public:
  TracedDevice(aio::Device* behind, Trace* trace, ReadRanges* ranges)
      : behind_(*behind), trace_(*trace), ranges_(*ranges) {}
  ~TracedDevice() override { Drain(); }
  size_t Poll(bool wait) override {
    const size_t refused = CompleteRefused();
    return refused + behind_.Poll(wait);
  }
  int event_fd() const override { return -1; }
  const aio::Geometry& geometry() const override { return behind_.geometry(); }
  std::string_view engine() const override { return behind_.engine(); }

 protected:
  void Start(std::unique_ptr<Op> owned) override {
    Op* const op = owned.release();
    trace_.Add(static_cast<uint64_t>(op->kind) << 60 | op->offset_bytes);
    if (op->kind == Kind::kWrite) AddBytes(*op);
    if (op->kind == Kind::kRead) RememberRanges(*op);
    Done done = [this, op](absl::Status status) {
      trace_.Add(static_cast<uint64_t>(status.code()));
      if (op->kind == Kind::kRead && status.ok()) AddBytes(*op);
      Complete(std::unique_ptr<Op>(op), std::move(status));
    };
    if (op->kind == Kind::kFlush) return behind_.Flush(std::move(done));
    op->kind == Kind::kRead ? behind_.Read(op->offset_bytes, op->pieces, std::move(done))
                            : behind_.Write(op->offset_bytes, op->pieces, std::move(done));
  }

 private:
  void AddBytes(const Op& op) {
    for (const iovec& piece : op.pieces) trace_.Add(Crc32c(0, piece.iov_base, piece.iov_len));
  }
  void RememberRanges(const Op& op) {
    uint64_t offset_bytes = op.offset_bytes;
    for (const iovec& piece : op.pieces) {
      ranges_[piece.iov_base] = {offset_bytes, piece.iov_len};
      offset_bytes += piece.iov_len;
    }
  }
  aio::Device& behind_;
  Trace& trace_;
  ReadRanges& ranges_;
};

}  // namespace offload::swap

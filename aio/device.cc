#include "aio/device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/clock.h"

namespace offload::aio {
namespace {

void Count(std::atomic<uint64_t>& counter, uint64_t amount) {
  counter.fetch_add(amount, std::memory_order_relaxed);  // counters order nothing
}

}  // namespace

void Device::Read(uint64_t offset_bytes, std::span<const iovec> pieces, Done done) {
  Submit(Kind::kRead, offset_bytes, pieces, std::move(done));
}

void Device::Write(uint64_t offset_bytes, std::span<const iovec> pieces, Done done) {
  Submit(Kind::kWrite, offset_bytes, pieces, std::move(done));
}

void Device::Flush(Done done) { Submit(Kind::kFlush, 0, {}, std::move(done)); }

void Device::Submit(Kind kind, uint64_t offset_bytes, std::span<const iovec> pieces, Done done) {
  auto op = std::make_unique<Op>();
  op->kind = kind;
  op->offset_bytes = offset_bytes;
  op->pieces.assign(pieces.begin(), pieces.end());
  op->done = std::move(done);
  op->called_at_nanoseconds = Clock::Real().NowNanoseconds();
  ++in_flight_;
  absl::Status status = draining_ ? absl::CancelledError("device is closing") : Check(*op);
  if (!status.ok()) {
    refused_.push_back({std::move(op), std::move(status)});
    SignalReady();
    return;
  }
  for (const iovec& piece : op->pieces) op->size_bytes += piece.iov_len;
  Start(std::move(op));
}

absl::Status Device::Check(const Op& op) const {
  if (op.kind == Kind::kFlush) return absl::OkStatus();
  const Geometry& limits = geometry();
  if (op.pieces.empty() || op.pieces.size() > kMaxPieces) {
    return absl::InvalidArgumentError(
        absl::StrCat("a transfer has 1 to ", kMaxPieces, " pieces, not ", op.pieces.size()));
  }
  uint64_t left_bytes =
      op.offset_bytes <= limits.size_bytes ? limits.size_bytes - op.offset_bytes : 0;
  for (const iovec& piece : op.pieces) {
    if (piece.iov_len == 0 || !IsAligned(piece.iov_len, limits.offset_alignment)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a piece has ", piece.iov_len, " bytes, not a multiple of ", limits.offset_alignment));
    }
    const auto address = reinterpret_cast<uintptr_t>(piece.iov_base);
    if (address == 0 || !IsAligned(address, limits.memory_alignment)) {
      return absl::InvalidArgumentError(absl::StrFormat("a piece lies at %p, not aligned to %d",
                                                        piece.iov_base, limits.memory_alignment));
    }
    if (piece.iov_len > left_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("a transfer at offset ", op.offset_bytes,
                                                     " ends behind the ", limits.size_bytes,
                                                     " bytes of the file"));
    }
    left_bytes -= piece.iov_len;
  }
  if (!IsAligned(op.offset_bytes, limits.offset_alignment)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "offset ", op.offset_bytes, " is not a multiple of ", limits.offset_alignment));
  }
  return absl::OkStatus();
}

void Device::CountCompleted(const Op& op, const absl::Status& status) {
  const int64_t taken = Clock::Real().NowNanoseconds() - op.called_at_nanoseconds;
  switch (op.kind) {
    case Kind::kRead:
      if (!status.ok()) return Count(counters_.read_errors, 1);
      Count(counters_.reads, 1);
      Count(counters_.read_bytes, op.size_bytes);
      return counters_.read_latency.Add(taken);
    case Kind::kWrite:
      if (!status.ok()) return Count(counters_.write_errors, 1);
      Count(counters_.writes, 1);
      Count(counters_.written_bytes, op.size_bytes);
      return counters_.write_latency.Add(taken);
    case Kind::kFlush:
      if (!status.ok()) return Count(counters_.flush_errors, 1);
      Count(counters_.flushes, 1);
      return counters_.flush_latency.Add(taken);
  }
}

void Device::Complete(std::unique_ptr<Op> op, absl::Status status) {
  CountCompleted(*op, status);
  Finish(std::move(op), std::move(status));
}

void Device::Finish(std::unique_ptr<Op> op, absl::Status status) {
  OFFLOAD_CHECK(in_flight_ > 0);
  --in_flight_;
  const Done done = std::move(op->done);
  op.reset();
  if (done) done(std::move(status));
}

absl::Status Device::Resize(uint64_t) {
  return absl::UnimplementedError("the device has a fixed length");
}

size_t Device::CompleteRefused() {
  std::vector<Refused> refused = std::exchange(refused_, {});  // callbacks may be refused again
  for (Refused& each : refused) {
    Count(counters_.refusals, 1);
    Finish(std::move(each.op), std::move(each.status));
  }
  return refused.size();
}

void Device::Drain() {
  draining_ = true;
  while (in_flight_ > 0) Poll(/*wait=*/true);
}

}  // namespace offload::aio

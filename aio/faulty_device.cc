#include "aio/faulty_device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "aio/errno_status.h"
#include "base/check.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

bool Meets(FaultKind fault, Device::Kind kind) {
  switch (fault) {
    case FaultKind::kReadError:
    case FaultKind::kShortRead:
    case FaultKind::kBitFlip:
    case FaultKind::kMisdirectedRead:
    case FaultKind::kStaleRead:
      return kind == Device::Kind::kRead;
    case FaultKind::kWriteError:
    case FaultKind::kNoSpace:
    case FaultKind::kTornWrite:
    case FaultKind::kTornWriteSilent:
    case FaultKind::kLostWrite:
    case FaultKind::kMisdirectedWrite:
      return kind == Device::Kind::kWrite;
    case FaultKind::kFlushError:
      return kind == Device::Kind::kFlush;
    case FaultKind::kAgain:
    case FaultKind::kPowerCut:
      return true;
  }
  return false;
}

absl::Status PowerIsOff() { return absl::UnavailableError("power cut"); }

// Calls visit(sector_offset, bytes) for each sector of the pieces.
template <typename Visit>
void ForEachSector(uint64_t offset_bytes, std::span<const iovec> pieces, uint64_t sector_bytes,
                   Visit visit) {
  for (const iovec& piece : pieces) {
    auto* bytes = static_cast<std::byte*>(piece.iov_base);
    for (size_t done = 0; done < piece.iov_len;
         done += sector_bytes, offset_bytes += sector_bytes) {
      visit(offset_bytes, bytes + done);
    }
  }
}

}  // namespace

std::string_view FaultName(FaultKind kind) {
  static constexpr std::array<std::string_view, kFaultKindCount> kNames = {
      "read error",        "short read", "bit flip",    "misdirected read",  "stale read",
      "write error",       "no space",   "torn write",  "silent torn write", "lost write",
      "misdirected write", "again",      "flush error", "power cut"};
  return kNames[static_cast<size_t>(kind)];
}

FaultyDevice::FaultyDevice(std::unique_ptr<Device> behind, const Options& options)
    : behind_(std::move(behind)),
      options_(options),
      sector_bytes_(behind_->geometry().offset_alignment),
      random_(options.seed),
      queue_(options.reorders ? std::optional<uint64_t>(~options.seed) : std::nullopt) {}

void FaultyDevice::AddFault(const Fault& fault) {
  OFFLOAD_CHECK(fault.nth > 0);
  OFFLOAD_CHECK(fault.kind != FaultKind::kPowerCut || options_.remember_unflushed);
  OFFLOAD_CHECK(fault.kind != FaultKind::kStaleRead || options_.remember_previous);
  faults_.push_back({fault});
}

// Counts the operation for every fault of its class, also where an earlier one wins.
std::optional<FaultKind> FaultyDevice::MeetFault(Kind kind) {
  std::optional<FaultKind> met;
  for (ScriptedFault& scripted : faults_) {
    if (!Meets(scripted.fault.kind, kind)) continue;
    const uint64_t nth = ++scripted.passed_count;
    const bool due =
        scripted.fault.persistent ? nth >= scripted.fault.nth : nth == scripted.fault.nth;
    if (due && !met.has_value()) met = scripted.fault.kind;
  }
  if (met.has_value()) {
    ++faults_met_;
    ++faults_met_by_kind_[static_cast<size_t>(*met)];
  }
  return met;
}

void FaultyDevice::Start(std::unique_ptr<Op> op) {
  ++started_count_;
  const std::optional<FaultKind> fault = is_cut_ ? std::nullopt : MeetFault(op->kind);
  queue_.Push({std::move(op), fault, executed_writes_});
  if (fault == FaultKind::kPowerCut) PowerCut();
}

size_t FaultyDevice::Poll(bool wait) {
  size_t completed = CompleteRefused();
  if (!wait && ++polls_ < polls_per_completion_) return completed;
  polls_ = 0;
  for (size_t count = queue_.ChooseCount(); count > 0; --count, ++completed) {
    Pending pending = queue_.Pop();
    absl::Status status = is_cut_ ? PowerIsOff() : Execute(pending);
    Complete(std::move(pending.op), std::move(status));
  }
  return completed;
}

absl::Status FaultyDevice::Execute(const Pending& pending) {
  const Op& op = *pending.op;
  if (pending.fault == FaultKind::kAgain) {
    return IoErrorStatus(EAGAIN, op.kind, op.offset_bytes, op.size_bytes);
  }
  switch (op.kind) {
    case Kind::kRead:
      return ExecuteRead(op, pending.fault);
    case Kind::kWrite:
      return ExecuteWrite(op, pending.fault);
    case Kind::kFlush:
      return ExecuteFlush(pending);
  }
  return absl::InternalError("no such kind");
}

absl::Status FaultyDevice::ExecuteRead(const Op& op, std::optional<FaultKind> fault) {
  if (fault == FaultKind::kReadError)
    return IoErrorStatus(EIO, op.kind, op.offset_bytes, op.size_bytes);
  if (fault == FaultKind::kShortRead) {
    const uint64_t prefix_bytes = ChoosePrefixBytes(op);
    OFFLOAD_RETURN_IF_ERROR(Behind(Kind::kRead, op.offset_bytes, Prefix(op.pieces, prefix_bytes)));
    return ShortTransferStatus(op.kind, op.offset_bytes, op.size_bytes, prefix_bytes);
  }
  if (fault == FaultKind::kMisdirectedRead)
    return Behind(Kind::kRead, ChooseOtherOffset(op), op.pieces);
  OFFLOAD_RETURN_IF_ERROR(Behind(Kind::kRead, op.offset_bytes, op.pieces));
  if (fault == FaultKind::kStaleRead) ReadStale(op);
  if (fault == FaultKind::kBitFlip) {
    const iovec& piece = op.pieces[random_.Below(op.pieces.size())];
    const uint64_t bit = random_.Below(piece.iov_len * 8);
    static_cast<std::byte*>(piece.iov_base)[bit / 8] ^= std::byte(1 << (bit % 8));
  }
  return absl::OkStatus();
}

absl::Status FaultyDevice::ExecuteWrite(const Op& op, std::optional<FaultKind> fault) {
  const absl::Status io_error = IoErrorStatus(EIO, op.kind, op.offset_bytes, op.size_bytes);
  if (!fault.has_value()) return Land(op.offset_bytes, op.pieces);
  switch (*fault) {
    case FaultKind::kWriteError:
      return io_error;
    case FaultKind::kNoSpace:
      return IoErrorStatus(ENOSPC, op.kind, op.offset_bytes, op.size_bytes);
    case FaultKind::kLostWrite:
      damaged_.push_back({op.offset_bytes, op.size_bytes});
      return absl::OkStatus();
    case FaultKind::kTornWrite:
    case FaultKind::kTornWriteSilent: {
      const uint64_t prefix_bytes = ChoosePrefixBytes(op);
      OFFLOAD_RETURN_IF_ERROR(Land(op.offset_bytes, Prefix(op.pieces, prefix_bytes)));
      if (*fault == FaultKind::kTornWrite) return io_error;
      damaged_.push_back({op.offset_bytes + prefix_bytes, op.size_bytes - prefix_bytes});
      return absl::OkStatus();
    }
    case FaultKind::kMisdirectedWrite: {
      const uint64_t other_offset_bytes = ChooseOtherOffset(op);
      damaged_.push_back({op.offset_bytes, op.size_bytes});
      damaged_.push_back({other_offset_bytes, op.size_bytes});
      return Land(other_offset_bytes, op.pieces);
    }
    default:
      return Land(op.offset_bytes, op.pieces);
  }
}

uint64_t FaultyDevice::ChooseOtherOffset(const Op& op) {
  const uint64_t sectors = (geometry().size_bytes - op.size_bytes) / sector_bytes_ + 1;
  uint64_t sector = random_.Below(sectors);
  if (sector * sector_bytes_ == op.offset_bytes) sector = (sector + 1) % sectors;
  return sector * sector_bytes_;
}

void FaultyDevice::ReadStale(const Op& op) {
  ForEachSector(op.offset_bytes, op.pieces, sector_bytes_, [&](uint64_t offset, std::byte* bytes) {
    const auto found = previous_.find(offset);
    if (found != previous_.end()) std::memcpy(bytes, found->second.data(), sector_bytes_);
  });
}

// Of each sector the newest content that this flush covers becomes the flushed one.
absl::Status FaultyDevice::ExecuteFlush(const Pending& pending) {
  absl::Status status = pending.fault == FaultKind::kFlushError
                            ? IoErrorStatus(EIO, Kind::kFlush, 0, 0)
                            : Behind(Kind::kFlush, 0, {});
  if (!status.ok()) {
    doomed_until_ = std::max(doomed_until_, pending.called_at);
    return status;
  }
  for (auto it = unflushed_.begin(); it != unflushed_.end();) {
    std::vector<Version>& versions = it->second;
    const auto last = std::find_if(versions.rbegin(), versions.rend(), [&](const Version& version) {
      return version.number > doomed_until_ && version.number <= pending.called_at;
    });
    if (last != versions.rend()) versions.erase(versions.begin(), std::prev(last.base()));
    it = versions.size() == 1 ? unflushed_.erase(it) : std::next(it);
  }
  return status;
}

// Writes to the device behind, as something that a power cut may take back.
absl::Status FaultyDevice::Land(uint64_t offset_bytes, std::span<const iovec> pieces) {
  uint64_t size_bytes = 0;
  for (const iovec& piece : pieces) size_bytes += piece.iov_len;
  if (size_bytes == 0) return absl::OkStatus();
  if (options_.remember_unflushed || options_.remember_previous)
    OFFLOAD_RETURN_IF_ERROR(RememberOld(offset_bytes, size_bytes));
  OFFLOAD_RETURN_IF_ERROR(Behind(Kind::kWrite, offset_bytes, pieces));
  ++executed_writes_;
  if (options_.remember_unflushed) RememberWritten(offset_bytes, pieces, executed_writes_);
  return absl::OkStatus();
}

// What is there before a write: the flushed content if nothing unflushed is, and the previous one.
absl::Status FaultyDevice::RememberOld(uint64_t offset_bytes, uint64_t size_bytes) {
  OFFLOAD_ASSIGN_OR_RETURN(std::byte* const old, Scratch(size_bytes));
  const iovec piece = {old, size_bytes};
  OFFLOAD_RETURN_IF_ERROR(Behind(Kind::kRead, offset_bytes, {&piece, 1}));
  ForEachSector(offset_bytes, {&piece, 1}, sector_bytes_, [&](uint64_t offset, std::byte* bytes) {
    if (options_.remember_previous) previous_[offset].assign(bytes, bytes + sector_bytes_);
    if (!options_.remember_unflushed) return;
    std::vector<Version>& versions = unflushed_[offset];
    if (versions.empty()) versions.push_back({0, {bytes, bytes + sector_bytes_}});
  });
  return absl::OkStatus();
}

void FaultyDevice::RememberWritten(uint64_t offset_bytes, std::span<const iovec> pieces,
                                   uint64_t number) {
  ForEachSector(offset_bytes, pieces, sector_bytes_, [&](uint64_t offset, std::byte* bytes) {
    unflushed_[offset].push_back({number, {bytes, bytes + sector_bytes_}});
  });
}

void FaultyDevice::PowerCut(Survivors survivors) {
  OFFLOAD_CHECK(options_.remember_unflushed);
  if (is_cut_) return;
  is_cut_ = true;
  for (const Pending& pending : queue_.items()) {
    if (pending.op->kind != Kind::kWrite) continue;
    OFFLOAD_CHECK_OK(RememberOld(pending.op->offset_bytes, pending.op->size_bytes));
    RememberWritten(pending.op->offset_bytes, pending.op->pieces, ++executed_writes_);
  }
  const absl::StatusOr<std::byte*> sector = Scratch(sector_bytes_);
  OFFLOAD_CHECK_OK(sector);
  for (const auto& [offset, versions] : unflushed_) {
    const size_t survivor = survivors == Survivors::kFlushedOnly ? 0
                            : survivors == Survivors::kAll       ? versions.size() - 1
                                                                 : random_.Below(versions.size());
    std::memcpy(*sector, versions[survivor].bytes.data(), sector_bytes_);
    const iovec piece = {*sector, sector_bytes_};
    OFFLOAD_CHECK_OK(Behind(Kind::kWrite, offset, {&piece, 1}));
  }
  unflushed_.clear();
}

void FaultyDevice::RestorePower() {
  OFFLOAD_CHECK(in_flight() == 0) << in_flight();
  is_cut_ = false;
}

// Aligned memory that is kept: an operation of a simulator costs less than a map.
absl::StatusOr<std::byte*> FaultyDevice::Scratch(uint64_t size_bytes) {
  if (scratch_.size() < size_bytes) {
    OFFLOAD_ASSIGN_OR_RETURN(scratch_, MappedRegion::Anonymous(size_bytes));
  }
  return scratch_.data();
}

uint64_t FaultyDevice::ChoosePrefixBytes(const Op& op) {
  return random_.Below(op.size_bytes / sector_bytes_) * sector_bytes_;
}

std::vector<iovec> FaultyDevice::Prefix(std::span<const iovec> pieces, uint64_t size_bytes) const {
  std::vector<iovec> prefix;
  for (const iovec& piece : pieces) {
    if (size_bytes == 0) break;
    prefix.push_back({piece.iov_base, std::min<size_t>(piece.iov_len, size_bytes)});
    size_bytes -= prefix.back().iov_len;
  }
  return prefix;
}

// Runs one operation of the device behind to its end.
absl::Status FaultyDevice::Behind(Kind kind, uint64_t offset_bytes, std::span<const iovec> pieces) {
  if (kind != Kind::kFlush && pieces.empty()) return absl::OkStatus();
  absl::Status status = absl::UnknownError("not completed");
  const Done done = [&status](absl::Status outcome) { status = std::move(outcome); };
  if (kind == Kind::kRead) behind_->Read(offset_bytes, pieces, done);
  if (kind == Kind::kWrite) behind_->Write(offset_bytes, pieces, done);
  if (kind == Kind::kFlush) behind_->Flush(done);
  while (behind_->in_flight() > 0) behind_->Poll(/*wait=*/true);
  return status;
}

}  // namespace offload::aio

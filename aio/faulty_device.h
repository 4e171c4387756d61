// aio/faulty_device.h
//
// Stands before another device and spoils, by script and by seed, what a drive can spoil; and
// remembers what a drive's volatile cache would lose in a power cut. For tests and simulators:
// operations run one at a time, inside Poll(), against the device behind, so that a run is a
// function of its calls and its seed. Any device may stand behind; over MemoryDevice it is fast.
//
// Faults. The n-th operation of the class (counted from AddFault, from 1) meets the fault; a
// persistent one meets all later ones too. `prefix` is a random number of whole sectors, at least
// none, fewer than all. Of several faults that are due, the first added wins.
//
// clang-format off
//   kind               class  the drive then holds              the caller gets
//   kReadError         read   as before                         EIO: DATA_LOSS
//   kShortRead         read   as before; a prefix was read      DATA_LOSS
//   kBitFlip           read   as before; one bit read is wrong  OK
//   kMisdirectedRead   read   as before; another offset is read OK
//   kStaleRead         read   as before; each sector read is    OK
//                             what it was before its last write
//   kWriteError        write  as before                         EIO: DATA_LOSS
//   kNoSpace           write  as before                         ENOSPC: RESOURCE_EXHAUSTED
//   kTornWrite         write  a prefix of it                    EIO: DATA_LOSS
//   kTornWriteSilent   write  a prefix of it                    OK
//   kLostWrite         write  as before                         OK
//   kMisdirectedWrite  write  it, at another offset             OK
//   kAgain             any    as before                         EAGAIN after all retries: UNAVAILABLE
//   kFlushError        flush  unflushed writes become doomed    EIO: DATA_LOSS
//   kPowerCut          any    PowerCut(), operation in flight   UNAVAILABLE
// clang-format on
//
// Power cuts. A write is unflushed from its completion until a Flush that was called after its
// completion succeeds; a doomed one (its flush failed) for ever, as the kernel marks such pages
// clean. At a cut every sector that has unflushed writes holds its flushed content or that of any
// one of them, each sector on its own; so do the sectors of writes in flight. Afterwards every
// operation, pending ones included, completes with UNAVAILABLE, and the device behind holds what
// survived. RestorePower() starts the drive again.
//
// Cost: two copies of all unflushed sectors. `remember_unflushed = false` spares it and forbids
// PowerCut(). One more of every sector ever written, with `remember_previous`, which kStaleRead
// needs.
//
// Thread safety: as Device.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "aio/device.h"
#include "aio/memory_device.h"
#include "base/mapped_region.h"
#include "base/random.h"

namespace offload::aio {

enum class FaultKind {
  kReadError,
  kShortRead,
  kBitFlip,
  kMisdirectedRead,
  kStaleRead,
  kWriteError,
  kNoSpace,
  kTornWrite,
  kTornWriteSilent,
  kLostWrite,
  kMisdirectedWrite,
  kAgain,
  kFlushError,
  kPowerCut,
};
inline constexpr size_t kFaultKindCount = static_cast<size_t>(FaultKind::kPowerCut) + 1;

// "read error", "stale read", …
std::string_view FaultName(FaultKind kind);

struct Fault {
  FaultKind kind;
  uint64_t nth = 1;
  bool persistent = false;
};

struct ByteRange {
  uint64_t offset_bytes, size_bytes;
  bool Overlaps(const ByteRange& other) const {
    return offset_bytes < other.offset_bytes + other.size_bytes &&
           other.offset_bytes < offset_bytes + size_bytes;
  }
};

class FaultyDevice final : public Device {
 public:
  struct Options {
    uint64_t seed = 1;      // of prefixes, bits, offsets and survivors
    bool reorders = false;  // operations complete in an order that the seed chooses
    bool remember_unflushed = true;
    bool remember_previous = false;
  };

  // What a power cut keeps of each sector's unflushed contents.
  enum class Survivors { kFlushedOnly, kAll, kRandom };

  FaultyDevice(std::unique_ptr<Device> behind, const Options& options);
  ~FaultyDevice() override { Drain(); }

  void AddFault(const Fault& fault);
  void ClearFaults() { faults_.clear(); }

  // How often scripted faults were met: a loop over n ends when a run meets none.
  uint64_t faults_met() const { return faults_met_; }
  uint64_t faults_met(FaultKind kind) const {
    return faults_met_by_kind_[static_cast<size_t>(kind)];
  }

  // What writes that were answered with OK have left wrong, all of them so far: a judge excuses the
  // loss of these bytes and of no others.
  const std::vector<ByteRange>& damaged() const { return damaged_; }

  // Operations started so far, of all kinds.
  uint64_t started_count() const { return started_count_; }

  // Cuts the power now. May be called in a callback. The second one changes nothing.
  void PowerCut(Survivors survivors = Survivors::kRandom);
  bool is_cut() const { return is_cut_; }

  // Starts the drive again after a cut: what survived is durable, and nothing is unflushed.
  // Requires that nothing is in flight. Scripted faults stay.
  void RestorePower();

  // A slow drive: of so many polls that do not wait only the last completes anything. At least 1.
  void SetPollsPerCompletion(uint32_t polls) { polls_per_completion_ = polls; }

  size_t Poll(bool wait) override;
  int event_fd() const override { return -1; }
  absl::Status Resize(uint64_t size_bytes) override { return behind_->Resize(size_bytes); }
  const Geometry& geometry() const override { return behind_->geometry(); }
  std::string_view engine() const override { return behind_->engine(); }
  Device& behind() { return *behind_; }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  struct Pending {
    std::unique_ptr<Op> op;
    std::optional<FaultKind> fault;
    uint64_t called_at;  // executed_writes_ when the operation was called: what a flush covers
  };
  struct ScriptedFault {
    Fault fault;
    uint64_t passed_count = 0;
  };
  struct Version {
    uint64_t number;  // of the write, in order of execution; 0 is the flushed content
    std::vector<std::byte> bytes;
  };

  std::optional<FaultKind> MeetFault(Kind kind);
  absl::Status Execute(const Pending& pending);
  absl::Status ExecuteRead(const Op& op, std::optional<FaultKind> fault);
  absl::Status ExecuteWrite(const Op& op, std::optional<FaultKind> fault);
  absl::Status ExecuteFlush(const Pending& pending);
  absl::Status Land(uint64_t offset_bytes, std::span<const iovec> pieces);
  absl::Status RememberOld(uint64_t offset_bytes, uint64_t size_bytes);
  void ReadStale(const Op& op);
  uint64_t ChooseOtherOffset(const Op& op);
  void RememberWritten(uint64_t offset_bytes, std::span<const iovec> pieces, uint64_t number);
  absl::StatusOr<std::byte*> Scratch(uint64_t size_bytes);
  uint64_t ChoosePrefixBytes(const Op& op);
  std::vector<iovec> Prefix(std::span<const iovec> pieces, uint64_t size_bytes) const;
  absl::Status Behind(Kind kind, uint64_t offset_bytes, std::span<const iovec> pieces);

  std::unique_ptr<Device> behind_;
  const Options options_;
  const uint64_t sector_bytes_;
  Random random_;
  uint32_t polls_per_completion_ = 1, polls_ = 0;
  ScrambledQueue<Pending> queue_;
  std::vector<ScriptedFault> faults_;
  std::map<uint64_t, std::vector<Version>>
      unflushed_;  // by sector offset; the flushed version comes first
  MappedRegion scratch_;
  uint64_t executed_writes_ = 0;
  uint64_t doomed_until_ = 0;  // writes up to this number can never become durable
  std::map<uint64_t, std::vector<std::byte>> previous_;  // by sector offset, with remember_previous
  uint64_t faults_met_ = 0;
  std::array<uint64_t, kFaultKindCount> faults_met_by_kind_{};
  uint64_t started_count_ = 0;
  std::vector<ByteRange> damaged_;
  bool is_cut_ = false;
};

}  // namespace offload::aio

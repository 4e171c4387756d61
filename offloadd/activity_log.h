// offloadd/activity_log.h
//
// What a job's drive and window did for each tensor of the store: bytes moved, and what ranks
// waited for; and, while somebody draws a trace, every transfer with its times. Watches store and
// scratch file (swap/transfer_watch.h).
//
// Invariants
//   * Nothing is recorded one by one until TakeTransfers() is called, nor when it was called too
//   long ago; and never more than kTransfersMax: the oldest are dropped, and counted.
//   * The sums per tensor have their memory from the beginning.
//
// Thread safety: the loop's thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "swap/transfer_watch.h"

namespace offload::daemon {

class ActivityLog {
 public:
  // What the tensor lacked when a rank came for it. The first causes of proto::StallCause.
  enum class WaitCause : uint8_t { kUpdate, kLate, kMiss };
  static constexpr size_t kWaitCauses = 3;
  struct Tally {
    uint64_t bytes_read = 0, bytes_written = 0;
    std::array<uint64_t, kWaitCauses> waits{};
    std::array<int64_t, kWaitCauses> wait_nanoseconds{};
  };
  struct TimedTransfer {
    swap::Transfer transfer;
    int64_t begin_nanoseconds = 0, end_nanoseconds = 0;
  };
  struct Taken {
    std::vector<TimedTransfer> transfers;  // by their ends
    uint64_t dropped = 0;                  // since the last call
    bool more = false;
  };
  static constexpr size_t kTransfersMax = 32768;
  static constexpr size_t kTransfersPerCall = 16384;
  static constexpr double kPatienceSeconds = 30;  // with who takes them

  // `clock` outlives the object.
  explicit ActivityLog(const Clock* clock) : clock_(*clock) {}
  ActivityLog(const ActivityLog&) = delete;
  ActivityLog& operator=(const ActivityLog&) = delete;

  void SetTensorCount(size_t store_tensors) { tallies_.resize(store_tensors); }
  const std::vector<Tally>& tallies() const { return tallies_; }

  // For a store or a scratch file; outlived by the object.
  swap::TransferWatch Watch();
  int64_t NowNanoseconds() const { return clock_.NowNanoseconds(); }
  // A rank was answered that waited since then.
  void AddWait(uint32_t store_tensor, WaitCause cause, int64_t since_nanoseconds);

  // The transfers that have ended since the last call.
  Taken TakeTransfers();

 private:
  void Count(const swap::Transfer& transfer);
  bool IsRecording(int64_t now_nanoseconds);

  const Clock& clock_;
  std::vector<Tally> tallies_;  // by store tensor
  std::deque<TimedTransfer> transfers_;
  uint64_t dropped_ = 0;
  bool recording_ = false;
  int64_t taken_nanoseconds_ = 0;  // when they were taken last
};

}  // namespace offload::daemon

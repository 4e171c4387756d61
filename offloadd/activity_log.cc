#include "offloadd/activity_log.h"

#include <algorithm>
#include <utility>

namespace offload::daemon {

swap::TransferWatch ActivityLog::Watch() {
  return [this](const swap::Transfer& transfer, std::function<void(absl::Status)> done) {
    Count(transfer);
    const int64_t begin = clock_.NowNanoseconds();
    if (!IsRecording(begin)) return done;
    std::function<void(absl::Status)> recorded = [this, transfer, begin,
                                                  done = std::move(done)](absl::Status status) {
      if (transfers_.size() >= kTransfersMax) {
        transfers_.pop_front();
        ++dropped_;
      }
      transfers_.push_back({transfer, begin, clock_.NowNanoseconds()});
      done(std::move(status));
    };
    return recorded;
  };
}

void ActivityLog::Count(const swap::Transfer& transfer) {
  if (transfer.tensor >= tallies_.size()) return;
  if (transfer.kind == swap::Transfer::Kind::kRead)
    tallies_[transfer.tensor].bytes_read += transfer.bytes;
  if (transfer.kind == swap::Transfer::Kind::kWrite)
    tallies_[transfer.tensor].bytes_written += transfer.bytes;
}

bool ActivityLog::IsRecording(int64_t now_nanoseconds) {
  if (!recording_) return false;
  const auto patience = static_cast<int64_t>(kPatienceSeconds * 1e9);
  if (now_nanoseconds - taken_nanoseconds_ <= patience) return true;
  recording_ = false;
  transfers_.clear();
  transfers_.shrink_to_fit();
  dropped_ = 0;
  return false;
}

void ActivityLog::AddWait(uint32_t store_tensor, WaitCause cause, int64_t since_nanoseconds) {
  if (store_tensor >= tallies_.size()) return;
  Tally& tally = tallies_[store_tensor];
  ++tally.waits[static_cast<size_t>(cause)];
  tally.wait_nanoseconds[static_cast<size_t>(cause)] += clock_.NowNanoseconds() - since_nanoseconds;
}

ActivityLog::Taken ActivityLog::TakeTransfers() {
  recording_ = true;
  taken_nanoseconds_ = clock_.NowNanoseconds();
  Taken taken;
  const size_t count = std::min(transfers_.size(), kTransfersPerCall);
  const auto end = transfers_.begin() + static_cast<std::ptrdiff_t>(count);
  taken.transfers.assign(transfers_.begin(), end);
  transfers_.erase(transfers_.begin(), end);
  taken.dropped = std::exchange(dropped_, 0);
  taken.more = !transfers_.empty();
  return taken;
}

}  // namespace offload::daemon

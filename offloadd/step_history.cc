#include "offloadd/step_history.h"

#include <algorithm>
#include <utility>

namespace offload::daemon {
namespace {

StepRecord Joined(const StepRecord& first, const StepRecord& second) {
  StepRecord joined = second;
  joined.first_step = first.first_step;
  joined.seconds += first.seconds;
  joined.bytes_read += first.bytes_read;
  joined.bytes_written += first.bytes_written;
  joined.commits += first.commits;
  proto::AddTo(joined.sums, first.sums);
  return joined;
}

}  // namespace

void StepHistory::Add(uint64_t step, double unix_seconds, uint64_t resident_bytes) {
  const WorkDone& now = called_;
  StepRecord record;
  record.first_step = record.last_step = step;
  record.end_unix_seconds = unix_seconds;
  record.seconds = std::max(0.0, now.now_seconds - last_.now_seconds);
  record.sums = proto::Difference(now.sums, last_.sums);
  record.bytes_read = now.bytes_read - std::min(now.bytes_read, last_.bytes_read);
  record.bytes_written = now.bytes_written - std::min(now.bytes_written, last_.bytes_written);
  record.commits = now.commits - std::min(now.commits, last_.commits);
  record.resident_bytes = resident_bytes;
  last_ = now;
  Count(record.seconds);
  records_.push_back(record);
  if (records_.size() > kRecordsMax) MakeRoom();
}

void StepHistory::Count(double seconds) {
  for (size_t i = 0; i < kDurationBounds.size(); ++i)
    durations_.counts[i] += seconds <= kDurationBounds[i] ? 1 : 0;
  ++durations_.count;
  durations_.sum_seconds += seconds;
}

// Halves the old part: each pair of neighbours becomes one.
void StepHistory::MakeRoom() {
  const size_t old_count = (records_.size() - kSingleRecords) / 2 * 2;
  std::deque<StepRecord> kept;
  for (size_t i = 0; i < old_count; i += 2) kept.push_back(Joined(records_[i], records_[i + 1]));
  kept.insert(kept.end(), records_.begin() + static_cast<std::ptrdiff_t>(old_count),
              records_.end());
  records_ = std::move(kept);
}

}  // namespace offload::daemon

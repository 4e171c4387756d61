// offloadd/step_history.h
//
// What the steps of a job took, one record each, in bounded memory: when there are too many the
// oldest neighbours become one record, so that a run of any length is kept from its first step,
// and its last steps one by one.
//
// Pure: knows neither clock nor job. Not thread safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "proto/step_words.h"

namespace offload::daemon {

// What a job has done since it was opened, as it stands when a step is called for.
struct WorkDone {
  double now_seconds = 0;  // monotonic
  proto::StepSums sums;    // the mean of its ranks
  uint64_t bytes_read = 0, bytes_written = 0;
  uint64_t commits = 0;  // that have ended
};

// Of one step, or of some that follow each other: what was done between the call of the step before
// the first and that of the last.
struct StepRecord {
  uint64_t first_step = 0, last_step = 0;
  double end_unix_seconds = 0;
  double seconds = 0;
  proto::StepSums sums;
  uint64_t bytes_read = 0, bytes_written = 0;
  uint64_t commits = 0;         // that ended meanwhile
  uint64_t resident_bytes = 0;  // at its end

  uint64_t step_count() const { return last_step - first_step + 1; }
};

class StepHistory {
 public:
  static constexpr size_t kRecordsMax = 512;
  // Of those, the last ones, which stay single steps.
  static constexpr size_t kSingleRecords = 128;
  // Upper ends of the durations that are counted apart, in seconds.
  static constexpr std::array<double, 11> kDurationBounds = {0.01, 0.03, 0.1, 0.3, 1,   3,
                                                             10,   30,   100, 300, 1000};

  // What there is before the first step: what comes later is of that step.
  void Begin(const WorkDone& before) { last_ = before; }
  // All ranks have called for the next step.
  void Call(const WorkDone& now) { called_ = now; }
  // It is `step`, and has begun: what was done until the call was done for it.
  void Add(uint64_t step, double unix_seconds, uint64_t resident_bytes);

  // Ascending, without gaps.
  const std::deque<StepRecord>& records() const { return records_; }

  // Of single steps.
  struct Durations {
    std::array<uint64_t, kDurationBounds.size()> counts{};  // up to each bound, cumulative
    uint64_t count = 0;
    double sum_seconds = 0;
  };
  const Durations& durations() const { return durations_; }

 private:
  void Count(double seconds);
  void MakeRoom();

  WorkDone last_, called_;
  std::deque<StepRecord> records_;
  Durations durations_;
};

}  // namespace offload::daemon

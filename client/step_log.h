// client/step_log.h
//
// The history of a run as JSON lines, one object per step, appended to a file that
// OFFLOADD_STEP_LOG names: what a rank did with its time, and what the daemon moved meanwhile.
// Names are those of `offloadctl report --json`.
//
// A line is written with one call when its step is recorded: who is killed leaves whole lines. A
// file that cannot be written to any more is told of once, and the run goes on.
//
// Thread safety: none; one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "proto/gpu_words.h"
#include "proto/shm_abi.h"
#include "proto/step_words.h"

namespace offload::client {

// Of a step: from the return of the step before to its own.
struct StepLine {
  uint64_t step = 0;
  uint64_t committed_step = 0;
  double end_unix_seconds = 0, seconds = 0;
  proto::StepSums sums;
  uint64_t bytes_read = 0, bytes_written = 0;  // by the daemon, on the drive
  uint64_t resident_bytes = 0;                 // at the end
  proto::GpuFigures gpu;  // of the rank's device; sums are of the step. Without one: no part of it
};
// With the end of the line.
std::string ToJsonLine(const StepLine& line);

class StepLog {
 public:
  // Appends to what is at `path`. `words`, `gpu` and `header` outlive the object. OFD-1002 when the
  // file cannot be written.
  static absl::StatusOr<std::unique_ptr<StepLog>> Open(const std::string& path,
                                                       const proto::StepWords* words,
                                                       const proto::GpuWords* gpu,
                                                       const proto::SlabHeader* header);
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  // The step is recorded.
  void Add(uint64_t step);

 private:
  struct Moment {
    int64_t nanoseconds = 0;
    proto::StepSums sums;
    uint64_t bytes_read = 0, bytes_written = 0;
    proto::GpuFigures gpu;
  };
  StepLog(std::string path, UniqueFd file, const proto::StepWords* words,
          const proto::GpuWords* gpu, const proto::SlabHeader* header);
  Moment Now() const;

  const std::string path_;
  UniqueFd file_;
  const proto::StepWords& words_;
  const proto::GpuWords& gpu_;
  const proto::SlabHeader& header_;
  Moment last_;
};

}  // namespace offload::client

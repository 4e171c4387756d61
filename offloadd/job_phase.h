// offloadd/job_phase.h
//
// The life of a job as one word, and what may be called in each part of it.
//
//   kOpening → kOpen → kSealing → kSealed → kPublishing → kTraining → kClosing → kDrained
//
// A job whose store was there goes from kSealing to kTraining. Any phase may be followed by
// kClosing; a seal or a commit that was refused returns to where it began. That a job has failed is
// no phase: it is told of in every phase, and it still has to be drained.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace offload::daemon {

enum class JobPhase : uint8_t {
  kOpening,     // its ranks gather, its store is looked for, its memories are made
  kOpen,        // tensors are declared, models are built in the scratch file
  kSealing,     // memory is reserved, a new store formatted
  kSealed,      // the weights of a new job are put
  kPublishing,  // and committed
  kTraining,
  kClosing,  // nothing begins any more; what is under way ends
  kDrained,
};
inline constexpr int kJobPhases = 8;

// For messages and for offloadctl.
std::string_view NameOf(JobPhase phase);

// What ranks and tools may ask of a job.
enum class JobCall : uint8_t {
  kMap,
  kDeclareTensors,
  kReserveScratch,
  kSeal,
  kPublish,
  kEndLoad,
  kSetSchedule,
  kSetSquareRoots,
  kBeginStep,
  kStep,
  kWaitDurable,
  kCheckpoint,
  kExchange,
};
inline constexpr int kJobCalls = 13;
std::string_view NameOf(JobCall call);

// OFD-1503 "Step before Publish", "DeclareTensors after Seal", "Seal for the second time", "Step
// after CloseJob".
absl::Status CheckAllowed(JobCall call, JobPhase phase);

// OFD-1801 for what a rank asks of a daemon that was told to end (SIGTERM).
absl::Status DaemonEnds();

bool CanFollow(JobPhase phase, JobPhase next);

inline bool IsClosing(JobPhase phase) { return phase >= JobPhase::kClosing; }

}  // namespace offload::daemon

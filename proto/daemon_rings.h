// proto/daemon_rings.h
//
// The daemon's side of one session's rings: checked submissions in, completions out, sleeping and
// waking.
//
// An event loop turn:
//   for (int i = 0; i < 64; ++i) { next = rings.Next(); fault → close the session; missing → break;
//   else work } … rings.Complete(tag, value, status), any number … rings.Publish();
// and before the loop sleeps: rings.PrepareToSleep() for every session; when one says false, do not
// sleep. After it woke: rings.Awake(), and doorbell().Drain() when the bell is readable.
//
// Invariants
//   * A submission is taken only when its completion has room: a rank that does not read
//   completions stops only itself.
//   * Complete() cannot fail: should the rank move its cursor back meanwhile, it loses its own
//   completions.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/doorbell.h"
#include "proto/ring.h"
#include "proto/shm_abi.h"
#include "proto/step_words.h"
#include "proto/submission_reader.h"

namespace offload::proto {

// Writes magic, version and cursors of a new region, before the rank gets it.
void InitializeRegion(std::byte* region);
// The same for a slab: header and nothing else; tensor words follow at Seal.
void InitializeSlab(std::byte* slab);
// Fails the job for all its ranks: text first, then the number, with release. Only the first call
// has an effect.
void PublishFailure(SlabHeader* header, const absl::Status& status);

class DaemonRings {
 public:
  // `region` (initialised, mapped, at least kRegionFixedBytes) outlives the object.
  DaemonRings(std::byte* region, Doorbell doorbell);

  SubmissionReader& submissions() { return submissions_; }
  const Doorbell& doorbell() const { return doorbell_; }

  // The next submission, checked; missing when there is none or its completion would have no room.
  // Errors: the rank's fault.
  absl::StatusOr<std::optional<SubmissionEntry>> Next();

  // A copy of the first `size_bytes` of the step command: whatever the rank has written there.
  std::string CopyStepCommand(uint64_t size_bytes) const;

  // Answers one submission; the rank sees it after Publish(). The status's OFD number travels, its
  // text stays with the caller (for Control.ExplainFailure).
  void Complete(uint64_t tag, uint64_t value, const absl::Status& status);

  // Shows completions to the rank and wakes it if it sleeps.
  void Publish();

  // Says that the daemon is going to sleep. False when there is something to do: then Awake() was
  // called already.
  bool PrepareToSleep();
  void Awake();

  // The rank's hint: index of its next touch in the schedule; any value at all.
  uint32_t schedule_position() const {
    return header_->schedule_position.load(std::memory_order_relaxed);
  }
  // Of the rank: any values at all.
  const StepWords& step_words() const {
    return *StepWordsOf(reinterpret_cast<std::byte*>(header_));
  }

 private:
  RegionHeader* header_;
  Doorbell doorbell_;
  SubmissionReader submissions_;
  CompletionProducer completions_;
  SleepFlag daemon_sleep_;
  SleepFlag rank_sleep_;
  bool unpublished_ = false;
};

}  // namespace offload::proto

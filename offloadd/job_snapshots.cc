// Job's changes of snapshots: made between two steps, one after the other.

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "offloadd/job.h"

namespace offload::daemon {

void Job::CreateSnapshot(const std::string& name, bool may_grow, Progress progress, StepDone done) {
  AddChange({.creates = true,
             .name = name,
             .may_grow = may_grow,
             .progress = std::move(progress),
             .done = std::move(done)});
}

void Job::DeleteSnapshot(const std::string& name, StepDone done) {
  AddChange({.name = name, .done = std::move(done)});
}

void Job::AddChange(SnapshotChange change) {
  if (context_.failed()) return change.done(context_.failure);
  if (phase() != JobPhase::kTraining) {
    return change.done(MakeError(
        ErrorId::kSnapshot,
        absl::StrCat("job ", identity_.name,
                     IsClosing(phase()) ? " is being closed" : " has no committed epoch yet"),
        "Try again in a moment"));
  }
  // Before the store grows for it.
  for (const swap::SnapshotInfo& known : store_->snapshots()) {
    if (change.creates && known.name == change.name) {
      return change.done(
          MakeError(ErrorId::kSnapshot,
                    absl::StrCat("job ", identity_.name, " has a snapshot ", change.name)));
    }
  }
  if (absl::Status status = swap::CheckSnapshotName(change.name); !status.ok())
    return change.done(std::move(status));
  changes_.push_back(std::move(change));
  RunChanges();
}

bool Job::NeedsGrowth(const SnapshotChange& change) const {
  return change.creates && !store_->has_free_generation();
}

// Called in every turn: does what can be done now for the first change.
void Job::RunChanges() {
  const bool ends = IsClosing(phase()) || context_.failed();
  while (!changes_.empty() && ends && !changes_.front().under_way) {
    FinishChange(context_.failed() ? context_.failure
                                   : MakeError(ErrorId::kSessionEnded, "the job is being closed"));
  }
  if (changes_.empty()) return;
  SnapshotChange& change = changes_.front();
  if (change.under_way) {
    if (ends) store_->CancelGrowth();
    return;
  }
  if (NeedsGrowth(change)) return GrowFor(change);
  context_.changing_snapshots =
      !executor_->busy() && !executor_->HasUncommitted() && !context_.is_partial;
  if (!context_.changing_snapshots) {
    executor_->Hurry();
    return executor_->CommitSoon();
  }
  if (context_.writes_in_flight > 0) return;  // of puts; the change leaves out what they wrote
  change.under_way = true;
  auto done = context_.Counted([this](absl::Status status) {
    if (!status.ok() && store_->failed()) Fail(status);
    FinishChange(std::move(status));
  });
  if (change.creates) {
    store_->CreateSnapshot(change.name, machine_.NowUnixSeconds(), std::move(done));
  } else {
    store_->DeleteSnapshot(change.name, std::move(done));
  }
}

void Job::GrowFor(SnapshotChange& change) {
  if (!change.may_grow) {
    return FinishChange(MakeError(ErrorId::kSnapshot,
                                  absl::StrCat("no spare generation of job ", identity_.name,
                                               " is free: its store would have to grow ", "by ",
                                               FormatDecimalBytes(store_->generation_bytes()))));
  }
  change.under_way = true;
  store_->Grow(change.progress, context_.Counted([this](absl::Status status) {
    changes_.front().under_way = false;
    if (!status.ok() && store_->failed()) Fail(status);
    // A growth is cancelled when the job ends.
    if (!status.ok()) FinishChange(absl::IsCancelled(status) ? Ending() : std::move(status));
  }));
}

void Job::FinishChange(absl::Status status) {
  const SnapshotChange change = std::move(changes_.front());
  changes_.pop_front();
  context_.changing_snapshots = false;
  if (status.ok()) {
    change.done(store_->committed().epoch);
  } else {
    change.done(std::move(status));
  }
  StartRecordedStep();
}

}  // namespace offload::daemon

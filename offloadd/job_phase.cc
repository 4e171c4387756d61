#include "offloadd/job_phase.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::daemon {
namespace {

constexpr uint32_t Bit(JobPhase phase) { return 1u << static_cast<uint32_t>(phase); }

struct CallRow {
  std::string_view name;
  uint32_t phases;          // in which it is allowed
  std::string_view before;  // the call that leads to the first of them
  std::string_view after;   // the call that ended the last of them
};

constexpr uint32_t kWhileSealed =
    Bit(JobPhase::kSealed) | Bit(JobPhase::kPublishing) | Bit(JobPhase::kTraining);
constexpr uint32_t kWhileLiving = Bit(JobPhase::kOpen) | Bit(JobPhase::kSealing) | kWhileSealed;

// By JobCall.
constexpr CallRow kCalls[kJobCalls] = {
    {"Map", kWhileLiving, "OpenJob", ""},
    {"DeclareTensors", Bit(JobPhase::kOpen), "OpenJob", "Seal"},
    {"ReserveScratch", kWhileLiving, "OpenJob", ""},
    {"Seal", Bit(JobPhase::kOpen), "OpenJob", "Seal"},
    // Of an existing job: it has nothing to commit.
    {"Publish", Bit(JobPhase::kSealed) | Bit(JobPhase::kTraining), "Seal", "Publish"},
    {"EndLoad", Bit(JobPhase::kTraining), "Publish", ""},
    {"SetSchedule", kWhileSealed, "Seal", ""},
    {"SetSquareRoots", kWhileLiving, "OpenJob", ""},
    {"BeginStep", Bit(JobPhase::kTraining), "Publish", ""},
    {"Step", Bit(JobPhase::kTraining), "Publish", ""},
    {"WaitDurable", Bit(JobPhase::kTraining), "Publish", ""},
    {"Checkpoint", Bit(JobPhase::kTraining), "Publish", ""},
    {"Exchange", kWhileLiving, "OpenJob", ""},
};

constexpr std::string_view kPhaseNames[kJobPhases] = {
    "opening", "open", "formatting", "sealed", "publishing", "training", "closing", "closed"};

// By JobPhase: what may come after it, kClosing apart.
constexpr uint32_t kSuccessors[kJobPhases] = {
    Bit(JobPhase::kOpen),
    Bit(JobPhase::kSealing),
    Bit(JobPhase::kOpen) | Bit(JobPhase::kSealed) | Bit(JobPhase::kTraining),
    Bit(JobPhase::kPublishing),
    Bit(JobPhase::kSealed) | Bit(JobPhase::kTraining),
    0,
    Bit(JobPhase::kDrained),
    0,
};

const CallRow& RowOf(JobCall call) { return kCalls[static_cast<int>(call)]; }

}  // namespace

std::string_view NameOf(JobPhase phase) { return kPhaseNames[static_cast<int>(phase)]; }
std::string_view NameOf(JobCall call) { return RowOf(call).name; }

absl::Status CheckAllowed(JobCall call, JobPhase phase) {
  const CallRow& row = RowOf(call);
  if ((row.phases & Bit(phase)) != 0) return absl::OkStatus();
  std::string what(row.name);
  if (IsClosing(phase)) {
    what += " after CloseJob";
  } else if (row.phases > Bit(phase) && (row.phases & (Bit(phase) - 1)) == 0) {
    absl::StrAppend(&what, " before ", ToAbsl(row.before));
  } else if (row.after == row.name) {
    what += " for the second time";
  } else {
    absl::StrAppend(&what, " after ", ToAbsl(row.after));
  }
  return MakeError(ErrorId::kProtocol, what);
}

absl::Status DaemonEnds() {
  return MakeError(ErrorId::kDaemonLost, "the daemon was told to end (SIGTERM) and takes no calls");
}

bool CanFollow(JobPhase phase, JobPhase next) {
  if (next == JobPhase::kClosing) return !IsClosing(phase);
  return (kSuccessors[static_cast<int>(phase)] & Bit(next)) != 0;
}

}  // namespace offload::daemon

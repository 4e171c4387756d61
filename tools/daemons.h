// tools/daemons.h
//
// Finds the daemons that this user can reach, asks them how they are and what their jobs have done,
// and has them make and delete snapshots of jobs that they have open.
//
// A daemon's sockets lie in one directory: offloadd.sock, at which ranks introduce themselves, and
// control.sock, the gRPC service. Asking for the status takes no session.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/offload.pb.h"

namespace CLI {
class App;
}  // namespace CLI

namespace offload::tools {

struct DaemonAddress {
  std::string socket;       // of ranks
  bool is_private = false;  // lives and dies with a trainer
};

// Sockets that exist: OFFLOADD_SOCKET, the user's, the system's, then those of private daemons
// under $XDG_RUNTIME_DIR and the temporary directory. Directories of other users (root excepted)
// are left out: anybody may make one there.
std::vector<DaemonAddress> FindDaemons();

// The daemons that a command asks.
class DaemonChoice {
 public:
  // --socket and --timeout.
  void DefineFlags(CLI::App& app);
  std::vector<DaemonAddress> Addresses() const;
  // A single one was named: that it does not answer is the command's failure.
  bool is_named() const { return !socket_.empty(); }
  double timeout_seconds() const { return timeout_seconds_; }  // to wait for each

 private:
  std::string socket_;
  double timeout_seconds_ = 5;
};

// OFD-1501 when nothing answers at the control socket beside `socket` (or at it, if that is its
// name).
absl::StatusOr<proto::v1::StatusReply> AskStatus(const std::string& socket, double timeout_seconds);

// Two of them, for rates: what a job has moved between them.
struct TwoAnswers {
  google::protobuf::RepeatedPtrField<proto::v1::JobStatus> jobs_before;
  proto::v1::StatusReply reply;
  double seconds = 1;  // between the two
};
// Of each daemon, in order. Waits `interval_seconds` between the two, once for all of them; those
// without jobs are not asked again.
std::vector<absl::StatusOr<TwoAnswers>> AskTwice(const std::vector<DaemonAddress>& addresses,
                                                 double timeout_seconds, double interval_seconds);
// Bytes per second of the drive; 0 for a job that was not there before.
struct Rates {
  double read = 0, written = 0;
};
Rates RatesOf(const TwoAnswers& answers, const proto::v1::JobStatus& job);

// What a job that is open there has done; OFD-1002 when it is not.
struct JobReport {
  proto::v1::JobStatus job;
  std::vector<proto::v1::StepRecord> steps;       // ascending, without gaps
  std::vector<proto::v1::TensorFigures> tensors;  // of the store
  std::vector<proto::v1::TensorUse> uses;         // of the trainer's tensors
};
absl::StatusOr<JobReport> AskReport(const std::string& socket, const std::string& pool,
                                    const std::string& job, double timeout_seconds);

// What a daemon wrote may end on a terminal: only what can be printed goes there.
std::string Printable(std::string text);

// The socket of the daemon that has a job open; OFD-1205 when none of those that answer has it.
absl::StatusOr<std::string> FindDaemonOf(const std::string& pool, const std::string& job);

struct SnapshotName {
  std::string pool, job, name;
};
// Blocks until the snapshot is made, at the job's next commit; returns the step that it holds.
// `progress` tells of a growth that is needed first.
absl::StatusOr<uint64_t> AskCreateSnapshot(const std::string& socket, const SnapshotName& snapshot,
                                           bool may_grow,
                                           const std::function<void(uint64_t, uint64_t)>& progress);
absl::Status AskDeleteSnapshot(const std::string& socket, const SnapshotName& snapshot);

// "2h14m", "3m07s", "12s".
std::string FormatDuration(double seconds);

}  // namespace offload::tools

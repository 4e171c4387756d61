// offloadd/daemon.h
//
// The daemon: listens, makes a session of every rank that is welcome, serves control calls, and
// ends cleanly.
//
// Invariants
//   * A private daemon ends when its last rank is gone and drained, or when the process that
//   started it ends without connecting. One that is shared by the ranks of a launch waits until as
//   many have come, or the one that started it is gone.
//   * After SIGTERM nobody is let in; jobs are drained and committed, then Run() returns. A second
//   signal, or a job that is not drained in time, ends the process at once, which leaves the state
//   of a crash: the last committed epoch.
//
// Thread safety: Run() on the main thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "offloadd/event_loop.h"
#include "offloadd/job_table.h"
#include "offloadd/limits.h"
#include "offloadd/metrics_server.h"
#include "offloadd/pool_policy.h"
#include "offloadd/session_table.h"
#include "proto/handshake.h"

namespace grpc {
class Server;
}

namespace offload::daemon {

class ControlService;

struct DaemonOptions {
  std::string socket_path;  // of the handshake; control.sock and metrics.sock are put beside it
  // Beside the daemon's own user and root. Those others get a control socket of their own,
  // ranks.sock, which answers their sessions only, and must live in one of the pools.
  proto::PeerPolicy peers;
  bool is_private = false;
  pid_t parent_pid = 0;     // of a private daemon; 0: not watched
  uint32_t rank_count = 1;  // that share a private daemon
  int directory_lock = -1;  // inherited: of the socket's directory (proto/socket_directory.h)
  PoolPolicy pools;
  double handshake_timeout_seconds = kLimits.handshake_timeout_seconds;
  double drain_timeout_seconds = kLimits.drain_timeout_seconds;
};

class Daemon {
 public:
  static absl::StatusOr<std::unique_ptr<Daemon>> Create(DaemonOptions options);
  ~Daemon();

  // Serves until the end.
  void Run();

 private:
  Daemon(DaemonOptions options, std::unique_ptr<EventLoop> loop);
  absl::Status WatchSignals();
  absl::Status WatchParent();
  // Serves `service` at a socket of its own.
  absl::StatusOr<std::unique_ptr<grpc::Server>> ServeControl(const std::string& path, mode_t mode,
                                                             ControlService* service);
  absl::Status ServeControls();
  absl::Status ServeMetrics();
  std::string Metrics() const;
  void LogRefusal(const absl::Status& status);
  void Accept();
  absl::Status Welcome(UniqueFd socket);
  void SessionEnded(uint64_t id);
  void HandleSignal();
  void Shutdown();
  int CheckDrain();
  void StopIfDone();

  DaemonOptions options_;
  std::string control_path_, ranks_path_, metrics_path_;
  const double started_seconds_;
  std::unique_ptr<EventLoop> loop_;
  UniqueFd listener_, signals_, parent_;
  JobTable jobs_;
  SessionTable sessions_;
  std::unique_ptr<MetricsServer> metrics_;
  std::unique_ptr<ControlService> service_, ranks_service_;
  std::unique_ptr<grpc::Server> server_, ranks_server_;  // the second one for others, if any
  uint64_t next_session_ = 1;
  uint32_t sessions_had_ = 0;
  bool parent_gone_ = false;
  bool shutting_down_ = false;
  double drain_deadline_seconds_ = 0;
  double refusals_since_seconds_ = 0;
  int refusals_ = 0;
};

}  // namespace offload::daemon

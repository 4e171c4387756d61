// offloadd/daemon.h
//
// The daemon: listens, makes a session of every rank that is welcome, serves control calls, and
// ends cleanly.
//
// Invariants
//   * A private daemon ends when its last rank is gone and drained, or when the process that
//   started it ends without connecting.
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
#include "offloadd/limits.h"
#include "offloadd/session_table.h"

namespace grpc {
class Server;
}

namespace offload::daemon {

class ControlService;

struct DaemonOptions {
  std::string socket_path;  // of the handshake; control.sock is put beside it
  bool is_private = false;
  pid_t parent_pid = 0;  // of a private daemon; 0: not watched
  PoolPolicy pools;
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
  absl::Status Listen();
  absl::Status ServeControl();
  void Accept();
  absl::Status Welcome(UniqueFd socket);
  void SessionEnded(uint64_t id);
  void HandleSignal();
  void Shutdown();
  int CheckDrain();
  void StopIfDone();

  DaemonOptions options_;
  std::string control_path_;
  std::unique_ptr<EventLoop> loop_;
  UniqueFd listener_, signals_, parent_;
  SessionTable sessions_;
  std::unique_ptr<ControlService> service_;
  std::unique_ptr<grpc::Server> server_;
  uint64_t next_session_ = 1;
  bool had_session_ = false;
  bool parent_gone_ = false;
  bool shutting_down_ = false;
  double drain_deadline_seconds_ = 0;
};

}  // namespace offload::daemon

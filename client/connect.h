// client/connect.h
//
// Finds the node's daemon or starts a private one, and shakes hands.
//
// A private daemon runs in a process group of its own (Ctrl-C in the terminal ends the trainer; the
// daemon sees that, commits what was put, and ends), with /dev/null as standard input and the
// trainer's standard error for both outputs. It inherits no other descriptor and no LD_PRELOAD. It
// is no child of the trainer, which may wait for all of its children (base/detached_process.h).
//
// The ranks of a launch share one private daemon, in a folder that is named by user and launch:
// whoever has the lock on the folder starts it there, the others connect. It is the launch's then:
// it ends with its last rank, and the one that started it does not wait for it.
//
// Thread safety: one thread at a time.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "client/session.h"
#include "proto/handshake.h"

namespace offload::client {

// Opens /dev/null in the place of standard streams that are closed: what the library opens, or the
// daemon, would have their numbers, and what anybody prints would go there.
void OpenClosedStreams();

// A process with its directory; both are gone when the object is.
class PrivateDaemon {
 public:
  // Starts `binary` in a fresh directory; it is not ready yet. OFD-1501.
  static absl::StatusOr<PrivateDaemon> Start(const std::string& binary);
  // Starts it in `directory` for so many ranks; it has the directory's `lock`, too, until it ends.
  static absl::StatusOr<PrivateDaemon> StartShared(const std::string& binary,
                                                   const std::string& directory,
                                                   const UniqueFd& lock, uint32_t rank_count);

  PrivateDaemon() = default;
  PrivateDaemon(PrivateDaemon&& other) noexcept;
  PrivateDaemon& operator=(PrivateDaemon&& other) noexcept;
  ~PrivateDaemon() { WaitForEnd(); }

  bool valid() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }
  std::string socket_path() const { return directory_ + "/offloadd.sock"; }

  // Tries to connect until the daemon accepts or has ended. OFD-1501.
  absl::StatusOr<UniqueFd> ConnectWhenReady();

  // How the process ended, waiting a moment for it: "exit status 1", "signal 9 (Killed)"; empty
  // when it runs.
  std::string DescribeEnd(int timeout_ms);

  // Tells it to end, unless it is shared.
  void Terminate() const;
  // Waits until it has drained and ended (its socket must be closed before), kills it after two
  // minutes, removes the directory. One that is shared is left to the other ranks.
  void WaitForEnd();
  // In a forked child: forgets process and directory, which are the parent's.
  void Forget();

 private:
  absl::Status Spawn(const std::string& binary, const std::vector<std::string>& more_arguments,
                     int lock = -1);
  // True when it has ended within the time.
  bool HasEnded(int timeout_ms);
  // Sees where a program that was started goes on, if that is said within the time.
  bool Follow(int timeout_ms);
  void Signal(int number) const;
  // Where the trainer gets the processes that have lost their parent (PR_SET_CHILD_SUBREAPER, the
  // first process of a container) those that have ended are its to reap; elsewhere does nothing.
  void ReapAdopted();

  bool is_shared_ = false;
  bool is_child_ = true;  // until it is seen to have detached itself
  pid_t pid_ = -1;
  UniqueFd pidfd_;
  UniqueFd waiting_pidfd_;  // of the process that waits for its end
  UniqueFd report_;
  std::string directory_;
  std::string end_;  // how it ended; empty while it runs
};

struct Connection {
  UniqueFd socket;
  proto::Welcome welcome;
  PrivateDaemon private_daemon;  // not valid() for the node's daemon
};
absl::StatusOr<Connection> ConnectOrStart(const ConnectOptions& options);

// Where the ranks of a launch meet, in $XDG_RUNTIME_DIR or /tmp.
std::string RanksDirectory(const std::string& run_id);

// Where a private daemon's program is looked for, in order; PATH comes after these.
std::vector<std::string> DaemonBinaryCandidates();
absl::StatusOr<std::string> FindDaemonBinary();  // OFD-1501

}  // namespace offload::client

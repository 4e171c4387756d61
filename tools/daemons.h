// tools/daemons.h
//
// Finds the daemons that this user can reach, and asks them how they are.
//
// A daemon's sockets lie in one directory: offloadd.sock, at which ranks introduce themselves, and
// control.sock, the gRPC service. Asking for the status takes no session.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/offload.pb.h"

namespace offload::tools {

struct DaemonAddress {
  std::string socket;       // of ranks
  bool is_private = false;  // lives and dies with a trainer
};

// Sockets that exist: OFFLOADD_SOCKET, the user's, the system's, then those of private daemons
// under $XDG_RUNTIME_DIR and the temporary directory. Directories of other users (root excepted)
// are left out: anybody may make one there.
std::vector<DaemonAddress> FindDaemons();

// OFD-1501 when nothing answers at the control socket beside `socket` (or at it, if that is its
// name).
absl::StatusOr<proto::v1::StatusReply> AskStatus(const std::string& socket, double timeout_seconds);

// "2h14m", "3m07s", "12s".
std::string FormatDuration(double seconds);

}  // namespace offload::tools

// client/leftovers.h
//
// Removes the socket directories of private daemons that were killed together with their trainers.
//
// A directory is removed when all of this holds: its name is offloadd- and six letters or digits,
// as mkdtemp makes it; this user owns it; it has not changed for `minimum_age` (a daemon that
// starts has no socket yet); no process has its socket bound; nobody has its lock (a rank that
// starts a daemon in what another one left); and it holds nothing but a daemon's sockets.
//
// Thread safety: may be called from any thread and process at the same time; who comes second finds
// nothing.
#pragma once

#include <chrono>
#include <string>

namespace offload::client {

inline constexpr std::chrono::seconds kLeftoverAge(60);

// Looks in `parent` only. Whatever fails is left as it is.
void RemoveLeftovers(const std::string& parent, std::chrono::seconds minimum_age = kLeftoverAge);

}  // namespace offload::client

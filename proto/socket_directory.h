// proto/socket_directory.h
//
// The directory that a daemon's sockets lie in, and who may take it away.
//
// A directory that has a name of its own for each start (a private daemon's) has one owner. That of
// the ranks of a launch does not: its name is the launch's, and the next launch of the same name
// may begin to use it while the daemon of the last one ends, or of a rank that was killed starts.
// So whoever starts a daemon there has the directory's lock, which the daemon inherits and keeps
// until it has ended, and nobody removes a directory without that lock: there are never two
// directories of one name, and never two daemons in one.
//
// Thread safety: everything may be called from any thread and process at the same time.
#pragma once

#include <string>

#include "base/unique_fd.h"

namespace offload::proto {

// The lock of `directory`, which `opened` is a descriptor of, for as long as the descriptor lives.
// False when somebody else has it, and when the path no longer leads to what was opened.
bool LockSocketDirectory(const UniqueFd& opened, const std::string& directory);

// Removes a daemon's own sockets in `directory`, then the directory if nothing else is in it.
// Leaves all as it is when somebody has the lock: a daemon starts there.
void RemoveSocketDirectory(const std::string& directory);

// The directory alone, if it is empty and nobody has the lock.
void RemoveEmptySocketDirectory(const std::string& directory);

}  // namespace offload::proto

// proto/keeper.h
//
// A private daemon is no child of its trainer, which may wait for all the children that it has made
// (until wait() finds none), and count them. The process that the trainer starts ends at once and
// leaves two: the daemon, and its keeper, which waits for it and tells the trainer how it ended.
//
// Over a stream socket of the trainer's: keeper → trainer the daemon's number, as soon as it lives;
// trainer → keeper one byte, until which the number is the daemon's even if that has ended; keeper
// → trainer its wait status. Either may be gone.
//
// Thread safety: LeaveToKeeper() before the first thread of its process, the others any.
#pragma once

#include <sys/types.h>

namespace offload::proto {

// In the process that the trainer has started: returns in the daemon only, which has `trainer` no
// more.
void LeaveToKeeper(int trainer);

// In the trainer. The daemon's number; -1 when there is none: the process has ended before.
pid_t DaemonOfKeeper(int keeper);
void ReleaseNumber(int keeper);
// Whether it has told the daemon's wait status within the time.
bool WaitStatusOfDaemon(int keeper, int timeout_ms, int& status);

}  // namespace offload::proto

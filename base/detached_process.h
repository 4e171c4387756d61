// base/detached_process.h
//
// A program that goes on in a process which is no child of the one that started it, so that nobody
// who waits for all children of that waits for it: wait(nullptr), waitpid(-1, …).
//
//   parent ── starts ──► program ── Detach() ──► a waiting process ──► the program, from here on
//                        (ends at once)          (ends with it)
//
// The parent has the reading end of a pipe, in which it finds the numbers of the waiting process
// and of that in which the program goes on, then, when that has ended, the status that wait() would
// have given: the waiting process does nothing but wait for it. A pipe that ends before says
// nothing more.
//
// Thread safety: Detach() is called while the process has one thread.
#pragma once

#include <cstdint>
#include <optional>

namespace offload {

// Returns in the new process; `report`, the writing end, is closed there. Where the process cannot
// be forked (limits) it returns in this one, which stays a child, and nothing is reported.
void Detach(int report);

// The next number in the pipe, within the time; missing when there is none, or no more.
std::optional<int32_t> ReadReport(int report, int timeout_ms);

}  // namespace offload

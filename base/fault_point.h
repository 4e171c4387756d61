// base/fault_point.h
//
// Named places where a test may kill the process.
//
//   FaultPoint("store.after_data_flush");
//
// Does nothing unless the environment says OFFLOADD_FAULT_POINT=name:count[:action]; then the
// count-th passage through the place of that name (counted from 1, over all threads) ends the
// process: `kill` (the default) by SIGKILL, as a crash would, `exit` by leaving at once with status
// 86, so that coverage and sanitizers can report. A text that cannot be read ends the process at
// start with a message and status 2: a test must not pass because its fault never came.
//
// Unarmed, a passage costs one relaxed load.
//
// Thread safety: FaultPoint may be called from any thread.
#pragma once

#include <atomic>
#include <string_view>

namespace offload {

namespace internal {
extern std::atomic<bool> fault_point_armed;
void PassFaultPoint(std::string_view name);
}  // namespace internal

inline void FaultPoint(std::string_view name) {
  if (internal::fault_point_armed.load(std::memory_order_relaxed)) internal::PassFaultPoint(name);
}

// Arms as the environment variable would. Returns false, and changes nothing, when the text cannot
// be read. For tests; call it before other threads pass fault points.
bool ArmFaultPoint(std::string_view text);

}  // namespace offload

// base/advice.h
//
// What to do, where several errors in several programs have the same way out.
#pragma once

namespace offload {

inline constexpr char kThreadsFix[] =
    "Raise the limit of threads (ulimit -u, TasksMax, docker --pids-limit), or of address space "
    "(ulimit -v)";

}  // namespace offload

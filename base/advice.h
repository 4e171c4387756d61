// base/advice.h
//
// What to do, where several errors in several programs have the same way out.
#pragma once

namespace offload {

inline constexpr char kThreadsFix[] =
    "Raise the limit of threads (ulimit -u, TasksMax, docker --pids-limit), or of address space "
    "(ulimit -v)";
inline constexpr char kSeccompFix[] =
    "Allow it in the container's seccomp profile (docker run --security-opt seccomp=FILE)";

}  // namespace offload

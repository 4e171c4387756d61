// client/own_processors.h
//
// The processors that a trainer computes on. A thread's own ones do not tell: OpenMP binds the
// first thread to one processor (OMP_PROC_BIND), and the others elsewhere, when they are made.
//
// Thread safety: any thread.
#pragma once

#include "base/cpu_list.h"

namespace offload::client {

// Where any thread of this process may run, or OpenMP will put one.
CpuList OwnProcessors();

}  // namespace offload::client

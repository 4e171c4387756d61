// zero3/torch/options_check.h
//
// What options mean to this process, and whether they can be: looked at before a daemon is asked.
#pragma once

#include <offload/torch.h>

#include <cstdint>

#include "base/averaging.h"
#include "zero3/zero_policy.h"

namespace offload::zero3 {

// What `ram` is spent on.
ZeroPolicy PolicyOf(const Options& options);

// OFFLOADD_DISABLE: everything is trained in memory.
bool IsDisabled();

// What average of the weights the job keeps.
Averaging AveragingOf(const Options& options);

// Whether pointers into offloaded tensors are served.
bool ServesRaw(const Options& options);

// The bytes of `ram`. Throws OFD-1002 for a size, a number or a word that cannot be, by the name of
// its option. What only the daemon knows (names of jobs, pools, its limits) is said by the daemon.
uint64_t CheckOptions(const Options& options);

}  // namespace offload::zero3

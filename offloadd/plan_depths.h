// offloadd/plan_depths.h
//
// How much of a job is under way at a time, once it is known what its plan keeps in memory: as
// proto::ChooseDepths(), which daemon and planner go by, and more update threads where no drive
// paces the update.
//
// Thread safety: pure function.
#pragma once

#include <cstdint>

#include "proto/depths.h"
#include "proto/slab_layout.h"

namespace offload::daemon {

// `update_threads` as proto::ChooseDepths() has it. Where every extent that is updated keeps its
// state in memory, the update takes what it takes of the cores beside torch, whose threads wait for
// each other in every operator: what it takes of one core only all of them lose, of n cores the
// n-th part. So it takes up to kThreadsInMemoryMax of them, as far as each thread has
// kExtentsOfThread extents of a step.
inline constexpr uint64_t kThreadsInMemoryMax = 4, kExtentsOfThread = 8;
proto::Depths DepthsOfPlan(const proto::MachineRates& rates, uint32_t update_threads,
                           const proto::Catalogue& catalogue, const proto::MemoryPlan& plan);

}  // namespace offload::daemon

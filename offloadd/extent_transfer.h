// offloadd/extent_transfer.h
//
// An extent's way between drive and memory, for those that update it: which transfers bring what a
// pass over it needs, and which writes take what it has made.
//
// Thread safety: the loop's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"
#include "offloadd/resident_state.h"
#include "swap/store.h"

namespace offload::daemon {

// An update of extent `index` by `members`, without the memory of its planes.
ExtentUpdate DescribeExtent(const JobContext& context, uint32_t store_tensor, uint32_t index,
                            std::span<const MemberUpdate> members);

// Starts reading planes into where `update` has them, and sets their stamps: those that are
// `wanted` and that the tensor has. `done` runs once for each transfer that is started; their
// number.
uint32_t ReadPlanes(JobContext& context, const PlaneFlags& wanted, ExtentUpdate& update,
                    const std::function<void(absl::Status)>& done);
// The same for the tie bits of the residual, where the update has one; an error when there is no
// memory for them. At most one transfer.
absl::StatusOr<uint32_t> ReadTies(JobContext& context, const ResidentState& state,
                                  ExtentUpdate& update,
                                  const std::function<void(absl::Status)>& done);

// What goes to the drive of an update that was run; the bytes are where the update has them.
std::vector<swap::WriteRequest> WritesOf(const ExtentUpdate& update);

}  // namespace offload::daemon

// offloadd/step_plan.h
//
// What a step does, checked: from the rank's messages to one task per tensor of the store.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"
#include "proto/offload.pb.h"

namespace offload::daemon {

struct TaskPlan {
  uint32_t store_tensor = 0;
  std::vector<uint32_t> tensors;      // that are updated, ascending by place
  std::vector<MemberUpdate> members;  // one for each of them
  bool spilled = false;               // the gradient comes from the scratch file, at
  uint64_t scratch_offset = 0;
};

struct StepPlan {
  uint64_t step = 0;
  std::optional<std::string> trainer_state;
  std::vector<TaskPlan> tasks;
  bool is_partial = false;  // the rank has the rest elsewhere
};

// OFD-1503 for what the client must not send, OFD-1604 for an optimizer that the job was not sealed
// for.
absl::StatusOr<StepPlan> MakeStepPlan(const std::vector<proto::v1::StepRequest>& messages,
                                      const JobContext& context);

}  // namespace offload::daemon

// tools/universal.h
//
// Writes a job as a universal checkpoint of DeepSpeed, as python/offloadd/universal.py does, one
// extent at a time:
//
//   FOLDER/latest_universal                 TAG
//   FOLDER/TAG/zero/NAME/fp32.pt            the master
//   FOLDER/TAG/zero/NAME/exp_avg.pt …       each state, under torch's name
//   FOLDER/TAG/zero/NAME/step.pt            how often the parameter was updated
//   FOLDER/TAG/zero/optimizer_state.pt      the step, and groups without options
//   FOLDER/TAG/…_model_states.pt            the step, for the engine of each stage
//
// Errors: OFD-1404; those of a store that is damaged.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/stored_model.h"

namespace offload::tools {

// Of the folder that holds checkpoints: a file with the tag of the last one.
inline constexpr char kLatestUniversal[] = "latest_universal";

// Parameters' names become folders: whether this one would lead out of the checkpoint, or nowhere.
bool LeadsOut(const std::string& name);

// "global_step7_universal"
std::string UniversalTag(const StoredModel& model);

// OFD-1404 when FOLDER/TAG is there already.
absl::Status CheckHoldsNoUniversal(const std::string& folder, const std::string& tag);

// FOLDER/TAG has its name when all of it is durable. Returns the bytes of all tensors; `progress`
// gets bytes done, and in all.
absl::StatusOr<uint64_t> WriteUniversal(StoredModel& model, const std::string& folder,
                                        const std::string& tag,
                                        const std::function<void(uint64_t, uint64_t)>& progress);

}  // namespace offload::tools

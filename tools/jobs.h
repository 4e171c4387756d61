// tools/jobs.h
//
// What the commands for a job's store have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"

namespace offload::tools {

// The store of a job, open or not. OFD-1002 when the pool holds none of that name.
absl::StatusOr<swap::StoreSummary> FindJob(const std::string& pool, const std::string& job);

// What a job that is to be made would find in a pool: OFD-1002 where it is no name, OFD-1205 where
// there is one of that name.
absl::Status CheckIsNewJob(const std::string& pool, const std::string& job);

// Tells of long work on stderr, at most once a second: bytes done, and in all.
std::function<void(uint64_t, uint64_t)> ProgressLine();

}  // namespace offload::tools

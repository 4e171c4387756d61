// base/run_names.h
//
// What a run names: its job, and the pool where its state lies. One rule for configuration, the
// trainer, the daemon and the files.
//
// Thread safety: pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace offload {

// What is wrong with a name, to go behind it, and what to do.
struct NameComplaint {
  std::string what;
  std::string fix;
};

inline constexpr size_t kJobNameBytesMax = 128;

// Letters, digits, '.', '_', '-', '#'; 1 to kJobNameBytesMax bytes; not starting with '.'.
bool IsValidJobName(std::string_view job);
std::optional<NameComplaint> ComplainOfJob(std::string_view job);
// OFD-1002 that says what a name may be.
absl::Status CheckJobName(std::string_view job);

// A pool is a directory; several, separated by commas with or without spaces, hold a store together
// ("/nvme0,/nvme1"). The first has the store's file, the others have a member of it each. Refused
// are an empty one among several, one that is there twice, and the ~ of shells. The empty text is
// one pool without a name.
std::optional<NameComplaint> ComplainOfPools(std::string_view pool);
// OFD-1002 where there is a complaint.
absl::StatusOr<std::vector<std::string>> SplitPools(std::string_view pool);

// What is no name of a device of torch that the library serves: "cuda", "cuda:1", "cpu" are.
std::optional<NameComplaint> ComplainOfDevice(std::string_view device);

}  // namespace offload

// base/durability.h
//
// How often a job commits, as its user says it: "step", "checkpoint:100" or "checkpoint:10min".
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace offload {

struct Durability {
  uint64_t steps = 1;  // the steps whose number is a multiple of it are committed; 0: by the clock
  double seconds = 0;  // then: the first step that begins so long after the commit before
  // A step may leave what stays in memory unwritten, since it need not be committed.
  bool has_intervals() const { return steps != 1; }
};

// Of "" the default, step. OFD-1002 for anything else.
absl::StatusOr<Durability> ParseDurability(std::string_view text);

}  // namespace offload

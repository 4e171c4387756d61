// offloadd/pool_policy.h
//
// Which folders a daemon keeps jobs in.
//
// Thread safety: const.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace offload::daemon {

// Where jobs may live.
struct PoolPolicy {
  std::string default_pool;          // for requests without one; may be empty
  std::vector<std::string> allowed;  // empty: any
};
// The pool of a request, or its pools; OFD-1002 without one, OFD-1504 when one is not allowed.
absl::StatusOr<std::string> ChoosePool(const PoolPolicy& policy, const std::string& requested);

}  // namespace offload::daemon

#include "offloadd/pool_policy.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "swap/store.h"

namespace offload::daemon {
namespace {

bool IsAllowed(const PoolPolicy& policy, const std::string& pool) {
  return std::any_of(policy.allowed.begin(), policy.allowed.end(), [&](const std::string& allowed) {
    std::error_code error;
    return pool == allowed || std::filesystem::equivalent(pool, allowed, error);
  });
}

}  // namespace

absl::StatusOr<std::string> ChoosePool(const PoolPolicy& policy, const std::string& requested) {
  const std::string& pool = requested.empty() ? policy.default_pool : requested;
  if (pool.empty())
    return MakeError(ErrorId::kBadValue, "no pool is given, and the daemon has no default one");
  if (policy.allowed.empty()) return pool;
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> wanted, SplitPools(pool));
  for (const std::string& each : wanted) {
    if (IsAllowed(policy, each)) continue;
    return MakeError(ErrorId::kRefused,
                     absl::StrCat("pool \"", each, "\" is not one of this daemon's: ",
                                  absl::StrJoin(policy.allowed, ", ")));
  }
  return pool;
}

}  // namespace offload::daemon

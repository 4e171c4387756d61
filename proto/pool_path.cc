#include "proto/pool_path.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/run_names.h"

namespace offload::proto {

std::string AbsolutePools(const std::string& pool) {
  std::vector<std::string> pools = SplitPools(pool).value_or(std::vector<std::string>{pool});
  for (std::string& each : pools) {
    std::error_code error;
    const std::filesystem::path absolute = std::filesystem::absolute(each, error);
    if (!each.empty() && !error) each = absolute.string();
  }
  return absl::StrJoin(pools, ",");
}

}  // namespace offload::proto

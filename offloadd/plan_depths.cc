#include "offloadd/plan_depths.h"

#include <algorithm>
#include <optional>

namespace offload::daemon {

proto::Depths DepthsOfPlan(const proto::MachineRates& rates, uint32_t update_threads,
                           const proto::Catalogue& catalogue, const proto::MemoryPlan& plan) {
  proto::Depths depths = proto::ChooseDepths(rates, update_threads);
  const std::optional<uint64_t> extents = proto::ExtentsInMemory(catalogue, plan);
  if (update_threads != 0 || !extents.has_value()) return depths;
  const uint64_t threads =
      std::min({uint64_t{rates.cores}, kThreadsInMemoryMax, *extents / kExtentsOfThread});
  depths.update_threads = std::max(depths.update_threads, static_cast<uint32_t>(threads));
  return depths;
}

}  // namespace offload::daemon

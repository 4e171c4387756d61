#include "offloadd/plan_depths.h"

#include <algorithm>

namespace offload::daemon {
namespace {

// That are updated from memory; 0 where some are read from the drive.
uint64_t ExtentsInMemory(const proto::Catalogue& catalogue, const proto::MemoryPlan& plan) {
  uint64_t count = 0;
  for (size_t i = 0; i < catalogue.store_tensors.size(); ++i) {
    const proto::StoreTensor& tensor = catalogue.store_tensors[i];
    if (!tensor.trainable) continue;
    const uint32_t extents = proto::ExtentCount(tensor.element_count);
    if (plan.state_resident[i] < extents) return 0;
    count += extents;
  }
  return count;
}

}  // namespace

proto::Depths DepthsOfPlan(const proto::MachineRates& rates, uint32_t update_threads,
                           const proto::Catalogue& catalogue, const proto::MemoryPlan& plan) {
  proto::Depths depths = proto::ChooseDepths(rates, update_threads);
  if (update_threads != 0) return depths;
  const uint64_t threads = std::min({uint64_t{rates.cores}, kThreadsInMemoryMax,
                                     ExtentsInMemory(catalogue, plan) / kExtentsOfThread});
  depths.update_threads = std::max(depths.update_threads, static_cast<uint32_t>(threads));
  return depths;
}

}  // namespace offload::daemon

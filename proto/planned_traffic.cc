#include "proto/planned_traffic.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

namespace offload::proto {
namespace {

// Until the window's contents repeat themselves from step to step.
constexpr size_t kRounds = 3;

// By position: touches until the same tensor's next one, in the order repeated for ever.
std::vector<size_t> Distances(std::span<const uint32_t> touches, size_t tensor_count) {
  std::vector<size_t> distances(touches.size());
  std::vector<size_t> next(tensor_count, 0);
  for (size_t round = 0; round < 2; ++round) {
    for (size_t i = touches.size(); i-- > 0;) {
      const size_t position = i + (1 - round) * touches.size();
      if (round == 1) distances[i] = next[touches[i]] - position;
      next[touches[i]] = position;
    }
  }
  return distances;
}

enum class Evicts : uint8_t { kNeededLast, kUsedFirst };

// How often each tensor of the store is brought into the window in a step, once steps repeat
// themselves. The window evicts what is needed last (Belady's rule, which base/residency.h
// follows), or what was used longest ago.
std::vector<uint32_t> LoadsOfStep(std::span<const uint32_t> touches,
                                  const std::vector<uint64_t>& slot_bytes, uint64_t window_bytes,
                                  Evicts evicts) {
  const std::vector<size_t> distances = Distances(touches, slot_bytes.size());
  std::vector<uint32_t> loads(slot_bytes.size(), 0);
  std::vector<size_t> use(slot_bytes.size(), 0);  // the next or last one; 0: not in the window
  std::set<std::pair<size_t, uint32_t>> window;   // by that
  uint64_t bytes = 0;
  for (size_t round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < touches.size(); ++i) {
      const uint32_t tensor = touches[i];
      if (use[tensor] != 0) {
        window.erase({use[tensor], tensor});
      } else {
        bytes += slot_bytes[tensor];
        loads[tensor] += round + 1 == kRounds ? 1 : 0;
        while (bytes > window_bytes && !window.empty()) {
          const auto evicted =
              evicts == Evicts::kNeededLast ? std::prev(window.end()) : window.begin();
          bytes -= slot_bytes[evicted->second];
          use[evicted->second] = 0;
          window.erase(evicted);
        }
      }
      use[tensor] = round * touches.size() + i + (evicts == Evicts::kNeededLast ? distances[i] : 1);
      window.insert({use[tensor], tensor});
    }
  }
  return loads;
}

// What was used longest ago is gone by its next use, unless the order turns just there: so most
// tensors are brought for each forward and each backward, and some, which are used twice in each,
// more often.
uint32_t PassesOf(std::vector<uint32_t> loads) {
  std::erase(loads, 0);
  if (loads.empty()) return 1;
  const auto most = loads.begin() + static_cast<std::ptrdiff_t>(loads.size() * 3 / 4);
  std::nth_element(loads.begin(), most, loads.end());
  return std::max<uint32_t>(1, (*most + 1) / 2);
}

bool IsSpilled(GradientHome home) {
  return home == GradientHome::kScratch || home == GradientHome::kSlabScratch;
}

}  // namespace

StepTraffic PlanTraffic(const Catalogue& catalogue, const MemoryPlan& plan,
                        std::span<const uint32_t> touches) {
  const size_t count = catalogue.store_tensors.size();
  std::vector<uint64_t> slot_bytes;
  for (const StoreTensor& tensor : catalogue.store_tensors)
    slot_bytes.push_back(WeightSlotBytes(tensor));
  std::vector<uint32_t> brought;  // store tensors, in order
  if (touches.size() <= kPlannedTouchesMax) {
    for (const uint32_t tensor : touches) {
      const uint32_t store_tensor = catalogue.placements[tensor].store_tensor;
      if (!plan.weight_resident[store_tensor]) brought.push_back(store_tensor);
    }
  }
  StepTraffic traffic;
  traffic.order_known = !brought.empty() || std::ranges::find(plan.weight_resident, false) ==
                                                plan.weight_resident.end();
  std::vector<uint32_t> loads(count, 2);
  if (traffic.order_known) {
    loads = LoadsOfStep(brought, slot_bytes, plan.window_bytes, Evicts::kNeededLast);
    traffic.passes =
        PassesOf(LoadsOfStep(brought, slot_bytes, plan.window_bytes, Evicts::kUsedFirst));
  }
  std::vector<bool> is_touched(count, !traffic.order_known);
  for (const uint32_t store_tensor : brought) is_touched[store_tensor] = true;

  for (size_t i = 0; i < count; ++i) {
    const StoreTensor& tensor = catalogue.store_tensors[i];
    const bool is_resident = plan.weight_resident[i];
    if (!is_resident) traffic.weight_read_bytes += loads[i] * slot_bytes[i];
    if (!tensor.trainable || (!is_resident && !is_touched[i])) continue;
    (is_resident ? traffic.checkpoint_bytes : traffic.written_bytes) += slot_bytes[i];
    for (uint32_t extent = 0; extent < ExtentCount(tensor.element_count); ++extent) {
      const uint64_t bytes = StateBytes(tensor, extent);
      const bool stays = extent < plan.state_resident[i];
      if (!stays) traffic.state_read_bytes += bytes;
      (stays ? traffic.checkpoint_bytes : traffic.written_bytes) += bytes;
    }
  }
  // Every pass but the first adds to what the one before it has spilled; the update reads the sum.
  for (size_t i = 0; i < catalogue.tensors.size() && i < plan.gradients.size(); ++i) {
    const uint32_t store_tensor = catalogue.placements[i].store_tensor;
    if (!IsSpilled(plan.gradients[i].home)) continue;
    if (!plan.weight_resident[store_tensor] && !is_touched[store_tensor]) continue;
    const uint64_t bytes =
        PaddedBytes(catalogue.tensors[i].element_count * DtypeBytes(catalogue.tensors[i].dtype));
    traffic.gradient_read_bytes += traffic.passes * bytes;
    traffic.gradient_written_bytes += traffic.passes * bytes;
  }
  return traffic;
}

}  // namespace offload::proto

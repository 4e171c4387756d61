#include "offloadd/update_order.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace offload::daemon {

void UpdateOrder::Reset(std::vector<Task> tasks) {
  tasks_.assign(tasks.begin(), tasks.end());
  demanded_.clear();
  Sort();
}

void UpdateOrder::Sort() {
  std::sort(tasks_.begin(), tasks_.end(), [this](const Task& a, const Task& b) {
    return std::make_tuple(demanded_.count(a.store_tensor) == 0, a.next_use, a.store_tensor) <
           std::make_tuple(demanded_.count(b.store_tensor) == 0, b.next_use, b.store_tensor);
  });
}

void UpdateOrder::Reorder(const std::function<uint64_t(uint32_t)>& next_use) {
  for (Task& task : tasks_) task.next_use = next_use(task.store_tensor);
  Sort();
}

void UpdateOrder::Demand(uint32_t store_tensor) {
  const auto found = std::find_if(tasks_.begin(), tasks_.end(), [store_tensor](const Task& task) {
    return task.store_tensor == store_tensor;
  });
  if (found == tasks_.end() || !demanded_.insert(store_tensor).second) return;
  const Task task = *found;
  tasks_.erase(found);
  tasks_.push_front(task);
}

std::optional<uint32_t> UpdateOrder::Next(bool polite, const Look& look,
                                          const MakeRoom& make_room) {
  bool room_refused = false;
  for (auto task = tasks_.begin(); task != tasks_.end(); ++task) {
    const uint32_t store_tensor = task->store_tensor;
    const Readiness readiness = look(store_tensor);
    if (readiness == Readiness::kBusy) continue;
    if (readiness == Readiness::kNeedsRoom) {
      if (room_refused) continue;
      const bool demanded = demanded_.count(store_tensor) != 0;
      const std::optional<uint64_t> needed =
          polite && !demanded ? std::optional(task->next_use) : std::nullopt;
      if (!make_room(store_tensor, needed)) {
        room_refused = true;
        continue;
      }
    }
    demanded_.erase(store_tensor);
    tasks_.erase(task);
    return store_tensor;
  }
  return std::nullopt;
}

}  // namespace offload::daemon

#include "zero3/gpu/gpu_traffic.h"

#include <algorithm>
#include <deque>
#include <list>
#include <optional>
#include <vector>

#include "base/residency.h"
#include "zero3/schedule.h"

namespace offload::zero3 {
namespace {

// The first records the order, the second meets what that has left; where some weights are frozen,
// and stay, it takes some more until steps repeat themselves.
constexpr int kSteps = 6;
// Further ones move what the last of these moves.
constexpr uint64_t kMicroBatches = 3;

// Of more tensors every use is taken for a copy, unless the window holds all: the search for places
// takes as long as the window has slots, and a plan should not take seconds.
constexpr size_t kFollowedTensorsMax = 1200;

std::vector<uint64_t> SlotsOf(std::span<const GpuTensor> tensors, const GpuPlan& plan) {
  std::vector<uint64_t> slots;
  for (const GpuTensor& tensor : tensors)
    slots.push_back(plan.Stays(slots.size()) ? 0 : DeviceBytes(tensor.weight_bytes));
  return slots;
}

// GpuWindow's decisions, with a source that always has what is asked for.
class PlannedWindow {
 public:
  PlannedWindow(std::span<const GpuTensor> tensors, const GpuPlan& plan)
      : tensors_(tensors),
        slots_(SlotsOf(tensors, plan)),
        schedule_(slots_, plan.lookahead_bytes),
        places_(plan.window_bytes),
        is_coarse_(tensors.size() > kFollowedTensorsMax &&
                   plan.window_bytes + plan.tier_weight_bytes < plan.weight_bytes),
        arrival_(tensors.size(), 0) {}

  void Use(uint32_t tensor) {
    if (slots_[tensor] == 0) return;
    if (is_coarse_) {
      copied_bytes_ += tensors_[tensor].weight_bytes;
      return;
    }
    schedule_.Touch(tensor, [this](uint32_t next) { wanted_.push_back(next); });
    used_ = tensor;
    if (!places_.OffsetOf(tensor).has_value()) Bring(tensor, std::nullopt);
    BringAhead();
    used_.reset();
  }

  void EndStep() {
    for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      if (tensors_[tensor].gradient_bytes > 0 && places_.OffsetOf(tensor).has_value())
        places_.Release(tensor);
    }
    wanted_.clear();
    if (schedule_.EndStep([this](uint32_t next) { wanted_.push_back(next); }))
      order_ = UseOrder(schedule_.order(), static_cast<uint32_t>(tensors_.size()));
    BringAhead();
  }

  uint64_t copied_bytes() const { return copied_bytes_; }

 private:
  uint64_t NextUse(uint32_t tensor) const {
    return order_.empty() ? kNeverUsed - 1 - arrival_[tensor]
                          : order_.NextUse(tensor, schedule_.position());
  }

  bool Bring(uint32_t tensor, std::optional<uint64_t> needed) {
    const auto room = places_.Find(slots_[tensor], needed, [this](uint32_t other) {
      return Occupant{.evictable = other != used_, .next_use = NextUse(other)};
    });
    if (!room.has_value()) return false;
    for (const uint32_t evicted : room->evicted) places_.Release(evicted);
    places_.Occupy(tensor, room->offset_bytes, slots_[tensor]);
    arrival_[tensor] = ++arrivals_;
    copied_bytes_ += tensors_[tensor].weight_bytes;
    return true;
  }

  void BringAhead() {
    for (; !wanted_.empty(); wanted_.pop_front()) {
      const uint32_t tensor = wanted_.front();
      if (!places_.OffsetOf(tensor).has_value() && !Bring(tensor, NextUse(tensor))) return;
    }
  }

  const std::span<const GpuTensor> tensors_;
  const std::vector<uint64_t> slots_;
  Schedule schedule_;
  UseOrder order_;
  WeightWindow places_;
  const bool is_coarse_;
  std::deque<uint32_t> wanted_;
  std::optional<uint32_t> used_;
  std::vector<uint64_t> arrival_;
  uint64_t arrivals_ = 0, copied_bytes_ = 0;
};

// DeviceGradients' decisions: who was used longest ago makes room.
class PlannedGradients {
 public:
  PlannedGradients(std::span<const GpuTensor> tensors, const GpuPlan& plan)
      : tensors_(tensors), bytes_max_(plan.gradient_bytes), place_(tensors.size()) {}

  // `begins`: there is nothing yet that it could be added to.
  void Add(uint32_t tensor, bool begins) {
    const uint64_t size_bytes = tensors_[tensor].gradient_bytes;
    returned_bytes_ += size_bytes;
    if (!begins && !place_[tensor].has_value()) fetched_bytes_ += size_bytes;
    Use(tensor);
  }

  uint64_t fetched_bytes() const { return fetched_bytes_; }
  uint64_t returned_bytes() const { return returned_bytes_; }

 private:
  void Use(uint32_t tensor) {
    if (tensors_[tensor].gradient_bytes == 0) return;
    if (place_[tensor].has_value()) Leave(tensor);
    place_[tensor] = resting_.insert(resting_.end(), tensor);
    resting_bytes_ += DeviceBytes(tensors_[tensor].gradient_bytes);
    while (resting_bytes_ > bytes_max_) Leave(resting_.front());
  }

  void Leave(uint32_t tensor) {
    resting_.erase(*place_[tensor]);
    place_[tensor].reset();
    resting_bytes_ -= DeviceBytes(tensors_[tensor].gradient_bytes);
  }

  const std::span<const GpuTensor> tensors_;
  const uint64_t bytes_max_;
  std::list<uint32_t> resting_;  // longest first
  std::vector<std::optional<std::list<uint32_t>::iterator>> place_;
  uint64_t resting_bytes_ = 0;
  uint64_t fetched_bytes_ = 0, returned_bytes_ = 0;
};

LinkTraffic Follow(std::span<const GpuTensor> tensors, const GpuPlan& plan,
                   uint64_t micro_batches) {
  const auto count = static_cast<uint32_t>(tensors.size());
  PlannedWindow window(tensors, plan);
  PlannedGradients gradients(tensors, plan);
  LinkTraffic before, now;
  for (int step = 0; step < kSteps; ++step) {
    before = now;
    for (uint64_t pass = 0; pass < micro_batches; ++pass) {
      for (uint32_t tensor = 0; tensor < count; ++tensor) window.Use(tensor);
      for (uint32_t tensor = count; tensor-- > 0;) {
        window.Use(tensor);
        if (!plan.Stays(tensor)) gradients.Add(tensor, /*begins=*/pass == 0);
      }
    }
    window.EndStep();
    now = {window.copied_bytes(), gradients.fetched_bytes(), gradients.returned_bytes()};
  }
  uint64_t checkpoint_bytes = 0;
  for (uint32_t tensor = 0; tensor < count; ++tensor) {
    if (plan.Stays(tensor))
      checkpoint_bytes += tensors[tensor].weight_bytes + tensors[tensor].state_bytes;
  }
  return {now.weight_bytes - before.weight_bytes, now.fetched_bytes - before.fetched_bytes,
          now.gradient_bytes - before.gradient_bytes, checkpoint_bytes};
}

// What `more` moves beyond `less`, so many times.
uint64_t Further(uint64_t less, uint64_t more, uint64_t times) {
  return more + (more - std::min(less, more)) * times;
}

}  // namespace

LinkTraffic PlanLinkTraffic(std::span<const GpuTensor> tensors, const GpuPlan& plan,
                            uint64_t micro_batches) {
  const LinkTraffic last = Follow(tensors, plan, std::min(micro_batches, kMicroBatches));
  if (micro_batches <= kMicroBatches) return last;
  const LinkTraffic before = Follow(tensors, plan, kMicroBatches - 1);
  const uint64_t times = micro_batches - kMicroBatches;
  return {Further(before.weight_bytes, last.weight_bytes, times),
          Further(before.fetched_bytes, last.fetched_bytes, times),
          Further(before.gradient_bytes, last.gradient_bytes, times), last.checkpoint_bytes};
}

}  // namespace offload::zero3

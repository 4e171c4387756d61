// zero3/gpu/event_pool.h
//
// Recorded events, used again when nobody holds them any more.
//
// Thread safety: as its owner: none, but events may be dropped only under the owner's lock.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "accelerator/timing.h"

namespace offload::zero3 {

// An event that has been recorded. To be dropped before the pool.
using RecordedEvent = std::shared_ptr<const accelerator::Event>;

class EventPool {
 public:
  // With `timing`, the same device: events whose times count.
  explicit EventPool(accelerator::Accelerator* accelerator,
                     accelerator::TimingDevice* timing = nullptr)
      : accelerator_(accelerator), timing_(timing) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event that stands for everything submitted to `stream` so far.
  absl::StatusOr<RecordedEvent> Record(accelerator::Stream stream);

 private:
  accelerator::Accelerator* const accelerator_;
  accelerator::TimingDevice* const timing_;
  std::vector<accelerator::Event> free_;
};

}  // namespace offload::zero3

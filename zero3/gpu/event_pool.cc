#include "zero3/gpu/event_pool.h"

#include "base/status_macros.h"

namespace offload::zero3 {

EventPool::~EventPool() {
  for (const accelerator::Event event : free_) accelerator_->EventDestroy(event).IgnoreError();
}

absl::StatusOr<RecordedEvent> EventPool::Record(accelerator::Stream stream) {
  if (free_.empty()) {
    OFFLOAD_ASSIGN_OR_RETURN(const accelerator::Event created, timing_ != nullptr
                                                                   ? timing_->TimedEventCreate()
                                                                   : accelerator_->EventCreate());
    free_.push_back(created);
  }
  const accelerator::Event event = free_.back();
  OFFLOAD_RETURN_IF_ERROR(accelerator_->EventRecord(event, stream));
  free_.pop_back();
  return RecordedEvent(new accelerator::Event(event), [this](const accelerator::Event* dropped) {
    free_.push_back(*dropped);
    delete dropped;
  });
}

}  // namespace offload::zero3

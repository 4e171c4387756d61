#include "zero3/gpu/stream_stalls.h"

#include <optional>
#include <utility>

#include "base/status_macros.h"

namespace offload::zero3 {

absl::Status StreamStalls::Wait(accelerator::Stream stream, accelerator::Event event) {
  if (timing_ == nullptr) return accelerator_->StreamWaitEvent(stream, event);
  OFFLOAD_RETURN_IF_ERROR(Collect(waits_.size() < kWaitsMax ? Upto::kFirstUnknown : Upto::kEnd));
  if (waits_.size() >= kWaitsMax) return accelerator_->StreamWaitEvent(stream, event);
  OFFLOAD_ASSIGN_OR_RETURN(RecordedEvent begin, events_.Record(stream));
  absl::Status waits = accelerator_->StreamWaitEvent(stream, event);
  absl::StatusOr<RecordedEvent> end = events_.Record(stream);
  if (end.ok()) {
    waits_.push_back({std::move(begin), *std::move(end)});
  } else {
    waits.Update(end.status());
  }
  return waits;
}

double StreamStalls::Seconds() {
  if (timing_ != nullptr) Collect(Upto::kFirstUnknown).IgnoreError();
  return seconds_;
}

// One stream may be far behind another.
absl::Status StreamStalls::Collect(Upto upto) {
  for (auto wait = waits_.begin(); wait != waits_.end();) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::optional<double> seconds,
                             timing_->SecondsBetween(*wait->begin, *wait->end));
    if (!seconds.has_value()) {
      if (upto == Upto::kFirstUnknown) break;
      ++wait;
      continue;
    }
    seconds_ += *seconds;
    wait = waits_.erase(wait);
  }
  return absl::OkStatus();
}

}  // namespace offload::zero3

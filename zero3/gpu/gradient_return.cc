#include "zero3/gpu/gradient_return.h"

#include <utility>

#include "base/status_macros.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

absl::StatusOr<std::unique_ptr<GradientReturn>> GradientReturn::Make(
    accelerator::Accelerator* accelerator, const Options& options, Deliver deliver) {
  auto made =
      std::unique_ptr<GradientReturn>(new GradientReturn(accelerator, options, std::move(deliver)));
  OFFLOAD_ASSIGN_OR_RETURN(made->copies_, accelerator->StreamCreate());
  return made;
}

GradientReturn::~GradientReturn() {
  const std::lock_guard lock(mutex_);
  if (CloseBucket().ok() && !closed_.empty())
    accelerator_->EventSynchronize(*closed_.back().copied).IgnoreError();
  DropAll();
  if (copies_ != accelerator::Stream{}) accelerator_->StreamDestroy(copies_).IgnoreError();
}

absl::Status GradientReturn::Add(Gradient gradient, accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) {
    gradient.drop();
    return failed_;
  }
  return Keep(Copy(std::move(gradient), stream));
}

absl::Status GradientReturn::Copy(Gradient gradient, accelerator::Stream stream) {
  // In the bucket first, so that it is dropped in any case.
  open_.size_bytes += DeviceBytes(gradient.size_bytes);
  held_bytes_ += DeviceBytes(gradient.size_bytes);
  open_.gradients.push_back(std::move(gradient));
  const Gradient& added = open_.gradients.back();
  OFFLOAD_ASSIGN_OR_RETURN(const RecordedEvent written, events_.Record(stream));
  OFFLOAD_RETURN_IF_ERROR(accelerator_->StreamWaitEvent(copies_, *written));
  OFFLOAD_RETURN_IF_ERROR(
      accelerator_->MemcpyToHost(added.host, added.device, added.size_bytes, copies_));
  bytes_to_host_ += added.size_bytes;
  if (open_.size_bytes >= options_.bucket_bytes) OFFLOAD_RETURN_IF_ERROR(CloseBucket());
  OFFLOAD_RETURN_IF_ERROR(DeliverArrived());
  while (held_bytes_ > options_.held_bytes_max) OFFLOAD_RETURN_IF_ERROR(WaitForOldest());
  return absl::OkStatus();
}

absl::Status GradientReturn::CloseBucket() {
  if (open_.gradients.empty()) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(open_.copied, events_.Record(copies_));
  closed_.push_back(std::exchange(open_, {}));
  return absl::OkStatus();
}

absl::Status GradientReturn::DeliverArrived() {
  while (!closed_.empty()) {
    OFFLOAD_ASSIGN_OR_RETURN(const bool has_arrived,
                             accelerator_->EventQuery(*closed_.front().copied));
    if (!has_arrived) break;
    DeliverOldest();
  }
  return absl::OkStatus();
}

absl::Status GradientReturn::WaitForOldest() {
  if (closed_.empty()) OFFLOAD_RETURN_IF_ERROR(CloseBucket());
  if (closed_.empty()) return absl::OkStatus();
  OFFLOAD_RETURN_IF_ERROR(accelerator_->EventSynchronize(*closed_.front().copied));
  DeliverOldest();
  return absl::OkStatus();
}

void GradientReturn::DeliverOldest() {
  const Bucket bucket = std::move(closed_.front());
  closed_.pop_front();
  held_bytes_ -= bucket.size_bytes;
  for (const Gradient& gradient : bucket.gradients) {
    deliver_(gradient.tensor);
    gradient.drop();
  }
}

absl::Status GradientReturn::WaitForCopies(accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  const absl::StatusOr<RecordedEvent> copied = events_.Record(copies_);
  if (!copied.ok()) return Keep(copied.status());
  return Keep(stalls_.Wait(stream, **copied));
}

absl::Status GradientReturn::Poll() {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  return Keep(DeliverArrived());
}

absl::Status GradientReturn::Flush() {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  while (held_bytes_ > 0) OFFLOAD_RETURN_IF_ERROR(Keep(WaitForOldest()));
  return absl::OkStatus();
}

absl::Status GradientReturn::FlushOldest() {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  return Keep(WaitForOldest());
}

GradientReturn::Counters GradientReturn::counters() const {
  const std::lock_guard lock(mutex_);
  return {.bytes_to_host = bytes_to_host_, .stall_seconds = stalls_.Seconds()};
}

absl::Status GradientReturn::Keep(absl::Status status) {
  if (failed_.ok() && !status.ok()) {
    failed_ = status;
    DropAll();
  }
  return status;
}

void GradientReturn::DropAll() {
  closed_.push_back(std::exchange(open_, {}));
  for (const Bucket& bucket : closed_) {
    for (const Gradient& gradient : bucket.gradients) gradient.drop();
  }
  closed_.clear();
  held_bytes_ = 0;
}

}  // namespace offload::zero3

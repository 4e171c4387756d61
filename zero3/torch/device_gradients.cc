#include "zero3/torch/device_gradients.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

absl::StatusOr<std::unique_ptr<DeviceGradients>> DeviceGradients::Make(
    accelerator::Accelerator* accelerator, uint64_t bytes_max, size_t tensor_count,
    uint64_t bucket_bytes_max, std::vector<bool> stays) {
  std::unique_ptr<DeviceGradients> made(
      new DeviceGradients(accelerator, bytes_max, tensor_count, std::move(stays)));
  OFFLOAD_ASSIGN_OR_RETURN(made->fetches_, accelerator->StreamCreate());
  OFFLOAD_ASSIGN_OR_RETURN(
      made->return_,
      GradientReturn::Make(
          accelerator,
          {.bucket_bytes = std::min(bucket_bytes_max, bytes_max / 2), .held_bytes_max = bytes_max},
          [gradients = made.get()](uint32_t tensor) { gradients->Arrived(tensor); }));
  return made;
}

// A device that has failed executes nothing any more.
DeviceGradients::~DeviceGradients() {
  return_.reset();
  const std::lock_guard lock(mutex_);
  for (Bytes& bytes : gradients_) {
    WaitForFetch(bytes).IgnoreError();
    bytes = {};
  }
  if (fetches_ != accelerator::Stream{}) accelerator_->StreamDestroy(fetches_).IgnoreError();
}

uint64_t DeviceGradients::SizeOf(const Bytes& bytes) {
  return DeviceBytes(bytes.tensor.numel() * bytes.tensor.element_size());
}

absl::StatusOr<at::Tensor> DeviceGradients::Use(uint32_t tensor, bool writes,
                                                accelerator::Stream stream) {
  bool is_on_its_way = false;
  at::Tensor found;
  {
    const std::lock_guard lock(mutex_);
    Bytes& bytes = gradients_[tensor];
    found = bytes.tensor;
    if (found.defined() && !std::exchange(bytes.is_used, true)) {
      resting_.remove(tensor);
      resting_bytes_ -= SizeOf(bytes);
    }
    bytes.is_ahead = false;
    OFFLOAD_RETURN_IF_ERROR(OrderBehindFetch(bytes, stream));
    is_on_its_way = bytes.on_their_way > 0;
  }
  if (writes && is_on_its_way) OFFLOAD_RETURN_IF_ERROR(return_->WaitForCopies(stream));
  return found;
}

absl::Status DeviceGradients::Give(uint32_t tensor, at::Tensor bytes) {
  const auto is_on_its_way = [&] {
    const std::lock_guard lock(mutex_);
    return gradients_[tensor].on_their_way > 0;
  };
  if (is_on_its_way()) OFFLOAD_RETURN_IF_ERROR(return_->Flush());
  const std::lock_guard lock(mutex_);
  Bytes& gradient = gradients_[tensor];
  if (gradient.tensor.defined() && !gradient.is_used) {
    resting_.remove(tensor);
    resting_bytes_ -= SizeOf(gradient);
  }
  OFFLOAD_RETURN_IF_ERROR(LetGo(gradient));
  gradient.tensor = std::move(bytes);
  gradient.is_used = true;
  return absl::OkStatus();
}

// ---- From the host -----------------------------------------------------------------------------

absl::Status DeviceGradients::Fetch(uint32_t tensor, at::Tensor bytes, const std::byte* host,
                                    accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  Bytes& gradient = gradients_[tensor];
  OFFLOAD_CHECK(!gradient.tensor.defined()) << tensor;
  gradient.tensor = std::move(bytes);
  gradient.is_used = true;
  ++counters_.fetched;
  OFFLOAD_RETURN_IF_ERROR(StartFetch(gradient, host, stream));
  return OrderBehindFetch(gradient, stream);
}

absl::StatusOr<bool> DeviceGradients::FetchAhead(uint32_t tensor, uint64_t size_bytes,
                                                 absl::FunctionRef<at::Tensor()> allocate,
                                                 const std::byte* host,
                                                 accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  Bytes& gradient = gradients_[tensor];
  if (gradient.tensor.defined()) {
    gradient.is_ahead = gradient.is_ahead || !gradient.is_used;
    return true;
  }
  size_bytes = DeviceBytes(size_bytes);
  OFFLOAD_RETURN_IF_ERROR(MakeRoom(size_bytes, /*for_use=*/false));
  if (resting_bytes_ + size_bytes > bytes_max_) return false;
  gradient.tensor = allocate();
  gradient.is_ahead = true;
  ++counters_.fetched_ahead;
  resting_.push_back(tensor);
  resting_bytes_ += size_bytes;
  resting_bytes_max_ = std::max(resting_bytes_max_, resting_bytes_);
  OFFLOAD_RETURN_IF_ERROR(StartFetch(gradient, host, stream));
  return true;
}

// Behind what `stream` was given so far, to which the memory may have belonged.
absl::Status DeviceGradients::StartFetch(Bytes& bytes, const std::byte* host,
                                         accelerator::Stream stream) {
  const uint64_t size_bytes =
      static_cast<uint64_t>(bytes.tensor.numel()) * bytes.tensor.element_size();
  counters_.fetched_bytes += size_bytes;
  OFFLOAD_ASSIGN_OR_RETURN(const RecordedEvent allocated, events_.Record(stream));
  OFFLOAD_RETURN_IF_ERROR(accelerator_->StreamWaitEvent(fetches_, *allocated));
  OFFLOAD_RETURN_IF_ERROR(accelerator_->MemcpyToDevice(
      static_cast<std::byte*>(bytes.tensor.mutable_data_ptr()), host, size_bytes, fetches_));
  OFFLOAD_ASSIGN_OR_RETURN(bytes.fetched, events_.Record(fetches_));
  bytes.ordered.reset();
  return absl::OkStatus();
}

absl::Status DeviceGradients::OrderBehindFetch(Bytes& bytes, accelerator::Stream stream) {
  if (bytes.fetched == nullptr || bytes.ordered == stream) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const bool is_there, accelerator_->EventQuery(*bytes.fetched));
  if (is_there) {
    bytes.fetched = nullptr;
    return absl::OkStatus();
  }
  bytes.ordered = stream;
  return stalls_.Wait(stream, *bytes.fetched);
}

// Whose memory nobody has waited for yet, a copy may still write. What is fetched no more still
// reads the host's memory: what is copied there next comes behind it (Return).
absl::Status DeviceGradients::LetGo(Bytes& bytes) {
  if (std::exchange(bytes.is_ahead, false)) OFFLOAD_RETURN_IF_ERROR(WaitForFetch(bytes));
  bytes.tensor.reset();
  bytes.is_used = false;
  return absl::OkStatus();
}

// On the host.
absl::Status DeviceGradients::WaitForFetch(Bytes& bytes) {
  const RecordedEvent fetched = std::exchange(bytes.fetched, nullptr);
  if (fetched == nullptr) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const bool is_there, accelerator_->EventQuery(*fetched));
  return is_there ? absl::OkStatus() : accelerator_->EventSynchronize(*fetched);
}

// ---- To the host -------------------------------------------------------------------------------

absl::Status DeviceGradients::Return(uint32_t tensor, std::byte* host, accelerator::Stream stream) {
  at::Tensor bytes;
  {
    const std::lock_guard lock(mutex_);
    OFFLOAD_RETURN_IF_ERROR(OrderBehindFetch(gradients_[tensor], stream));
    bytes = gradients_[tensor].tensor;
    ++gradients_[tensor].on_their_way;
  }
  return return_->Add({.tensor = tensor,
                       .device = static_cast<const std::byte*>(bytes.const_data_ptr()),
                       .host = host,
                       .size_bytes = static_cast<uint64_t>(bytes.numel()) * bytes.element_size(),
                       .drop = [bytes]() mutable { bytes.reset(); }},
                      stream);
}

void DeviceGradients::Arrived(uint32_t tensor) {
  const std::lock_guard lock(mutex_);
  --gradients_[tensor].on_their_way;
}

void DeviceGradients::Rest(uint32_t tensor) {
  const std::lock_guard lock(mutex_);
  Bytes& bytes = gradients_[tensor];
  if (!bytes.tensor.defined() || !std::exchange(bytes.is_used, false)) return;
  resting_.push_back(tensor);
  resting_bytes_ += SizeOf(bytes);
  MakeRoom(0, /*for_use=*/true)
      .IgnoreError();  // of a device that has failed, whose every call says so
  resting_bytes_max_ = std::max(resting_bytes_max_, resting_bytes_);
}

void DeviceGradients::Drop(uint32_t tensor) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_CHECK(gradients_[tensor].is_used && gradients_[tensor].on_their_way == 0) << tensor;
  LetGo(gradients_[tensor]).IgnoreError();
}

// What has come back ahead of its use makes room only for what was used, and last.
absl::Status DeviceGradients::MakeRoom(uint64_t more_bytes, bool for_use) {
  for (const bool takes_ahead : {false, true}) {
    if (takes_ahead && !for_use) break;
    for (auto next = resting_.begin();
         next != resting_.end() && resting_bytes_ + more_bytes > bytes_max_;) {
      Bytes& bytes = gradients_[*next];
      const bool stays = *next < stays_.size() && stays_[*next];
      if (stays || bytes.on_their_way > 0 || bytes.is_ahead != takes_ahead) {
        ++next;
        continue;
      }
      resting_bytes_ -= SizeOf(bytes);
      next = resting_.erase(next);
      OFFLOAD_RETURN_IF_ERROR(LetGo(bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceGradients::Flush() { return return_->Flush(); }

// Of a device that has failed nothing arrives any more, and the wait says so.
absl::Status DeviceGradients::WaitFor(uint32_t tensor) {
  while (!HasArrived(tensor)) OFFLOAD_RETURN_IF_ERROR(return_->FlushOldest());
  const std::lock_guard lock(mutex_);
  return WaitForFetch(gradients_[tensor]);
}

bool DeviceGradients::HasArrived(uint32_t tensor) const {
  const std::lock_guard lock(mutex_);
  return gradients_[tensor].on_their_way == 0;
}

bool DeviceGradients::IsStill(uint32_t tensor) const {
  const std::lock_guard lock(mutex_);
  const Bytes& bytes = gradients_[tensor];
  if (bytes.on_their_way > 0) return false;
  return bytes.fetched == nullptr || accelerator_->EventQuery(*bytes.fetched).value_or(false);
}

bool DeviceGradients::Has(uint32_t tensor) const {
  const std::lock_guard lock(mutex_);
  return gradients_[tensor].tensor.defined();
}

void DeviceGradients::CountRead(bool ahead) {
  const std::lock_guard lock(mutex_);
  ++(ahead ? counters_.read_ahead : counters_.read);
}

uint64_t DeviceGradients::bytes() const {
  const std::lock_guard lock(mutex_);
  return resting_bytes_;
}

uint64_t DeviceGradients::bytes_max_ever() const {
  const std::lock_guard lock(mutex_);
  return resting_bytes_max_;
}

DeviceGradients::Counters DeviceGradients::counters() const {
  const double return_seconds = return_->counters().stall_seconds;  // it calls Arrived()
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.stall_seconds = stalls_.Seconds() + return_seconds;
  return counters;
}

}  // namespace offload::zero3

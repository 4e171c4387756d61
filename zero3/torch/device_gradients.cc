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
      new DeviceGradients(bytes_max, tensor_count, std::move(stays)));
  OFFLOAD_ASSIGN_OR_RETURN(
      made->return_,
      GradientReturn::Make(
          accelerator,
          {.bucket_bytes = std::min(bucket_bytes_max, bytes_max / 2), .held_bytes_max = bytes_max},
          [gradients = made.get()](uint32_t tensor) { gradients->Arrived(tensor); }));
  return made;
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
  gradient = {.tensor = std::move(bytes), .is_used = true};
  return absl::OkStatus();
}

absl::Status DeviceGradients::Return(uint32_t tensor, std::byte* host, accelerator::Stream stream) {
  at::Tensor bytes;
  {
    const std::lock_guard lock(mutex_);
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
  MakeRoom();
  resting_bytes_max_ = std::max(resting_bytes_max_, resting_bytes_);
}

void DeviceGradients::Drop(uint32_t tensor) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_CHECK(gradients_[tensor].is_used && gradients_[tensor].on_their_way == 0) << tensor;
  gradients_[tensor] = {};
}

void DeviceGradients::MakeRoom() {
  for (auto next = resting_.begin(); next != resting_.end() && resting_bytes_ > bytes_max_;) {
    Bytes& bytes = gradients_[*next];
    const bool stays = *next < stays_.size() && stays_[*next];
    if (stays || bytes.on_their_way > 0) {
      ++next;
      continue;
    }
    resting_bytes_ -= SizeOf(bytes);
    bytes.tensor.reset();
    next = resting_.erase(next);
  }
}

absl::Status DeviceGradients::Flush() { return return_->Flush(); }

// Of a device that has failed nothing arrives any more, and the wait says so.
absl::Status DeviceGradients::WaitFor(uint32_t tensor) {
  while (!HasArrived(tensor)) OFFLOAD_RETURN_IF_ERROR(return_->FlushOldest());
  return absl::OkStatus();
}

bool DeviceGradients::HasArrived(uint32_t tensor) const {
  const std::lock_guard lock(mutex_);
  return gradients_[tensor].on_their_way == 0;
}

uint64_t DeviceGradients::bytes() const {
  const std::lock_guard lock(mutex_);
  return resting_bytes_;
}

uint64_t DeviceGradients::bytes_max_ever() const {
  const std::lock_guard lock(mutex_);
  return resting_bytes_max_;
}

}  // namespace offload::zero3

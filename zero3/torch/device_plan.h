// zero3/torch/device_plan.h
//
// What a job needs of the device that its parameters are on, decided when they are attached.
//
// Thread safety: none; one owner.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "accelerator/accelerator.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

class DevicePlan {
 public:
  // `gpu_ram`: "auto" or a size. Throws OFD-1002.
  explicit DevicePlan(const std::string& gpu_ram);

  // Plans for `tensors`, all of the job so far, which are on `device`; nothing for the host. Throws
  // OFD-2001, 2002 when the device cannot be opened, 2003 when gpu_ram is too small, 1601 for a
  // second device.
  void Make(c10::Device device, std::span<const proto::Tensor> tensors);

  bool is_made() const { return accelerator_ != nullptr; }
  c10::Device device() const { return *device_; }
  const std::shared_ptr<accelerator::Accelerator>& accelerator() const { return accelerator_; }
  const GpuPlan& plan() const { return plan_; }
  uint64_t gpu_ram_bytes() const { return gpu_ram_bytes_; }

 private:
  const std::optional<uint64_t> given_bytes_;
  std::optional<c10::Device> device_;
  std::shared_ptr<accelerator::Accelerator> accelerator_;
  uint64_t gpu_ram_bytes_ = 0;
  GpuPlan plan_;
};

}  // namespace offload::zero3

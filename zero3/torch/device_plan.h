// zero3/torch/device_plan.h
//
// Which device a job's parameters are on or go to, and what it needs there, decided when they are
// attached.
//
// Thread safety: none; one owner.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "accelerator/accelerator.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_tensors.h"

namespace offload::zero3 {

class DevicePlan {
 public:
  // `gpu_ram`: "auto" or a size; `device`: Options::device. Throws OFD-1002, and OFD-1601, 2001 for
  // a device that nothing in this program drives.
  DevicePlan(const std::string& gpu_ram, const std::string& device);

  // Where tensors of the host go; nothing when they stay.
  std::optional<c10::Device> destination() const { return destination_; }
  // Where a parameter is trained that is on `device` now.
  c10::Device TrainedOn(c10::Device device) const {
    return device.is_cpu() ? destination_.value_or(device) : device;
  }

  // Plans for the tensors of `catalogue`, all of the job so far, which are on `device`; nothing for
  // the host. Throws OFD-2001, 2002 when the device cannot be opened, 2003 when gpu_ram is too
  // small, 1601 for a second device.
  void Make(c10::Device device, const proto::Catalogue& catalogue,
            const TierConditions& conditions);

  bool is_made() const { return accelerator_ != nullptr; }
  c10::Device device() const { return *device_; }
  const std::shared_ptr<accelerator::Accelerator>& accelerator() const { return accelerator_; }
  const GpuPlan& plan() const { return plan_; }
  uint64_t gpu_ram_bytes() const { return gpu_ram_bytes_; }
  // What stands against tensors that are updated there; empty: nothing.
  const std::string& why_no_tier() const { return why_no_tier_; }

 private:
  const std::optional<uint64_t> given_bytes_;
  const std::optional<c10::Device> destination_;
  std::optional<c10::Device> device_;
  std::shared_ptr<accelerator::Accelerator> accelerator_;
  uint64_t gpu_ram_bytes_ = 0;
  std::string why_no_tier_;
  GpuPlan plan_;
};

}  // namespace offload::zero3

// zero3/torch/summed_device_gradient.h
//
// The gradient of a parameter on a device when several ranks train: `.grad` is a tensor there with
// the value of the daemon's sum, copied when an operator looks at it and dropped when the operator
// was launched; a sum that the plan spills passes through the window of such gradients on its way.
// What torch accumulates goes from the device into the ring of the rank's region
// (exchanged_parts.h). Norms are those of the device's kernels.
//
// What the trainer writes is in memory of the device while operators use it, and in a piece of the
// ring (own_) when they have let go, where daemon and checksum find it.
//
// Thread safety: as Gradient.
#pragma once

#include <c10/core/Stream.h>

#include <exception>
#include <optional>
#include <vector>

#include "zero3/torch/device_memory.h"
#include "zero3/torch/summed_gradient.h"

namespace offload::zero3 {

class SummedDeviceGradient final : public SummedGradient {
 public:
  // As SummedGradient; the attachment has a device.
  SummedDeviceGradient(std::shared_ptr<Attachment> attachment,
                       std::shared_ptr<GradientWindow> window, std::shared_ptr<GradientSums> sums,
                       uint32_t tensor, const at::Tensor& parameter);

  void Pin(Access access) override;
  bool Serve(Special special, torch::jit::Stack* stack) override;
  bool PrepareStep() override;
  // Waits until the daemon knows of all parts.
  void FinishWriting() override;

 private:
  ~SummedDeviceGradient() override = default;
  at::Tensor Plain() const override { return on_device_; }
  void ShowBytes() override;
  c10::DataPtr CopyBytes() override;
  void Bring(Access access, Lock& lock) override;
  void DropOverwritten() override;
  void Rest() override;
  bool IsFinite() override;
  void Deliver(const at::Tensor& grad) override;

  // Of the value in memory of the host: a piece of the ring, or the sum.
  const std::byte* HostBytes() const;
  at::Tensor Fetch(bool with_value) const;
  void ThrowIfLost();

  const c10::Device device_;
  at::Tensor on_device_;              // the value, while operators use it
  std::vector<at::Tensor> replaced_;  // by what their own operation has written
  std::optional<c10::Stream> made_on_;
  bool is_newer_ = false;    // than own_
  std::exception_ptr lost_;  // why own_ is not what was written
};

}  // namespace offload::zero3

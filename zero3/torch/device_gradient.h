// zero3/torch/device_gradient.h
//
// The gradient of a parameter on a device: `.grad` is a tensor there. The accumulator in the rank's
// region gets its bytes by copies that the device makes (device_gradients.h); while operators use
// the gradient its bytes are on the device, left there by the last one or fetched. Norms are those
// of the device's kernels.
//
// Of one that the plan spills the accumulator is a slot of the window of such gradients: the device
// copies into it, and it is written to the scratch file when the copy has arrived. What the device
// has no longer is read into a slot and fetched from there.
//
// Bytes that a further pass is added to come back ahead of it, from the drive, too
// (gradients_ahead.h). 2-norms that a program asks for are taken from then on where a pass leaves
// the bytes, so that clipping brings none of them back.
//
// Of a parameter that is updated on the device (device_tier.h) the bytes stay there, and the
// accumulator has nothing.
//
// What is remembered (zero, scale) and guarded (the update of the last step) is as in Gradient.
//
// Thread safety: as Gradient.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "absl/functional/function_ref.h"
#include "zero3/gpu/gradients_ahead.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/gradient.h"

namespace offload::zero3 {

class DeviceGradient final : public Gradient, public GradientsAhead::Awaited {
 public:
  // The attachment has a device. `window` is null for gradients that stay in the region.
  DeviceGradient(std::shared_ptr<Attachment> attachment, std::shared_ptr<GradientWindow> window,
                 uint32_t tensor, const at::Tensor& parameter);

  void AfterAccumulation(const at::Tensor& added) override;
  void BeginUpdate() override;
  bool ComeAhead() override;
  bool ReadAhead() override;

  void Pin(Access access) override;
  bool Serve(Special special, torch::jit::Stack* stack) override;
  // Waits until the accumulator has the value.
  void FinishWriting() override;
  // Of one that stays and has a value: its bytes, and what they are to be multiplied with.
  void GiveToUpdate(absl::FunctionRef<void(const at::Tensor& bytes, double scale)> update);

 private:
  ~DeviceGradient() override;
  bool raw_writable() const override { return false; }
  at::Tensor Plain() const override { return on_device_; }
  void ShowBytes() override;
  void AdoptStolen(const at::Tensor& stolen) override;
  c10::DataPtr CopyBytes() override;
  void Bring(Access access, Lock& lock) override;
  void DropOverwritten() override;
  void Rest() override;
  void AfterPass() override;
  at::Tensor Norm(double p, NormKernel kernel) override;
  void TakeIfAsked(NormKernel kernel);
  void Arrive(Lock& lock) override;
  bool IsDue() const override;
  bool IsStill() const override;
  bool IsFinite() override;

  DeviceGradients& bytes_on_device() const { return attachment_->device()->gradients(); }
  bool MayTake(const at::Tensor& stolen) const;
  void UseThere(Access access);
  void MakeThere(Access access);
  void BringSpilled(Access access, bool changes, Lock& lock);
  bool WaitsOnDrive() const;
  void TakeSlot(Access access, Lock& lock);
  void Fetch(Access access);
  at::Tensor Allocate() const;
  bool IsFiniteThere();

  const c10::Device device_;
  const bool stays_;
  at::Tensor on_device_;  // while operators use it
  std::optional<c10::Stream> made_on_;
  bool was_there_ = false;     // before the operators that use it now
  bool is_newer_ = false;      // than what is on its way to the accumulator
  bool is_due_ = false;        // spilled: to be written as soon as its copy has arrived
  bool was_added_to_ = false;  // since the step
};

}  // namespace offload::zero3

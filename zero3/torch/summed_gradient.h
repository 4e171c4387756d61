// zero3/torch/summed_gradient.h
//
// The gradient of one parameter when several ranks train: `.grad` is a tensor over the sum that the
// daemon makes of all ranks' parts, which this rank can only read. What torch accumulates never
// meets it: before, `.grad` is taken away, so that torch keeps its own buffer, and afterwards the
// buffer goes to the daemon (GradientStream).
//
// What it adds to Gradient:
//   * A read waits until the sum is final (a look). Sums that the plan spills are read through the
//   window.
//   * What the trainer writes, other than mul_ by a number and zero_, goes into a piece of the
//   rank's own (own_), which stands for the sum from then on; all ranks have to write the same, and
//   the step compares. Nothing can be accumulated onto it.
//   * A read while a factor or zeros are remembered sees a copy that goes with the read.
//
// Thread safety: as Gradient.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "zero3/torch/gradient.h"
#include "zero3/torch/gradient_sums.h"

namespace offload::zero3 {

class SummedGradient : public Gradient {
 public:
  SummedGradient(std::shared_ptr<Attachment> attachment, std::shared_ptr<GradientWindow> window,
                 std::shared_ptr<GradientSums> sums, uint32_t tensor, const at::Tensor& parameter);

  void Watch() override;
  void BeforeAccumulation();
  void AfterAccumulation(const at::Tensor& added) override;
  bool PrepareStep() override;
  void FinishWriting() override {}
  void Describe(client::TensorUpdate& update) const override;
  void BeginUpdate() override;

  // ---- For GradientSums ----
  // Zeroed since this generation gave it something.
  bool IsZeroed();
  // The sum changes from now on.
  void LetGoOfSum();
  // Another rank's part is in the sum, and `.grad` is defined, though this rank's pass gave none.
  void NoteExisting();
  // torch's 2-norm of the sum itself; nothing when it is not `.grad`.
  std::optional<float> NormOfSum();

 protected:
  ~SummedGradient() override = default;
  bool raw_writable() const override { return own_.has_value(); }
  void ShowBytes() override;
  at::Tensor Norm(double p, NormKernel kernel) override;
  void BeforePin() override;
  void Bring(Access access, Lock& lock) override;
  void DropOverwritten() override;
  void Rest() override;
  // Sends what torch has left in `.grad` to the daemon.
  virtual void Deliver(const at::Tensor& grad);

  // mutex() held.
  const std::byte* SumBytes() const;  // in memory
  void LoadSum(Lock& lock);           // a spilled one, into the window
  void WaitForOtherUses(Lock& lock);

  const std::shared_ptr<GradientSums> sums_;
  std::optional<uint64_t> own_;  // region offset
  bool took_piece_ = false;      // who writes, for own_
  proto::GradientStart start_ = proto::GradientStart::kNothing;

 private:
  std::byte* bytes() const override;
  void BringForReading(Lock& lock);
  void BringForWriting(Access access, Lock& lock);
  void DropOwn(Lock& lock);
  void DropCopies();
  void CheckAccumulates() const;
  bool HasSharedNorm() const;
  // Without the lock: the value.
  void CopyTo(std::byte* target) const;

  c10::DataPtr settled_;     // the value, while reads use it and the bytes are not the value
  c10::DataPtr replaced_;    // what was settled_ before the reading operation wrote
  bool given_ = false;       // a part of some rank is in the sum of this generation
  bool taken_away_ = false;  // `.grad` was the tensor when accumulation began
};

}  // namespace offload::zero3

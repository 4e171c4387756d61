// zero3/torch/gradient.h
//
// The gradient of one parameter: `.grad` is a tensor over an accumulator in the rank's region, into
// which torch adds micro-batches with its own operators and which the daemon reads at the update.
// Gradients that the plan spills have their place in the scratch file and pass through a window of
// the region.
//
// What it adds to plain torch, without changing a bit:
//   * Guard: from step() until the daemon has updated the tensor, the accumulator keeps what the
//   update needs. Reads see the value;
//     zero_() is remembered; whatever else writes waits.
//   * Clipping: mul_ by a number on the whole gradient is remembered and handed to the daemon with
//   the step (it rounds as torch's
//     kernel does); everything else that looks at the gradient multiplies first. Norms are torch's
//     own, kept until the next write.
//
// States of the value: bytes in memory (region, or a slot of the window) or in the scratch file,
// times scale_; or zero_, which needs no bytes.
//
// Thread safety: as Record.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "zero3/torch/attachment.h"
#include "zero3/torch/record.h"

namespace offload::zero3 {

class Gradient;

// Slots of the region for spilled gradients. One lock for all of them, since making room for one
// writes another.
class GradientWindow {
 public:
  GradientWindow(uint64_t offset, uint64_t size_bytes) { free_[offset] = size_bytes; }

  std::mutex& mutex() { return mutex_; }
  // mutex() held by `lock`. Returns the region offset of a slot; writes idle ones out until there
  // is room. Throws OFD-1303 when everything is pinned by the calling thread.
  uint64_t Take(Gradient* gradient, uint64_t size_bytes, std::unique_lock<std::mutex>& lock);
  void Leave(Gradient* gradient, uint64_t offset, uint64_t size_bytes);
  void NotifyUnpinned() { unpinned_.notify_all(); }

 private:
  std::mutex mutex_;
  std::condition_variable unpinned_;
  std::map<uint64_t, uint64_t> free_;
  std::vector<Gradient*> users_;  // with a slot, least recently taken first
};

class Gradient : public Record {
 public:
  // `window` is null for gradients that stay in the region.
  Gradient(std::shared_ptr<Attachment> attachment, std::shared_ptr<GradientWindow> window,
           uint32_t tensor, const at::Tensor& parameter);

  // `.grad` of the parameter when it has one: over the accumulator.
  const at::Tensor& tensor() const { return tensor_; }
  // The parameter's AccumulateGrad has run: what it left in `.grad` becomes the accumulator's (its
  // own buffer is dropped), and a spilled gradient starts its way to the drive.
  virtual void AfterAccumulation();
  // Watches the parameter's accumulation from now on.
  virtual void Watch();

  // ---- The step; on one thread ----
  // Makes the accumulator hold `.grad`, false when there is none. Starts writing a spilled one.
  // Throws OFD-1701 when it is not finite.
  virtual bool PrepareStep();
  // Waits until a spilled gradient is written.
  virtual void FinishWriting();
  // What the step says of it.
  virtual void Describe(client::TensorUpdate& update) const { update.gradient_scale = scale_; }
  // The daemon has taken the step: the accumulator belongs to the update until it is done.
  virtual void BeginUpdate();

  void Pin(Access access) override;
  void Unpin() override;
  bool Serve(Special special, torch::jit::Stack* stack) override;
  // From now on Pin() throws OFD-1802, and the parameter has no gradient.
  void Close();

  const at::Tensor& parameter() const { return parameter_; }

 protected:
  using Lock = std::unique_lock<std::mutex>;

  ~Gradient() override = default;
  std::mutex& mutex() { return window_ != nullptr ? window_->mutex() : mutex_; }
  bool spilled() const { return window_ != nullptr; }
  bool busy() const { return updating_ || zero_ || scale_ != 1.0f; }
  virtual std::byte* bytes() const { return attachment_->region() + *place_; }
  // A plain tensor over the bytes in memory.
  at::Tensor Plain() const;
  void CheckOpen() const;
  void WaitForUpdate();
  void Load(Access access, Lock& lock);  // place_ is set after it
  virtual void ShowBytes();              // the storage's pointer and whether it throws
  void CheckFits(const at::Tensor& value) const;
  void AdoptStolen(const at::Tensor& stolen);
  void LeaveTensorToOthers();
  virtual at::Tensor Norm(double p);
  bool IsFinite();

  const std::shared_ptr<Attachment> attachment_;
  const std::shared_ptr<GradientWindow> window_;
  const uint32_t tensor_id_;
  at::Tensor parameter_, tensor_;
  std::shared_ptr<torch::autograd::Node> accumulation_;  // torch has a weak reference only
  std::optional<uint64_t> place_;                        // region offset of the bytes in memory
  int pins_ = 0;
  bool closed_ = false;
  bool updating_ = false;
  bool zero_ = true;
  float scale_ = 1.0f;
  bool on_drive_ = false;  // spilled: the scratch file has the bytes
  bool dirty_ = false;     // spilled: the slot is newer than the scratch file
  std::vector<client::Ticket> writes_;
  std::vector<std::pair<double, at::Tensor>> norms_;  // of the value
  std::optional<bool> finite_;

 private:
  friend class GradientWindow;

  void Settle(Access access);  // the bytes are the value after it
  void Changed();              // the bytes are
  void NoteFinite();
  void StartWriting();
  void FinishWritingLocked();
  void MoveScratch(bool write);
  void Evict();
};

}  // namespace offload::zero3

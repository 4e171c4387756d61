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
//   * Pointers to the bytes are served as those of weights (raw_access.h): the bytes themselves
//   move and are read by the daemon.
//   * Clipping: mul_ by a number on the whole gradient is remembered and handed to the daemon with
//   the step (it rounds as torch's
//     kernel does); everything else that looks at the gradient multiplies first. Norms are torch's
//     own; of a spilled gradient they are kept until the next write.
//
// States of the value: bytes in memory (region, or a slot of the window) or in the scratch file,
// times scale_; or zero_, which needs no bytes.
//
// Several graphs may run backward at once, as in torch: what the hook of a parameter does, it does
// under the lock under which torch adds to the parameter's `.grad`.
//
// Thread safety: as Residency. No lock is held while the daemon is waited for or bytes are worked
// on: a gradient that one thread moves is marked, and others wait for the end of that.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/range_allocator.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/step_announcement.h"
#include "zero3/torch/wait_graph.h"

namespace offload::zero3 {

class Gradient;

// Slots of the region for spilled gradients. One lock for what all of them know about themselves,
// since making room for one writes another out.
class GradientWindow {
 public:
  GradientWindow(uint64_t offset, uint64_t size_bytes);

  std::mutex& mutex() { return mutex_; }
  // A slot, a pin or a mark has changed.
  WaitQueue& changed() { return changed_; }
  // mutex() held by `lock`, which is let go meanwhile; `gradient` is marked. Returns the region
  // offset of a slot; writes idle ones out until there is room. Throws OFD-1303 when all others are
  // pinned by the calling thread, or by threads that wait for it.
  uint64_t Take(Gradient* gradient, uint64_t size_bytes, std::unique_lock<std::mutex>& lock);
  // The same without a wait for anybody, for one that is read ahead of its use: nothing when there
  // is no room beside what others need, or await. Throws what a write has met.
  std::optional<uint64_t> TryTake(Gradient* gradient, uint64_t size_bytes,
                                  std::unique_lock<std::mutex>& lock);
  // Whether as much more may be kept for those that are to be used next.
  bool MayAwait(uint64_t size_bytes) const;
  void Leave(Gradient* gradient, uint64_t offset, uint64_t size_bytes);
  // mutex() held by `lock`, which is let go meanwhile: starts the writes of those that are due and
  // whose bytes have come meanwhile (Gradient::IsDue).
  void WriteDue(std::unique_lock<std::mutex>& lock);

 private:
  const uint64_t size_bytes_;
  std::mutex mutex_;
  WaitQueue changed_;
  RangeAllocator free_;
  std::vector<Gradient*> users_;  // with a slot, least recently taken first
};

// When the write of a spilled gradient begins: after each pass of a step, so that another can have
// its room at once; but after the last one only, where the passes of the step before all found it
// still in the window, as those of blocks in vertical order do (offload/vertical.h).
class WriteTiming {
 public:
  // A pass was added; whether to write now. Who does not is written when it is evicted, or by the
  // step.
  bool AddPass() {
    came_back_ |= was_evicted_;
    return ++passes_ >= passes_before_ || !stayed_before_;
  }
  void Evicted() { was_evicted_ = true; }
  void Stepped() {
    stayed_before_ = !came_back_;
    passes_before_ = std::exchange(passes_, 0);
    was_evicted_ = came_back_ = false;
  }

 private:
  int passes_ = 0, passes_before_ = 0;
  bool stayed_before_ = false;
  bool was_evicted_ = false, came_back_ = false;  // since the step
};

// Which of a device's kernels takes a norm: they add in different orders.
enum class NormKernel : uint8_t { kOfOne, kOfLists };

class Gradient : public Residency, public RawOwner, public RawUser {
 public:
  // `window` is null for gradients that stay in the region.
  Gradient(std::shared_ptr<Attachment> attachment, std::shared_ptr<GradientWindow> window,
           uint32_t tensor, const at::Tensor& parameter);

  // `.grad` of the parameter when it has one: over the accumulator.
  const at::Tensor& tensor() const { return tensor_; }
  // The parameter's AccumulateGrad has run with `added`, and its lock is held: what it left in
  // `.grad` becomes the accumulator's (its own buffer is dropped), and a spilled gradient starts
  // its way to the drive. A tensor that the trainer has put there and uses elsewhere, too (a view
  // of a flat buffer), stays, and is taken by the step.
  virtual void AfterAccumulation(const at::Tensor& added);
  // The same lock is held: whether `.grad` is the accumulator's, which the daemon reads where it
  // is.
  bool IsInPlace();
  // Passes that leave a gradient in place are told to it from now on; null: to nobody.
  void AnnounceTo(std::shared_ptr<StepAnnouncement> announcement) {
    announcement_ = std::move(announcement);
  }
  // A pass has left the gradient in place; no lock is held.
  void Announce() const {
    if (announcement_ != nullptr) announcement_->Accumulated(tensor_id_);
  }
  // Watches the parameter's accumulation from now on.
  virtual void Watch();
  bool is_watched() const { return accumulation_ != nullptr; }
  // The node of the parameter's accumulation; null when it is not watched.
  const std::shared_ptr<torch::autograd::Node>& accumulation() const { return accumulation_; }

  // ---- The step; on one thread ----
  // Makes the accumulator hold `.grad`, false when there is none. Starts writing a spilled one.
  // Throws OFD-1701 when it is not finite.
  virtual bool PrepareStep();
  // Waits until a spilled gradient is written.
  virtual void FinishWriting();
  // What the step says of it: with several ranks that reduce by themselves, its checksum, too.
  virtual void Describe(client::TensorUpdate& update) const;
  // The daemon has taken the step: the accumulator belongs to the update until it is done.
  virtual void BeginUpdate();

  void Pin(Access access) override;
  void Unpin(Completion* done) override;
  void Abandon() final;
  bool Serve(Special special, torch::jit::Stack* stack) override;
  bool is_copied_among_several() const override { return spilled(); }

  // ---- Raw pointers: a copy at home, which is the value until an operator comes ----
  void ServeRaw(bool writes) override;
  bool EndRaw(bool wait) override;
  size_t raw_bytes() const override { return raw_.size_bytes(); }
  const std::string& raw_name() const override { return subject_; }

  // `.grad`, if there is one, becomes an ordinary tensor in memory; then as Close(). Only between
  // an update that is done and the next step.
  void LeaveInMemory();
  // Bytes that LeaveInMemory() would take.
  uint64_t live_bytes() const { return parameter_.grad().defined() ? size_bytes_ : 0; }
  // From now on Pin() throws OFD-1802, and the parameter has no gradient.
  void Close();

  const at::Tensor& parameter() const { return parameter_; }

 protected:
  using Lock = std::unique_lock<std::mutex>;

  // Marks the gradient as one that the calling thread moves; nested in itself. With the lock held
  // at both ends.
  class Moving {
   public:
    explicit Moving(Gradient& gradient);
    ~Moving();
    Moving(const Moving&) = delete;
    Moving& operator=(const Moving&) = delete;

   private:
    Gradient& gradient_;
    const bool outer_;
  };

  ~Gradient() override;
  // Raw pointers are refused from now on.
  void RefuseRaw();
  // Makes the bytes the value again.
  void FinishRaw();
  // Until another thread has shown the bytes at home, or has taken them from there.
  void WaitWhileRawMoves(Lock& lock);
  bool IsMovingRaw() const { return moves_raw_ && raw_mover_ == std::this_thread::get_id(); }
  std::mutex& mutex() { return window_ != nullptr ? window_->mutex() : mutex_; }
  WaitQueue& changed() { return window_ != nullptr ? window_->changed() : own_changed_; }
  bool spilled() const { return window_ != nullptr; }
  // Whether the trainer may write the bytes through a pointer of its own: then nothing that was
  // found out about them is kept.
  virtual bool raw_writable() const { return !spilled() && !attachment_->serves_raw(); }
  bool busy() const { return updating_ || zero_ || scale_ != 1; }
  virtual std::byte* bytes() const { return attachment_->region() + *region_offset_; }
  // A plain tensor over the bytes in memory, with the parameter's strides.
  virtual at::Tensor Plain() const;
  // scale_ as a 0-dim tensor, which mul_ takes for a number.
  at::Tensor ScaleTensor() const;
  void CheckOpen() const;
  void CheckFits(const at::Tensor& value) const;
  // Whether it is the accumulator's tensor. One that was given another storage (set_data) is not.
  bool IsOwn(const at::Tensor& grad) const;
  // The lock under which torch adds to the parameter's `.grad`.
  std::mutex& accumulation_mutex() const;
  // Before a pin looks at anything, without the lock.
  virtual void BeforePin() {}
  // Makes the bytes there, and the value; marked, with the lock held at both ends.
  virtual void Bring(Access access, Lock& lock);
  // The bytes that were made there to be overwritten never had the value: nothing is kept of them.
  // mutex() held.
  virtual void DropOverwritten();
  // Nobody uses the bytes any more.
  virtual void Rest() {}
  // A pass has been added to a spilled gradient.
  virtual void AfterPass();
  // Waits until what others than operators bring to the slot has come; with the lock held at both
  // ends.
  virtual void Arrive(Lock& lock) {}
  // mutex() held: it waits in its slot to be written, and can be now.
  virtual bool IsDue() const { return false; }
  // mutex() held: others than operators neither bring anything to the slot nor read it.
  virtual bool IsStill() const { return true; }
  // Begins to read a spilled gradient into a slot ahead of its use, or goes on with it; marks it as
  // one that is awaited there. False: there is no room, or more to begin. Never waits.
  bool StartReading(Lock& lock);
  // Of one that is read: whether it has come, as far as is known without a wait.
  bool HasCome() const;
  // Waits until it has; drops the slot where it cannot, and throws.
  void FinishReading(Lock& lock);
  // Nobody moves it after it, until the lock is let go.
  void WaitWhileMoving(Lock& lock);
  // Marks it and works without the lock.
  void Alone(Lock& lock, absl::FunctionRef<void()> work);
  void WaitForUpdate(Lock& lock);
  void Load(Access access, Lock& lock);  // region_offset_ is set after it
  virtual void ShowBytes();              // the storage's pointer and whether it throws
  bool IsTrainers(const at::Tensor& grad) const;
  virtual void AdoptStolen(const at::Tensor& stolen);
  void TakeValues(const at::Tensor& values);
  // A thread of the program's has no number of threads of its own before its first parallel
  // operator, and what it computes until then is computed by another number: in such a thread, and
  // any but the one that has attached may be, nothing parallel is run where torch runs nothing.
  bool IsElsewhere() const { return std::this_thread::get_id() != maker_; }
  void LeaveTensorToOthers();
  // Between pins: memory of its own with the value.
  virtual c10::DataPtr CopyBytes();
  virtual at::Tensor Norm(double p, NormKernel kernel = NormKernel::kOfOne);
  virtual bool IsFinite();
  // Whether as many values in memory of the host as the gradient has are.
  bool AreFinite(const std::byte* values) const;
  void NoteFinite();
  // Of writes to the scratch file: lets go of the lock meanwhile.
  void FinishWriting(Lock& lock);

  const std::shared_ptr<Attachment> attachment_;
  const std::shared_ptr<GradientWindow> window_;
  const uint32_t tensor_id_;
  const std::vector<int64_t> strides_;  // the parameter's
  const std::thread::id maker_;         // the thread that attached
  at::Tensor parameter_, tensor_;
  std::shared_ptr<torch::autograd::Node> accumulation_;  // torch has a weak reference only
  std::shared_ptr<StepAnnouncement> announcement_;
  std::optional<uint64_t> region_offset_;  // of the bytes in memory
  WaitQueue own_changed_;                  // of one that is not spilled
  bool moving_ = false;
  WaitGraph::Thread mover_;
  int pins_ = 0;  // operators between Pin() and Unpin()
  // As those of the thread that brings the bytes home, or takes them back, which another may write
  // through a pointer meanwhile: it has to be one to their home, and not to what is copied.
  int raw_pins_ = 0;
  int uses_ = 0;  // these, and those that an accelerator still runs
  absl::InlinedVector<WaitGraph::Thread, 4> holders_;  // one per pin
  RawCopy raw_;
  bool moves_raw_ = false;
  WaitGraph::Thread raw_mover_;
  bool closed_ = false;
  bool updating_ = false;
  bool zero_ = true;
  double scale_ = 1;
  bool on_drive_ = false;    // spilled: the scratch file has the bytes
  bool dirty_ = false;       // spilled: the slot is newer than the scratch file
  bool is_coming_ = false;   // spilled: the slot is being read into
  bool is_awaited_ = false;  // spilled: the slot is kept until it is used
  WriteTiming timing_;       // spilled
  std::vector<client::Ticket> writes_;
  struct KnownNorm {
    double p;
    NormKernel kernel;
    at::Tensor norm;
  };
  std::vector<KnownNorm> norms_;  // of the value
  std::optional<bool> finite_;

 private:
  friend class GradientWindow;

  // What was known of the value before an operator began to overwrite it.
  struct Before {
    bool zero;
    double scale;
    bool dirty;
    bool has_bytes;
  };

  std::optional<Before> overwritten_;  // while one overwrites it that has found it unused

  bool ServeNorm(Special special, torch::jit::Stack* stack);
  void Settle(Access access, Lock& lock);  // the bytes are the value after it
  void Changed();                          // the bytes are
  void LetGo();
  void StartWriting(Lock& lock);
  // Without the lock: asks for the transfer of all bytes; what is left to wait for.
  std::vector<client::Ticket> Transfer(bool write, uint64_t region_offset);
  client::Ticket StartTransfer(bool write, uint64_t begin, uint64_t region_offset);
  uint64_t extent_bytes() const;
  void WaitFor(std::vector<client::Ticket> tickets);
  void Evict(Lock& lock);
  void LeaveSlot();
  bool IsIdle() const { return uses_ == 0 && !moving_; }
  bool CanLeave() const;

  std::vector<client::Ticket> reads_;  // into the slot
  uint64_t read_bytes_ = 0;            // of them and those that are done
};

}  // namespace offload::zero3

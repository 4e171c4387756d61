// zero3/torch/device_tier.h
//
// The tensors that stay on a device with all that is kept of them, and are updated there
// (GpuPlan::stays): their weights, residuals and moments are in one range of its memory, their
// gradients never leave it, and the daemon's planes of them are older between two checkpoints.
//
// What only the device has is put into the job before it is committed: by the step that ends an
// interval, and by Settle(). Steps in between are partial (client::StepCommand), so that a job that
// ends there, however it ends, ends at its last commit. Who reads the daemon's planes of a tensor
// says so first, and who puts some.
//
// Invariants
//   * A tensor's planes are newer on the device only if the job's last step was partial.
//   * Before anything but this puts, the last step is committed as a whole: what is put then is
//   part of the next, as without a tier. Large buffers go with the steps that put them.
//   * The range is taken once.
//   * Where a step fails when a tensor was updated for it, the device is ahead of a job that cannot
//   follow: nothing is read, put, used or updated any more, and the job ends at its last commit.
//
// The memory is ordered as torch's own is: updates are launched on the caller's current stream,
// behind whatever other streams have used weights for, and further uses wait for them on the
// device. What goes to the daemon and comes from it does so on a stream of its own, and is known to
// have come before a call returns (tier_transfers.h).
//
// Errors: thrown; those of the device and of the session, and OFD-1802 after a step that has failed
// midway.
//
// Thread safety: Pin() and Unpin() from any thread; the rest as TensorEngine.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "accelerator/accelerator.h"
#include "kernels/optimizer.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_tensors.h"
#include "zero3/torch/tier_transfers.h"

namespace offload::zero3 {

class Attachment;

class DeviceTier {
 public:
  // `attachment` has its plan, and outlives this, as `accelerator` does. Throws OFD-2003 when the
  // device has no room.
  DeviceTier(Attachment& attachment, c10::Device device, accelerator::Accelerator* accelerator,
             const GpuPlan& plan);
  ~DeviceTier();  // waits for the device
  DeviceTier(const DeviceTier&) = delete;
  DeviceTier& operator=(const DeviceTier&) = delete;

  bool Has(uint32_t tensor) const { return tensor < places_.size() && places_[tensor].has_value(); }

  // ---- Weights; the stream is the calling thread's current one ----
  // Where it is, good for what is launched on the stream before the next update.
  std::byte* Pin(uint32_t tensor);
  // Somebody has launched a use of weights.
  void Unpin();

  // ---- Steps ----
  // Launches update number `count` of the tensor. `gradient` has the parameter's elements in the
  // order of its memory and its type; it is multiplied with `scale` first.
  void Update(uint32_t tensor, const kernels::OptimizerSpec& optimizer, uint64_t count,
              const at::Tensor& gradient, double scale);
  // Puts what only the device has: the step that follows is a whole one.
  void PutAll();
  // A step that is taken now leaves the daemon without something.
  bool has_news() const;
  // The step of the updates was taken; it was partial, or not ...
  void Stepped(bool is_partial);
  // ... or it was not taken.
  void StepFailed(uint64_t step);
  // Makes the last step durable as a whole, where it was partial.
  void Settle();

  // ---- The daemon's planes ----
  // Somebody is about to read those of a tensor ...
  void BeforeRead(uint32_t tensor);
  // ... or to put some.
  void BeforePut(uint32_t tensor);
  // They are others than those of the device.
  void Changed(uint32_t tensor);

  // Throws OFD-1802 when the device is ahead of the job.
  void CheckWhole() const;

  uint64_t size_bytes() const { return size_bytes_; }

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;
  // Of a tensor in the range.
  struct Place {
    std::byte* weight = nullptr;
    TierPlanes offsets;
    std::byte* state = nullptr;  // from where on they are
    bool has_weight = false;     // as the daemon's, or newer
    bool has_state = false;      // and the weight
    bool is_newer = false;       // than the daemon's
  };

  std::byte* PlaneOf(const Place& place, std::optional<uint64_t> offset) const {
    return offset.has_value() ? place.state + *offset : nullptr;
  }
  // The master of a place, or the weight where that is the master; what the optimizer keeps.
  TierTransfers::Source MasterOf(uint32_t tensor) const;
  void AddState(uint32_t tensor, std::vector<TierTransfers::Source>& sources) const;
  void FetchWeight(uint32_t tensor);
  void FetchState(uint32_t tensor);
  void Fetch(std::span<const TierTransfers::Source> sources);
  void Put(std::span<const uint32_t> tensors);
  void Order(accelerator::Stream stream);
  const uint32_t* Roots(const kernels::OptimizerSpec& optimizer);

  Attachment& attachment_;
  const c10::Device device_;
  accelerator::Accelerator* const accelerator_;
  const uint64_t size_bytes_;
  mutable std::recursive_mutex mutex_;        // transfers say that they read and put, too
  std::vector<std::optional<Place>> places_;  // by tensor
  std::byte* bytes_ = nullptr;
  std::byte* shared_ = nullptr;  // by updates: the table of square roots, or sums of squares
  bool has_table_ = false;
  bool is_partial_ = false;               // the last step was
  bool is_ahead_ = false;                 // some are updated for a step that is not taken
  std::atomic<uint64_t> failed_step_{0};  // by which they stay so; 0: none
  // Streams that have used weights since the last update of any, or wait for it.
  std::vector<accelerator::Stream> used_on_, ordered_;
  std::optional<accelerator::Stream> updated_on_;
  accelerator::Event updated_, used_;
  TierTransfers transfers_;
};

}  // namespace offload::zero3

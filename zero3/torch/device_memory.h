// zero3/torch/device_memory.h
//
// What an engine holds of a device: the window of weights over the job's slab, the gradients on
// their way to the rank's region, the tensors that stay and are updated there (device_tier.h), and
// the page-locked mappings that copies need. It is the only user of an Accelerator above torch, and
// knows no kind of it.
//
// gpu_ram is divided once (gpu_plan.h). Beside it stand, as torch's own memory: activations, one
// gradient and one weight that an operator writes.
//
// Errors: as GpuWindow's and GradientReturn's, thrown; after one of the device all calls throw it.
//
// Thread safety: all methods may be called from any thread, construction and destruction when no
// operation runs.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "accelerator/accelerator.h"
#include "accelerator/host_registration.h"
#include "client/session.h"
#include "proto/gpu_words.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_window.h"
#include "zero3/gpu/gradients_ahead.h"
#include "zero3/gpu/peer_group.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/device_gradients.h"
#include "zero3/torch/wait_graph.h"

namespace offload::zero3 {

class DeviceParts;
class DeviceTier;
class ExchangedParts;
class SliceExchange;

class DeviceMemory {
 public:
  // `attachment` has its plan, and outlives this. Collective for several ranks. Throws OFD-2001
  // when the memory that is shared with the daemon cannot be page-locked, 2003 when the device has
  // no room for the window. `averages_gradients`: of several ranks, rather than adding them.
  DeviceMemory(Attachment& attachment, c10::Device device,
               std::shared_ptr<accelerator::Accelerator> accelerator, const GpuPlan& plan,
               uint64_t gpu_ram_bytes, bool averages_gradients);
  ~DeviceMemory();  // waits for the device
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // ---- Weights; the stream is the calling thread's current one ----
  // Where a weight is on the device, good until Unpin() for what is launched on the stream. Waits
  // while operations of other threads leave no room.
  std::byte* Pin(uint32_t tensor);
  absl::Status Unpin(uint32_t tensor);
  // Of one that is pinned: `stream` uses it, too.
  void RecordStream(uint32_t tensor, const c10::Stream& stream);
  // ---- Tensors that are updated here; null: there are none ----
  DeviceTier* tier() { return tier_.get(); }
  bool Stays(uint32_t tensor) const;
  // Somebody is about to read the daemon's planes of a tensor, or to put some.
  void BeforeRead(uint32_t tensor);
  void BeforePut(uint32_t tensor);

  // The daemon's bytes have changed.
  void Changed(std::span<const uint32_t> tensors);
  // The same by a step that ends a round of the schedule.
  void EndRound(std::span<const uint32_t> changed);

  // The window holds nothing of the daemon's until EndDaemonWait(), as often (DaemonWait).
  void BeginDaemonWait() {
    window_->BeginSourceWait();
    Publish();
  }
  void EndDaemonWait() { window_->EndSourceWait(); }

  DeviceGradients& gradients() { return *gradients_; }
  // Null where all gradients have room.
  GradientsAhead* gradients_ahead() { return gradients_ahead_.get(); }
  // With several ranks whose gradients are added for them.
  ExchangedParts& parts() { return *exchanged_parts_; }
  // A gradient was fetched from the host.
  void CountFetched(uint64_t size_bytes) { fetched_bytes_ += size_bytes; }
  accelerator::Accelerator& accelerator() { return *accelerator_; }
  c10::Device device() const { return device_; }

  uint64_t bytes_max_ever() const;
  // Waits of the host for copies of weights, in all.
  uint64_t host_waits() const { return window_->counters().host_waits; }
  // Which ways weights and gradients take, as lines for people.
  std::string DescribeWay() const;

 private:
  // The session's tensors, in the slab.
  class SlabWeights final : public WeightSource {
   public:
    explicit SlabWeights(Attachment& attachment) : attachment_(attachment) {}
    void Prefetch(uint32_t tensor) override { attachment_.session().Prefetch(tensor); }
    absl::StatusOr<const std::byte*> TryLease(uint32_t tensor) override {
      return attachment_.session().TryAcquire(tensor);
    }
    absl::StatusOr<const std::byte*> Lease(uint32_t tensor) override {
      return attachment_.session().Acquire(tensor);
    }
    void Return(uint32_t tensor) override { attachment_.session().Release(tensor); }

   private:
    Attachment& attachment_;
  };

  // Tells the daemon how things are (proto/gpu_words.h).
  void Publish();
  void Register(Attachment& attachment);
  void JoinPeers(Attachment& attachment, size_t tensor_count);
  void MakeExchange(Attachment& attachment, const GpuPlan& plan, bool averages_gradients);
  void MakeParts(Attachment& attachment, const GpuPlan& plan);
  GpuWindow::Options WindowOptions(Attachment& attachment, const GpuPlan& plan);

  const c10::Device device_;
  const std::shared_ptr<accelerator::Accelerator> accelerator_;
  const uint64_t window_bytes_;
  accelerator::HostRegistration slab_, region_;
  Staging::Piece staging_;            // where the slab is not registered
  std::unique_ptr<PeerGroup> peers_;  // null: each rank copies for itself
  std::string why_no_peers_;
  SlabWeights source_;
  std::unique_ptr<SliceExchange> exchange_;  // of gradients, with peers; null: there is none
  std::unique_ptr<GpuWindow> window_;
  std::unique_ptr<DeviceTier> tier_;
  std::unique_ptr<DeviceGradients> gradients_;
  std::unique_ptr<GradientsAhead> gradients_ahead_;
  std::unique_ptr<DeviceParts> parts_;
  std::unique_ptr<ExchangedParts> exchanged_parts_;
  std::mutex mutex_;
  WaitQueue unpinned_;
  std::vector<WaitGraph::Thread> holders_;  // one per pin
  uint64_t unpins_ = 0;
  const uint64_t gpu_ram_bytes_;
  proto::GpuWords& words_;
  std::atomic<uint64_t> fetched_bytes_{0};
};

// While it lives the calling thread waits for the daemon, which may need room, or the end of a use,
// that the device's window has: the window lets go of all. Nothing for a model of the host. It may
// wait for copies, and must not be made while one of the window's own leases is waited for.
class DaemonWait {
 public:
  explicit DaemonWait(const Attachment& attachment) : device_(attachment.device()) {
    if (device_ != nullptr) device_->BeginDaemonWait();
  }
  ~DaemonWait() {
    if (device_ != nullptr) device_->EndDaemonWait();
  }
  DaemonWait(const DaemonWait&) = delete;
  DaemonWait& operator=(const DaemonWait&) = delete;

 private:
  DeviceMemory* const device_;
};

}  // namespace offload::zero3

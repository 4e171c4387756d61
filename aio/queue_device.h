// aio/queue_device.h
//
// The one way of operations through a queue of the kernel (kernel_queue.h), for io_uring and libaio
// alike: what waits, what is offered, what the kernel has, what is done; backpressure, retries,
// short transfers and refusals. Internal to aio/.
//
//   Start -> waiting -> offered -> (the kernel) -> ready -> the operation's callback
//               ^                      |
//               +-- to be continued ---+     goes before all that waits
//
// Invariants
//   * The queue has taken and is offered at most `queue_depth` transfers together.
//   * An operation is in exactly one of these states until its callback begins.
//   * Callbacks run when everything that had completed has been collected, never between two
//   attempts to submit.
//
// Thread safety: that of Device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "aio/file_device.h"
#include "aio/kernel_queue.h"

namespace offload::aio {

class QueueDevice final : public FileDevice {
 public:
  static constexpr uint32_t kQueueDepthMax = 4096;

  static absl::StatusOr<std::unique_ptr<FileDevice>> Make(MakeKernelQueue& make_queue, int fd,
                                                          const Geometry& geometry,
                                                          const OpenOptions& options);
  // A buffer is free only after its completion, hence the drain before the queue goes.
  ~QueueDevice() override { Drain(); }

  size_t Poll(bool wait) override;
  std::string_view engine() const override { return queue_->engine(); }
  void RegisterBuffer(std::span<std::byte> bytes) override { queue_->RegisterBuffer(bytes); }
  uint64_t registered_bytes() const override { return queue_->registered_bytes(); }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  // The queue knows it by its transfer.
  struct Request final : Transfer {
    Request(std::unique_ptr<Op> op, uint32_t offset_alignment);
    std::unique_ptr<Op> op;
    absl::Status outcome;
  };

  QueueDevice(const Geometry& geometry, uint32_t queue_depth)
      : FileDevice(geometry), queue_depth_(queue_depth) {}

  void SubmitWaiting();
  bool OfferWaiting();
  int SubmitOffered();
  void RefuseFirst(int error_number);
  bool Reap();
  void HandleResult(std::unique_ptr<Request> request, int64_t result);
  void WaitForCompletion();
  size_t RunReady();

  const uint32_t queue_depth_;
  std::unique_ptr<KernelQueue> queue_;
  std::deque<std::unique_ptr<Request>> waiting_;  // to be offered next, in order
  std::vector<Transfer*> offered_;                // owned Requests, in order
  uint32_t taken_ = 0;                            // the kernel's until they are reaped
  std::deque<std::unique_ptr<Request>> ready_;    // have their outcome; the callback has not run
  int broken_errno_ = 0;  // of the queue; everything that is not yet taken ends with it
};

}  // namespace offload::aio

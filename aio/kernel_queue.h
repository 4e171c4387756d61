// aio/kernel_queue.h
//
// What io_uring and libaio have in common: a queue of the kernel that takes transfers in batches
// and tells their results later. Internal to aio/.
//
// A queue moves requests to the kernel and results back, nothing else. What to submit when, how
// many at a time, what a result means and what is repeated is QueueDevice's (queue_device.h), once
// for both.
//
// Invariants
//   * A transfer that was taken is the queue's, and stays where it is, until Reap() returns it.
//   * Every transfer that was taken is returned exactly once.
//   * Whatever becomes reapable makes the event descriptor that the queue was made with readable.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "aio/transfer.h"

namespace offload::aio {

class KernelQueue {
 public:
  struct Completion {
    Transfer* transfer = nullptr;
    int64_t result = 0;  // of a call for all of its pieces: bytes or a negated errno
  };

  virtual ~KernelQueue() = default;  // after the last completion

  // Offers transfers, at least one, in order. Returns how many of the first were taken, or a
  // negated errno. What was not taken is offered again, at the same position, by the next call,
  // unless the error was final.
  virtual int Submit(std::span<Transfer* const> transfers) = 0;

  // What a final error of Submit() means: the first transfer alone is refused and not offered
  // again, or the queue is broken and Submit() is not called any more.
  virtual bool errors_break() const = 0;

  // Takes results, as many as there are and fit; never blocks. Fewer than fit: there are no more.
  virtual size_t Reap(std::span<Completion> completions) = 0;

  // Blocks until Reap() may return something; sometimes returns early. Something must be taken.
  virtual void Wait() = 0;

  virtual std::string_view engine() const = 0;
  virtual void RegisterBuffer(std::span<std::byte> bytes) {}  // as Device's
  virtual uint64_t registered_bytes() const { return 0; }
};

// `event_fd` and `fd` must outlive the queue. Fail with the text of the call that was refused.
using MakeKernelQueue = absl::StatusOr<std::unique_ptr<KernelQueue>>(int fd, int event_fd,
                                                                     uint32_t queue_depth);
MakeKernelQueue MakeUringQueue;
MakeKernelQueue MakeLibaioQueue;

}  // namespace offload::aio

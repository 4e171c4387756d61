// zero3/gpu/gradient_return.h
//
// Takes gradients from the device to the host, overlapped with backward. A copy waits, on the
// device, for the stream that wrote the gradient. Copies are counted in buckets; when a bucket is
// known to be done its gradients are delivered (the daemon is told) and their device memory is
// dropped. The host waits only when more would be on their way than the plan allows, and in
// Flush().
//
// After an error nothing is delivered any more, and every call returns it.
//
// Thread safety: all methods may be called from any thread; callbacks run under the lock and must
// not call back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "zero3/gpu/event_pool.h"
#include "zero3/gpu/stream_stalls.h"

namespace offload::zero3 {

class GradientReturn {
 public:
  struct Options {
    uint64_t bucket_bytes = uint64_t{16} << 20;
    uint64_t held_bytes_max = 0;  // GpuPlan::gradient_bytes
  };
  struct Gradient {
    uint32_t tensor = 0;
    const std::byte* device = nullptr;  // device memory of the caller's, until `drop`
    std::byte* host = nullptr;          // registered, size_bytes; untouched until it is delivered
    uint64_t size_bytes = 0;
    std::function<void()> drop;  // lets go of the device memory; called once, also after an error
  };
  struct Counters {
    uint64_t bytes_to_host = 0;
    double stall_seconds = 0;  // of streams, in WaitForCopies()
  };
  // The gradient of `tensor` stands in host memory.
  using Deliver = std::function<void(uint32_t tensor)>;

  static absl::StatusOr<std::unique_ptr<GradientReturn>> Make(accelerator::Accelerator* accelerator,
                                                              const Options& options,
                                                              Deliver deliver);
  // Waits for what is on its way, and delivers nothing more.
  ~GradientReturn();

  // The gradient is final behind what `stream` has been given so far.
  absl::Status Add(Gradient gradient, accelerator::Stream stream);
  // What `stream` is given from now on comes after the copies so far: it may write into gradients
  // that are on their way.
  absl::Status WaitForCopies(accelerator::Stream stream);
  // Delivers what has arrived. Never waits.
  absl::Status Poll();
  // Waits for everything and delivers it: before the optimizer's step.
  absl::Status Flush();
  // The same for the oldest bucket; nothing to do when there is none.
  absl::Status FlushOldest();

  Counters counters() const;

 private:
  struct Bucket {
    std::vector<Gradient> gradients;
    uint64_t size_bytes = 0;
    RecordedEvent copied;
  };

  GradientReturn(accelerator::Accelerator* accelerator, const Options& options, Deliver deliver)
      : accelerator_(accelerator),
        options_(options),
        deliver_(std::move(deliver)),
        events_(accelerator),
        stalls_(accelerator) {}

  absl::Status Copy(Gradient gradient, accelerator::Stream stream);
  absl::Status CloseBucket();
  absl::Status DeliverArrived();
  absl::Status WaitForOldest();
  void DeliverOldest();
  absl::Status Keep(absl::Status status);
  void DropAll();

  accelerator::Accelerator* const accelerator_;
  const Options options_;
  const Deliver deliver_;
  mutable std::mutex mutex_;
  EventPool events_;
  mutable StreamStalls stalls_;
  accelerator::Stream copies_;
  Bucket open_;
  std::deque<Bucket> closed_;
  uint64_t held_bytes_ = 0;  // in open and closed buckets
  uint64_t bytes_to_host_ = 0;
  absl::Status failed_;
};

}  // namespace offload::zero3

// zero3/torch/device_gradients.h
//
// The bytes of gradients on a device. What torch has accumulated starts its way to the host at
// once, behind the stream that wrote it, and stays on the device as long as there is room: the next
// micro-batch is added there, and clipping looks at it there. The host's copy, in the rank's
// region, is the one that the daemon reads. What found no room comes back by copies on a stream of
// their own, for which users wait on the device: ahead of use where there is room
// (gradients_ahead.h).
//
// Who spills them (device_gradient.h) moves the host's copy on.
//
// Invariants
//   * Bytes at rest, on their way to the host or arrived, or back ahead of use, never exceed the
//     plan's share of gpu_ram. Those that operators use are not counted, as before they were
//     gradients of ours.
//   * Bytes that are on their way to the host stay; where there are none, the host has the value.
//     Those of parameters that are updated on the device always stay, and the host has nothing of
//     them.
//   * Memory that a copy still writes, or that it still reads of the host, is not given to others.
//
// Thread safety: all methods may be called from any thread; those of one gradient by one at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "zero3/gpu/event_pool.h"
#include "zero3/gpu/gradient_return.h"
#include "zero3/gpu/stream_stalls.h"

namespace offload::zero3 {

class DeviceGradients {
 public:
  struct Counters {
    uint64_t fetched = 0;        // that an operator was about to use
    uint64_t fetched_ahead = 0;  // before
    uint64_t fetched_bytes = 0;
    uint64_t read = 0, read_ahead = 0;  // from the drive, in the same two ways
    double stall_seconds = 0;           // of streams, for copies to and from the host
  };

  // `tensor_count`: gradients have the numbers of their parameters. `bucket_bytes_max`: of copies
  // that are known to have arrived together. `stays`, by number: what is updated on the device is
  // never returned, and never makes room. The accelerator outlives this.
  static absl::StatusOr<std::unique_ptr<DeviceGradients>> Make(
      accelerator::Accelerator* accelerator, uint64_t bytes_max, size_t tensor_count,
      uint64_t bucket_bytes_max = GradientReturn::Options().bucket_bytes,
      std::vector<bool> stays = {});
  ~DeviceGradients();  // waits for what comes back

  // The bytes of a gradient, in use until Rest(); undefined when only the host has them. Who writes
  // does it on `stream`, which waits for copies that still read.
  absl::StatusOr<at::Tensor> Use(uint32_t tensor, bool writes, accelerator::Stream stream);
  // Gives a gradient bytes, in use until Rest(), instead of what it had. Waits when that is on its
  // way.
  absl::Status Give(uint32_t tensor, at::Tensor bytes);
  // What only the host has comes back from `host`, registered memory, into `bytes`, which were
  // allocated on `stream`: in use until Rest(). Use() waits for it on the device.
  absl::Status Fetch(uint32_t tensor, at::Tensor bytes, const std::byte* host,
                     accelerator::Stream stream);
  // The same ahead of use, at rest at once, by bytes that `allocate` makes. False: there is no room
  // beside what is on its way. Of one that has bytes they stay until they are used.
  absl::StatusOr<bool> FetchAhead(uint32_t tensor, uint64_t size_bytes,
                                  absl::FunctionRef<at::Tensor()> allocate, const std::byte* host,
                                  accelerator::Stream stream);
  // Starts their way to `host`, registered memory, behind `stream`. A failure is returned by
  // Flush(), too. Waits on the host only when more would be on their way than fits.
  absl::Status Return(uint32_t tensor, std::byte* host, accelerator::Stream stream);
  // Nobody uses them any more.
  void Rest(uint32_t tensor);
  // Nobody uses them any more, and they are not the value: only the host has that.
  void Drop(uint32_t tensor);
  // Waits until what is on its way has arrived.
  absl::Status Flush();
  // Until all of one gradient has arrived, there or here.
  absl::Status WaitFor(uint32_t tensor);
  // Whether nothing of it is on its way, as far as is known without a wait. Poll() finds out.
  bool HasArrived(uint32_t tensor) const;
  // The same of what comes back, too: nothing of the host's copy is in use.
  bool IsStill(uint32_t tensor) const;
  // Whether there are bytes on the device.
  bool Has(uint32_t tensor) const;
  // A gradient is read from the drive.
  void CountRead(bool ahead);
  absl::Status Poll() { return return_->Poll(); }

  uint64_t bytes() const;           // at rest
  uint64_t bytes_max_ever() const;  // at once
  uint64_t bytes_to_host() const { return return_->counters().bytes_to_host; }
  Counters counters() const;

 private:
  struct Bytes {
    at::Tensor tensor;
    bool is_used = false;
    bool is_ahead = false;                       // not used since they came back
    int on_their_way = 0;                        // copies
    RecordedEvent fetched;                       // that they came back, the last time; null: known
    std::optional<accelerator::Stream> ordered;  // the last stream that has waited for it
  };

  DeviceGradients(accelerator::Accelerator* accelerator, uint64_t bytes_max, size_t tensor_count,
                  std::vector<bool> stays)
      : accelerator_(accelerator),
        bytes_max_(bytes_max),
        stays_(std::move(stays)),
        events_(accelerator),
        stalls_(accelerator),
        gradients_(tensor_count) {}
  void Arrived(uint32_t tensor);
  absl::Status StartFetch(Bytes& bytes, const std::byte* host, accelerator::Stream stream);
  absl::Status WaitForFetch(Bytes& bytes);
  absl::Status OrderBehindFetch(Bytes& bytes, accelerator::Stream stream);
  absl::Status LetGo(Bytes& bytes);
  absl::Status MakeRoom(uint64_t more_bytes, bool for_use);
  static uint64_t SizeOf(const Bytes& bytes);

  accelerator::Accelerator* const accelerator_;
  const uint64_t bytes_max_;
  const std::vector<bool> stays_;  // empty: none does
  mutable std::mutex mutex_;
  EventPool events_;
  mutable StreamStalls stalls_;
  accelerator::Stream fetches_;
  Counters counters_;
  std::vector<Bytes> gradients_;  // by number
  std::list<uint32_t> resting_;   // with bytes, longest first
  uint64_t resting_bytes_ = 0, resting_bytes_max_ = 0;
  std::unique_ptr<GradientReturn> return_;  // calls Arrived()
};

}  // namespace offload::zero3

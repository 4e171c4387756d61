// zero3/gpu/slice_exchange.h
//
// Adds gradients on the devices of ranks that reach each other: of every extent each rank gets its
// slice from all others, adds the parts in the order of ranks, by the daemon's arithmetic
// (kernels/device_sum.h), and has a slice of the sum, 1/N of what it would else move to the host.
// Collectives that add would not do: they have no fixed order.
//
// An exchange needs all ranks, and no rank may depend on another's path: so a gradient is offered,
// and exchanged when all ranks have offered it at the same position, a backward pass of theirs. Who
// offers it last agrees it (gather_agreement.h), and all issue it in the agreement's order, behind
// and before gathers of weights. An offer is taken back when some rank will not offer the gradient
// at this position any more (it has declined it, ended the pass, or left), or when nothing has been
// heard of the others for `patience`, once in a pass: what is not offered in good time goes to the
// daemon whole, which adds it to the same bits.
//
// The chain over passes goes on from the slice of the sum that the last exchange has left on the
// device. So a gradient is offered only while all that this rank has given of it since its sum
// began was exchanged, and that slice is still there.
//
// Invariants
//   * One allocation, area_bytes long, holds slices of other ranks and sums. What is offered has
//   its room in it, so what is agreed can be issued without waiting. Gradients that are offered, or
//   whose sums somebody holds, are as much again at most.
//   * The area is written by the stream of collectives alone; a slice of a sum stays as it is while
//   somebody holds it.
//
// Errors of the device, and of ranks that are gone, are final and are returned by every call.
//
// Thread safety: all methods may be called from any thread. Resolve() waits, and holds no lock
// meanwhile; Issue() is called by the window, under its lock.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "accelerator/sums.h"
#include "base/range_allocator.h"
#include "kernels/dtype.h"
#include "kernels/sum.h"
#include "zero3/gpu/event_pool.h"
#include "zero3/gpu/gpu_window.h"
#include "zero3/gpu/peer_group.h"

namespace offload::zero3 {

class SliceExchange final : public AgreedWork {
 public:
  struct Options {
    PeerGroup* peers = nullptr;  // outlives this
    uint32_t first_item = 0;     // of the agreement: that of tensor 0
    size_t tensor_count = 0;
    uint64_t area_bytes = 0;
    double factor = 1;  // that each part is multiplied with
    // Smaller gradients are not worth an exchange.
    uint64_t exchanged_bytes_min = uint64_t{16} << 10;
    std::chrono::microseconds patience = std::chrono::milliseconds(250);
  };
  struct Gradient {
    uint32_t tensor = 0;
    kernels::Dtype dtype = kernels::Dtype::kFloat32;
    uint64_t element_count = 0;
    uint32_t pass = 0;
    kernels::SumStart start = kernels::SumStart::kNothing;  // of the sum
    const std::byte* bytes = nullptr;  // device memory, which `owner` keeps as it is
    std::shared_ptr<const void> owner;
  };
  // This rank's slice of the sum of an extent, in device memory.
  struct Slice {
    uint64_t element_offset = 0, element_count = 0;  // in the tensor
    const std::byte* bytes = nullptr;
  };
  struct Summed {
    std::vector<Slice> slices;          // in order, one per extent
    accelerator::Stream stream;         // that has been given what computes them
    std::shared_ptr<const void> owner;  // of the memory; to be dropped before the exchange
  };
  struct Counters {
    uint64_t exchanged = 0;   // gradients
    uint64_t taken_back = 0;  // offers that came to nothing
  };

  // The accelerator can add (accelerator/sums.h), and outlives this.
  static absl::StatusOr<std::unique_ptr<SliceExchange>> Make(accelerator::Accelerator* accelerator,
                                                             const Options& options);
  ~SliceExchange() override;

  // `issue` issues what is agreed (GpuWindow::FollowAgreement). Before, nothing can be offered.
  void Connect(std::function<absl::Status()> issue);

  // Sums begin anew, for this step.
  void Begin(uint64_t step);

  // Whether gradients like this one are exchanged, as a rule.
  bool Serves(const Gradient& gradient) const;
  // Whether this one may be.
  bool MayOffer(const Gradient& gradient) const;
  enum class Outcome : uint8_t {
    kOffered,  // what becomes of it Resolve() says
    kNoRoom,   // beside what is offered, and sums that somebody holds
    kRefused,
  };
  // Offers it, behind what `stream` has been given so far.
  absl::StatusOr<Outcome> Offer(const Gradient& gradient, accelerator::Stream stream);
  // The gradient goes to the daemon whole: the others are not to wait for it.
  void Decline(uint32_t tensor, uint32_t pass);

  // Ends an offer: the slices of the sum, or nothing when it is taken back. With `waits` as long as
  // others may yet offer it, within the patience that is left in this pass.
  absl::StatusOr<std::optional<Summed>> Resolve(uint32_t tensor, bool waits);
  // Whether the offer is issued, or will not be: then Resolve() does not wait.
  bool IsDecided(uint32_t tensor) const;

  // Nothing more is offered in this pass; all offers are resolved.
  void EndPass(uint32_t pass);
  // Why what was issued cannot be relied on. To be asked when the device is done with it, before
  // slices are used.
  absl::Status Health();
  // This rank cannot go on: the others are not to wait for it.
  void Fail(const absl::Status& status);
  // Waits until the device is done with what was issued.
  void Drain();

  uint64_t area_bytes() const { return options_.area_bytes; }
  Counters counters() const;
  uint64_t bytes_max_ever() const;  // the area, and gradients held at once

 private:
  struct Room {
    uint64_t offset = 0, size_bytes = 0;
  };
  enum class Way : uint8_t { kNone, kExchanged, kWhole };
  // What this rank has given of a tensor since its sum began.
  struct History {
    uint64_t generation = 0;
    Way way = Way::kNone;
    std::optional<Room> sum;  // the slices of it
    uint32_t holders = 0;     // of these
    uint64_t last_use = 0;
  };
  struct Offered {
    Gradient gradient;
    uint64_t position = 0;
    RecordedEvent written;
    Room received, sum;
    bool keeps_sum = false;  // `sum` is the history's, and goes on
    std::optional<Summed> summed;
  };
  class Holder;

  SliceExchange(accelerator::Accelerator* accelerator, const Options& options);

  absl::Status Issue(uint32_t item, accelerator::Stream stream) override;
  absl::Status Exchange(Offered& offered, accelerator::Stream stream);
  // Bytes of this rank's slices of all extents.
  uint64_t SlicesBytes(const Gradient& gradient) const;
  uint64_t PositionOf(uint32_t pass) const;
  std::optional<Room> TakeRoom(uint64_t size_bytes, uint32_t but);
  bool DropOldestSum(uint32_t but);
  void DropSum(History& history);
  void LetGo(uint32_t tensor, uint64_t gradient_bytes);
  absl::StatusOr<Outcome> TakeOfferedRoom(const Gradient& gradient, accelerator::Stream stream);
  void EndOffer(uint32_t tensor);
  History& HistoryOf(uint32_t tensor);
  uint32_t ItemOf(uint32_t tensor) const { return options_.first_item + tensor; }

  accelerator::Accelerator* const accelerator_;
  accelerator::SummingDevice* const sums_;  // the same
  const Options options_;
  std::function<absl::Status()> issue_;
  mutable std::mutex mutex_;
  EventPool events_;
  std::byte* area_ = nullptr;
  RangeAllocator free_;
  std::vector<History> histories_;                // by tensor
  std::vector<std::unique_ptr<Offered>> offers_;  // by tensor
  uint64_t held_bytes_ = 0, held_bytes_max_ = 0;  // of gradients
  uint64_t step_ = 0, begins_ = 0, generation_ = 0, uses_ = 0;
  std::chrono::microseconds patience_left_{0};
  RecordedEvent issued_;  // the last
  Counters counters_;
};

}  // namespace offload::zero3

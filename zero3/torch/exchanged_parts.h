// zero3/torch/exchanged_parts.h
//
// Parts of a rank's gradients on their way from its device to the daemon (device_parts.h), where
// devices may reach each other: a gradient is offered to the other ranks (slice_exchange.h) before
// it is copied. What all have offered is added on the devices, and the daemon gets this rank's
// slice of the sum in place of its part; what comes to nothing is copied and told whole. Without an
// exchange everything is.
//
// Who starts a part gets a ticket at once, which stands for the daemon's.
//
// Invariants
//   * The daemon is told of the extents of a tensor in their order, and of everything of a pass
//   before the pass has ended.
//   * Of an exchange that cannot be relied on the daemon hears nothing.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "client/session.h"
#include "kernels/dtype.h"
#include "kernels/sum.h"
#include "zero3/gpu/slice_exchange.h"
#include "zero3/torch/device_parts.h"

namespace offload::zero3 {

class ExchangedParts {
 public:
  // Tells the daemon of elements of a tensor whose bytes are in the region; its ticket.
  using Tell = std::function<client::Ticket(uint64_t element_offset, uint64_t element_count)>;
  struct Part {
    uint32_t tensor = 0;
    uint32_t pass = 0;
    kernels::SumStart start = kernels::SumStart::kNothing;
    uint64_t element_offset = 0, element_count = 0;  // an extent
    std::byte* host = nullptr;                       // room for them in the region
    Tell tell;
  };
  struct Tensor {
    kernels::Dtype dtype = kernels::Dtype::kFloat32;
    uint64_t element_count = 0;
    bool takes_slices = true;  // the daemon does, of its sum: where that is in the slab
  };
  // In place of the daemon's ticket of a part that it is never told of; Flush() says why.
  static constexpr client::Ticket kNeverTold = ~client::Ticket{0};

  // Both outlive this; `exchange` may be null. `tensors`: by id.
  ExchangedParts(DeviceParts* parts, SliceExchange* exchange, std::vector<Tensor> tensors);

  // Sums begin anew, for this step.
  void Begin(uint64_t step);

  // Of a gradient whose parts are started, all and in order, until Forget(): device memory, which
  // `owner` keeps as it is.
  void Give(uint32_t tensor, const std::byte* bytes, std::shared_ptr<const void> owner);
  void Forget(uint32_t tensor);
  // Starts bringing a part to the daemon, behind `stream`. Waits only where more would be on its
  // way than fits.
  client::Ticket Start(Part part, accelerator::Stream stream);

  static bool IsOwn(client::Ticket ticket) { return (ticket & kMask) == kOwn; }
  // The daemon's ticket of the part; once for each. Waits for its bytes.
  absl::StatusOr<client::Ticket> TicketOf(client::Ticket ticket);
  // Waits until the daemon has been told of all of the pass.
  absl::Status EndPass(uint32_t pass);
  // Waits until it has been told of everything.
  absl::Status Flush();

  uint64_t bytes_max_ever() const;  // of device memory, at once
  GradientReturn::Counters counters() const { return parts_->counters(); }

 private:
  static constexpr client::Ticket kOwn = client::Ticket{1} << 62;
  static constexpr client::Ticket kMask = client::Ticket{3} << 62;

  struct Given {
    const std::byte* bytes = nullptr;
    std::shared_ptr<const void> owner;
  };
  struct Piece {
    client::Ticket ticket = 0;
    Part part;
  };
  // Of a tensor, whose parts are told together.
  struct Whole {
    uint32_t tensor = 0;
    uint32_t pass = 0;
    kernels::SumStart start = kernels::SumStart::kNothing;
    Given given;
    accelerator::Stream stream;
    bool is_offered = false;    // or may yet be
    std::vector<Piece> pieces;  // that are not being copied
  };

  SliceExchange::Gradient GradientOf(const Whole& whole) const;
  void OfferOrCopy();
  void CopyCollected();
  void Copy(Whole& whole, bool is_declined);
  void CopySlices(const Whole& whole, const SliceExchange::Summed& summed);
  client::Ticket CopyOne(uint32_t tensor, const Given& given, uint64_t offset_bytes,
                         uint64_t size_bytes, std::byte* host, accelerator::Stream stream,
                         DeviceParts::Tell tell);
  void Resolve(size_t index, bool waits);
  void ResolveDecided();
  void Fail(const absl::Status& status);
  absl::Status failed() const;

  DeviceParts* const parts_;
  SliceExchange* const exchange_;
  const std::vector<Tensor> tensors_;
  std::mutex start_mutex_;  // who has it starts copies; before mutex_
  std::map<uint32_t, Given> given_;
  std::optional<Whole> collected_;                   // whose parts are being started
  std::deque<Whole> offered_;                        // oldest first
  std::map<client::Ticket, client::Ticket> copied_;  // ours, and that of `parts_`
  client::Ticket next_ticket_ = kOwn;
  mutable std::mutex mutex_;
  absl::Status failed_;
};

}  // namespace offload::zero3

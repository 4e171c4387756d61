// zero3/torch/device_parts.h
//
// Parts of a rank's gradients on their way from its device into the ring of its region, when
// several ranks train: the daemon is told of a part when its bytes are there. Copies wait, on the
// device, for the stream that wrote the gradient, and are counted in buckets (gradient_return.h).
//
// Who starts a part gets a ticket at once, which stands for the daemon's: TicketOf() waits until
// that is there.
//
// Invariants
//   * The daemon is told of parts in the order in which they were started, each once, and of none
//   after a failure of the device.
//   * Parts on their way never exceed the plan's share of gpu_ram, beside gradients whose parts are
//   being started.
//
// Thread safety: all methods may be called from any thread; Start() by one at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "client/session.h"
#include "zero3/gpu/gradient_return.h"

namespace offload::zero3 {

class DeviceParts {
 public:
  // Tells the daemon of a part, and returns its ticket.
  using Tell = std::function<client::Ticket()>;

  // `bytes_max`: of gpu_ram, for gradients; `ring_bytes`: of the region that parts go to. The
  // accelerator outlives this.
  static absl::StatusOr<std::unique_ptr<DeviceParts>> Make(accelerator::Accelerator* accelerator,
                                                           uint64_t bytes_max, uint64_t ring_bytes);

  // Of a gradient whose parts are started until Forget(): device memory, which `owner` keeps while
  // parts of it are on their way.
  void Give(uint32_t tensor, const std::byte* bytes, std::shared_ptr<const void> owner);
  void Forget(uint32_t tensor);
  // Starts copying [offset_bytes, offset_bytes + size_bytes) of that to `host`, in the region,
  // behind `stream`. A failure is returned by TicketOf() and Flush(). Waits on the host only when
  // more would be on its way than fits.
  client::Ticket Start(uint32_t tensor, uint64_t offset_bytes, uint64_t size_bytes, std::byte* host,
                       accelerator::Stream stream, Tell tell);

  // Whether a ticket is one of Start().
  static bool IsOwn(client::Ticket ticket) { return (ticket & kOwn) != 0; }
  // The daemon's ticket of the part; once for each. Waits for its copy.
  absl::StatusOr<client::Ticket> TicketOf(client::Ticket ticket);
  // Waits until the daemon has been told of all.
  absl::Status Flush();

  uint64_t bytes_max_ever() const;  // on their way, at once
  GradientReturn::Counters counters() const { return return_->counters(); }

 private:
  static constexpr client::Ticket kOwn = client::Ticket{1} << 63;

  struct Given {
    const std::byte* bytes;
    std::shared_ptr<const void> owner;
  };
  struct Part {
    client::Ticket ticket;
    std::byte* host;
    uint64_t size_bytes;
    Tell tell;
  };

  explicit DeviceParts(accelerator::Accelerator* accelerator) : accelerator_(accelerator) {}
  void Arrived();
  std::optional<client::Ticket> TakeTold(client::Ticket ticket);

  accelerator::Accelerator* const accelerator_;
  std::atomic<uint64_t> on_their_way_bytes_{0}, bytes_max_{0};
  std::mutex mutex_;
  std::map<uint32_t, Given> given_;
  std::deque<Part> parts_;                         // on their way
  std::map<client::Ticket, client::Ticket> told_;  // ours, and the daemon's
  client::Ticket next_ticket_ = kOwn;
  std::unique_ptr<GradientReturn> return_;  // calls Arrived()
};

}  // namespace offload::zero3

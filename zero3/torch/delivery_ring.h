// zero3/torch/delivery_ring.h
//
// The part of a rank's region through which its gradients go to the daemon: room is taken for a
// part, the part is delivered, and when the daemon has added it the room is free again. Pieces that
// a gradient keeps for itself (what the trainer has written into it) come from the same memory.
//
// Invariants
//   * Never more than kDeliveriesMax deliveries are in flight: the session's rings keep room for
//   the weights that a backward needs while it waits for slower ranks.
//   * Every ticket that came in is waited for exactly once.
//
// Thread safety: all methods may be called from any thread. Waiting holds no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/session.h"

namespace offload::zero3 {

class DeliveryRing {
 public:
  static constexpr size_t kDeliveriesMax = 512;

  using Wait = std::function<absl::Status(client::Ticket)>;
  // [offset, offset + size_bytes) of the region.
  DeliveryRing(uint64_t offset, uint64_t size_bytes, Wait wait);

  // Room for `size_bytes`: its region offset. Waits for the oldest delivery while there is none.
  // OFD-1303 when it does not fit beside what is kept; otherwise what failed a delivery.
  absl::StatusOr<uint64_t> Take(uint64_t size_bytes);
  // The room at `offset` is free when the ticket is done. Also takes tickets without room
  // (size 0), to have them waited for.
  void Deliver(uint64_t offset, uint64_t size_bytes, client::Ticket ticket);
  // Frees room that was not delivered.
  void Return(uint64_t offset, uint64_t size_bytes);
  // Waits for all deliveries; the first failure.
  absl::Status WaitForAll();

 private:
  struct Delivery {
    uint64_t offset, size_bytes;
    client::Ticket ticket;
  };

  void Free(uint64_t offset, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for the oldest delivery, or for one that another thread waits for already. False when
  // there is none.
  bool WaitForOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Wait wait_;
  absl::Mutex mutex_;
  absl::CondVar freed_;
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset → bytes, no two adjacent
  std::deque<Delivery> deliveries_ ABSL_GUARDED_BY(mutex_);
  size_t being_waited_for_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);  // of the first delivery that failed
};

}  // namespace offload::zero3

// proto/doorbell.h
//
// Wakes the other side of a session: one end of a socket pair, one byte per ring.
//
// A socket and not an eventfd, because an eventfd that was passed on is one open file: its other
// owner could fill it, make it blocking, and so stop our thread in write(). Here every side has a
// file of its own, MSG_DONTWAIT is an argument of each call, and no signal is raised when the other
// side is gone.
//
// Who sleeps says so in shared memory first (SleepFlag), so nobody rings in vain.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace offload::proto {

class Doorbell {
 public:
  // Makes both ends; the second is for the peer.
  static absl::StatusOr<std::pair<Doorbell, Doorbell>> CreatePair();

  Doorbell() = default;
  explicit Doorbell(UniqueFd fd) : fd_(std::move(fd)) {}

  // Readable when the other side rang since the last Drain(), and for ever when it is gone.
  int fd() const { return fd_.get(); }

  // Never blocks. A bell that is full of rings is loud enough; a bell without another side is not
  // heard.
  void Ring() const;

  // Takes the rings away. Never blocks. False when the other side is gone.
  bool Drain() const;

 private:
  UniqueFd fd_;
};

// A side's word `daemon_sleeping` or `rank_sleeping`. The sleeper: Announce(), look at the ring
// once more, sleep on the doorbell, Awake(). The other: publish, then MustWake() ? Ring(). The two
// fences order (flag, cursor) against (cursor, flag), so that at least one of the two sees the
// other.
class SleepFlag {
 public:
  explicit SleepFlag(std::atomic<uint32_t>* word) : word_(word) {}

  void Announce() const {
    word_->store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void Awake() const { word_->store(0, std::memory_order_relaxed); }
  // True at most once per Announce().
  bool MustWake() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return word_->load(std::memory_order_relaxed) != 0 &&
           word_->exchange(0, std::memory_order_seq_cst) != 0;
  }

 private:
  std::atomic<uint32_t>* word_;
};

}  // namespace offload::proto

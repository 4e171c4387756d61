// aio/uring_ring.h
//
// An io_uring ring that can do nothing but transfer and flush one file. Internal to aio/.
//
// It is made disabled, given its file, its event descriptor and an empty table of buffers, then
// restricted, then enabled: from there on the kernel refuses every other operation, every other
// file, and every other registration with EACCES, whatever somebody writes into the ring.
//
// What the kernel lacks is left out: COOP_TASKRUN (before 5.19), the table of buffers (before
// 5.19). A ring that cannot be restricted is not used at all.
//
// Without CAP_IPC_LOCK a ring and the buffers that it registers count against the user's limit of
// locked memory (RLIMIT_MEMLOCK), over all processes of that user, and the kernel gives the pages
// of a closed ring back some milliseconds after the close. ENOMEM for what would fit beside the
// buffers that this process has registered is therefore waited out, by Init for kWaitSeconds, for
// buffers, without which transfers are only a little slower, for kBufferWaitSeconds over a ring's
// life; after that the memory counts as in use: Init fails with it, at once for further rings of
// the process, and buffers stay unregistered.
//
// Thread safety: one thread at a time.
#pragma once

#include <liburing.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace offload::aio {

class UringRing {
 public:
  // Of pinned bytes: the kernel's own record of them takes 16 bytes per page, outside of all
  // budgets.
  static constexpr uint64_t kRegisteredBytesMax = uint64_t{4} << 30;
  static constexpr uint64_t kBufferBytesMax = uint64_t{1} << 30;  // the kernel's limit
  static constexpr uint32_t kBufferSlots = 16;
  static constexpr double kWaitSeconds = 2, kBufferWaitSeconds = 0.1;

  UringRing() = default;
  ~UringRing();
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  // Fails with the text of the call that was refused: "io_uring_setup: EPERM (...)".
  absl::Status Init(int fd, int event_fd, uint32_t queue_depth);

  // Pins the bytes and remembers them. Where that is not possible, nothing happens.
  void RegisterBuffer(std::span<std::byte> bytes);

  // The slot of the registered buffer that holds all of the bytes.
  std::optional<uint16_t> SlotOf(const void* data, size_t size_bytes) const;
  uint64_t registered_bytes() const { return registered_bytes_; }

  io_uring* get() { return &ring_; }

 private:
  int Setup(uint32_t queue_depth, unsigned flags);
  bool WaitForLockable(size_t size_bytes, double seconds_max);
  absl::Status Restrict();
  bool RegisterSlot(std::span<std::byte> bytes);

  io_uring ring_{};
  bool exists_ = false;
  uint32_t slot_count_ = 0;
  std::vector<std::span<std::byte>> buffers_;  // by slot
  uint64_t registered_bytes_ = 0;
  double seconds_waited_ = 0;
};

}  // namespace offload::aio

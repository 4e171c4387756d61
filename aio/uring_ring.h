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

  UringRing() = default;
  ~UringRing();
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  // Fails with the text of the call that was refused: "io_uring_setup: EPERM (...)".
  absl::Status Init(int fd, int event_fd, uint32_t queue_depth);

  // Pins the bytes and remembers them. Where that is not possible, nothing happens. Waits, at most
  // kRegisterSeconds over the ring's life, for pages that are still being unpinned elsewhere.
  void RegisterBuffer(std::span<std::byte> bytes);
  static constexpr double kRegisterSeconds = 2;

  // The slot of the registered buffer that holds all of the bytes.
  std::optional<uint16_t> SlotOf(const void* data, size_t size_bytes) const;
  uint64_t registered_bytes() const { return registered_bytes_; }

  io_uring* get() { return &ring_; }

 private:
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

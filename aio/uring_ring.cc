#include "aio/uring_ring.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "aio/errno_status.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

constexpr double kPauseSeconds = 0.005;

// Some ring has waited in vain: the memory is not late but in use, and the next rings of this
// process need not find that out again. Until one of them could be made.
std::atomic<bool> memory_is_in_use{false};

// Buffers of this process's rings.
std::atomic<uint64_t> bytes_registered{0};

// False when waiting for others to unpin their pages cannot help.
bool FitsMemlock(size_t size_bytes) {
  rlimit limit = {};
  return ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
         size_bytes + bytes_registered <= limit.rlim_cur;
}

}  // namespace

absl::Status UringRing::Init(int fd, int event_fd, uint32_t queue_depth) {
  int rc = Setup(queue_depth, IORING_SETUP_R_DISABLED | IORING_SETUP_COOP_TASKRUN);
  if (rc == -EINVAL) rc = Setup(queue_depth, IORING_SETUP_R_DISABLED);
  OFFLOAD_RETURN_IF_ERROR(CallStatus("io_uring_setup", rc));
  exists_ = true;
  OFFLOAD_RETURN_IF_ERROR(
      CallStatus("io_uring_register(FILES)", io_uring_register_files(&ring_, &fd, 1)));
  OFFLOAD_RETURN_IF_ERROR(
      CallStatus("io_uring_register(EVENTFD)", io_uring_register_eventfd(&ring_, event_fd)));
  if (io_uring_register_buffers_sparse(&ring_, kBufferSlots) == 0) slot_count_ = kBufferSlots;
  return Restrict();
}

// The ring's own pages count against the limit of locked memory.
int UringRing::Setup(uint32_t queue_depth, unsigned flags) {
  const size_t size_bytes_min = queue_depth * sizeof(io_uring_sqe);
  int rc = 0;
  while ((rc = io_uring_queue_init(queue_depth, &ring_, flags)) == -ENOMEM) {
    if (memory_is_in_use || !WaitForLockable(size_bytes_min, kWaitSeconds)) break;
  }
  if (rc != -ENOMEM) memory_is_in_use = false;
  if (rc == -ENOMEM && seconds_waited_ >= kWaitSeconds) memory_is_in_use = true;
  return rc;
}

// Pages that another ring of this user gave back count until the kernel has got round to them.
// False when to wait is hopeless, or has been done for long enough.
bool UringRing::WaitForLockable(size_t size_bytes, double seconds_max) {
  if (seconds_waited_ >= seconds_max || !FitsMemlock(size_bytes)) return false;
  ::usleep(static_cast<useconds_t>(kPauseSeconds * 1e6));
  seconds_waited_ += kPauseSeconds;
  return true;
}

absl::Status UringRing::Restrict() {
  std::vector<io_uring_restriction> allowed;
  for (const uint8_t operation :
       {IORING_OP_READ, IORING_OP_READV, IORING_OP_READ_FIXED, IORING_OP_WRITE, IORING_OP_WRITEV,
        IORING_OP_WRITE_FIXED, IORING_OP_FSYNC}) {
    allowed.emplace_back().opcode = IORING_RESTRICTION_SQE_OP;
    allowed.back().sqe_op = operation;
  }
  allowed.emplace_back().opcode = IORING_RESTRICTION_SQE_FLAGS_REQUIRED;
  allowed.back().sqe_flags = IOSQE_FIXED_FILE;
  for (const uint8_t operation : {IORING_REGISTER_BUFFERS_UPDATE, IORING_UNREGISTER_FILES}) {
    allowed.emplace_back().opcode = IORING_RESTRICTION_REGISTER_OP;
    allowed.back().register_op = operation;
  }
  const int rc =
      io_uring_register_restrictions(&ring_, allowed.data(), static_cast<unsigned>(allowed.size()));
  OFFLOAD_RETURN_IF_ERROR(CallStatus("io_uring_register(RESTRICTIONS)", rc));
  return CallStatus("io_uring_register(ENABLE_RINGS)", io_uring_enable_rings(&ring_));
}

// The file is unregistered now; the ring itself is torn down later, and a lock on the file would
// linger.
UringRing::~UringRing() {
  if (!exists_) return;
  io_uring_unregister_files(&ring_);
  io_uring_queue_exit(&ring_);
  bytes_registered -= registered_bytes_;
}

void UringRing::RegisterBuffer(std::span<std::byte> bytes) {
  while (!bytes.empty() && buffers_.size() < slot_count_ &&
         registered_bytes_ < kRegisteredBytesMax) {
    const size_t size_bytes = std::min(
        {uint64_t{bytes.size()}, kBufferBytesMax, kRegisteredBytesMax - registered_bytes_});
    if (!RegisterSlot(bytes.first(size_bytes))) return;
    bytes = bytes.subspan(size_bytes);
  }
}

// ENOMEM is the limit of locked memory.
bool UringRing::RegisterSlot(std::span<std::byte> bytes) {
  const iovec piece = {bytes.data(), bytes.size()};
  const __u64 tag = 0;
  const auto slot = static_cast<unsigned>(buffers_.size());
  int rc = 0;
  while ((rc = io_uring_register_buffers_update_tag(&ring_, slot, &piece, &tag, 1)) < 0) {
    if (rc != -EINTR && !(rc == -ENOMEM && WaitForLockable(bytes.size(), kBufferWaitSeconds)))
      return false;
  }
  buffers_.push_back(bytes);
  registered_bytes_ += bytes.size();
  bytes_registered += bytes.size();
  return true;
}

std::optional<uint16_t> UringRing::SlotOf(const void* data, size_t size_bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  for (size_t slot = 0; slot < buffers_.size(); ++slot) {
    const std::span<std::byte> buffer = buffers_[slot];
    if (begin >= buffer.data() && size_bytes <= buffer.size() &&
        static_cast<size_t>(begin - buffer.data()) <= buffer.size() - size_bytes) {
      return static_cast<uint16_t>(slot);
    }
  }
  return std::nullopt;
}

}  // namespace offload::aio

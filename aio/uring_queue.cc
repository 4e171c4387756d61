// The io_uring engine: one restricted ring (uring_ring.h), one fixed file, no polling. Completions
// wake the registered eventfd.

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "aio/device.h"
#include "aio/kernel_queue.h"
#include "aio/uring_ring.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

constexpr size_t kCallBytesMax = size_t{1} << 30;  // one call's length is an unsigned int
constexpr unsigned kFixedFileIndex = 0;

class UringQueue final : public KernelQueue {
 public:
  absl::Status Init(int fd, int event_fd, uint32_t queue_depth) {
    return ring_.Init(fd, event_fd, queue_depth);
  }
  int Submit(std::span<Transfer* const> transfers) override;
  // What the kernel has against a single transfer is that transfer's result.
  bool errors_break() const override { return true; }
  size_t Reap(std::span<Completion> completions) override;
  void Wait() override;
  std::string_view engine() const override { return EngineName(Engine::kUring); }
  void RegisterBuffer(std::span<std::byte> bytes) override { ring_.RegisterBuffer(bytes); }
  uint64_t registered_bytes() const override { return ring_.registered_bytes(); }

 private:
  void Prepare(io_uring_sqe* sqe, Transfer* transfer);
  void PrepareOnePiece(io_uring_sqe* sqe, const Transfer& transfer);

  UringRing ring_;
};

// What the kernel did not take last time still stands in the ring.
int UringQueue::Submit(std::span<Transfer* const> transfers) {
  for (Transfer* const transfer : transfers.subspan(io_uring_sq_ready(ring_.get()))) {
    io_uring_sqe* const sqe = io_uring_get_sqe(ring_.get());
    if (sqe == nullptr) break;
    Prepare(sqe, transfer);
  }
  return io_uring_submit(ring_.get());
}

void UringQueue::Prepare(io_uring_sqe* sqe, Transfer* transfer) {
  const std::span<const iovec> pieces = transfer->pieces();
  const auto count = static_cast<unsigned>(pieces.size());
  const uint64_t offset = transfer->offset_bytes();
  if (transfer->kind() == Device::Kind::kFlush) {
    io_uring_prep_fsync(sqe, kFixedFileIndex, IORING_FSYNC_DATASYNC);
  } else if (count == 1) {
    PrepareOnePiece(sqe, *transfer);
  } else if (transfer->kind() == Device::Kind::kRead) {
    io_uring_prep_readv(sqe, kFixedFileIndex, pieces.data(), count, offset);
  } else {
    io_uring_prep_writev(sqe, kFixedFileIndex, pieces.data(), count, offset);
  }
  io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(sqe, transfer);
}

void UringQueue::PrepareOnePiece(io_uring_sqe* sqe, const Transfer& transfer) {
  void* const data = transfer.pieces()[0].iov_base;
  const size_t size_bytes = std::min(transfer.pieces()[0].iov_len, kCallBytesMax);
  const auto length = static_cast<unsigned>(size_bytes);
  const uint64_t offset = transfer.offset_bytes();
  const bool reads = transfer.kind() == Device::Kind::kRead;
  if (const std::optional<uint16_t> slot = ring_.SlotOf(data, size_bytes)) {
    reads ? io_uring_prep_read_fixed(sqe, kFixedFileIndex, data, length, offset, *slot)
          : io_uring_prep_write_fixed(sqe, kFixedFileIndex, data, length, offset, *slot);
  } else {
    reads ? io_uring_prep_read(sqe, kFixedFileIndex, data, length, offset)
          : io_uring_prep_write(sqe, kFixedFileIndex, data, length, offset);
  }
}

size_t UringQueue::Reap(std::span<Completion> completions) {
  size_t count = 0;
  io_uring_cqe* cqe = nullptr;
  while (count < completions.size() && io_uring_peek_cqe(ring_.get(), &cqe) == 0) {
    completions[count++] = {static_cast<Transfer*>(io_uring_cqe_get_data(cqe)), cqe->res};
    io_uring_cqe_seen(ring_.get(), cqe);
  }
  return count;
}

// Nothing but a completion gives a buffer back, so errors of the wait itself are waited out.
void UringQueue::Wait() {
  io_uring_cqe* cqe = nullptr;  // set only on 0
  const int rc = io_uring_wait_cqe(ring_.get(), &cqe);
  if (rc < 0 && rc != -EINTR) ::usleep(1000);
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelQueue>> MakeUringQueue(int fd, int event_fd,
                                                            uint32_t queue_depth) {
  auto queue = std::make_unique<UringQueue>();
  OFFLOAD_RETURN_IF_ERROR(queue->Init(fd, event_fd, queue_depth));
  return queue;
}

}  // namespace offload::aio

// The libaio engine: the kernel's older asynchronous interface, which containers allow where they
// refuse io_uring. Completions make the eventfd readable (IOCB_FLAG_RESFD).
//
// Flushes are IOCB_CMD_FDSYNC. Where the kernel or the file system refuses that (before 4.18, some
// network and user-space file systems), a thread calls fdatasync instead, from the first refusal
// on.

#include <libaio.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <vector>

#include "aio/device.h"
#include "aio/errno_status.h"
#include "aio/kernel_queue.h"
#include "base/status_macros.h"
#include "base/worker_pool.h"

namespace offload::aio {
namespace {

constexpr size_t kTransfersPerCall = 64;

bool IsFlush(const Transfer& transfer) { return transfer.kind() == Device::Kind::kFlush; }

class LibaioQueue final : public KernelQueue {
 public:
  LibaioQueue(int fd, int event_fd) : fd_(fd), event_fd_(event_fd) {}
  // io_destroy returns when the kernel has let go of the file too, so that no lock lingers.
  ~LibaioQueue() override {
    pool_.reset();
    if (context_ != nullptr) ::io_destroy(context_);
  }

  absl::Status Init(uint32_t queue_depth);
  int Submit(std::span<Transfer* const> transfers) override;
  bool errors_break() const override { return false; }  // io_submit's are of its first entry
  size_t Reap(std::span<Completion> completions) override;
  void Wait() override;
  std::string_view engine() const override { return EngineName(Engine::kLibaio); }

 private:
  void Prepare(Transfer* transfer, iocb* control) const;
  int FlushOnThread(Transfer* transfer);
  size_t TakeFlushed(std::span<Completion> completions);

  const int fd_, event_fd_;
  io_context_t context_ = nullptr;
  bool kernel_flushes_ = true;  // until it refuses one
  size_t on_thread_ = 0;        // flushes that the thread has or has done
  std::mutex mutex_;
  std::vector<Completion> flushed_;   // guarded by mutex_
  std::unique_ptr<WorkerPool> pool_;  // last: its thread uses the members above
};

absl::Status LibaioQueue::Init(uint32_t queue_depth) {
  return CallStatus("io_setup", ::io_setup(static_cast<int>(queue_depth), &context_));
}

// One call for as many as fit; those behind a flush that is the thread's are for the next call.
int LibaioQueue::Submit(std::span<Transfer* const> transfers) {
  if (IsFlush(*transfers[0]) && !kernel_flushes_) return FlushOnThread(transfers[0]);
  std::array<iocb, kTransfersPerCall> controls;  // the kernel copies what it takes
  std::array<iocb*, kTransfersPerCall> pointers;
  size_t count = 0;
  for (Transfer* const transfer : transfers.first(std::min(transfers.size(), controls.size()))) {
    if (IsFlush(*transfer) && !kernel_flushes_) break;
    Prepare(transfer, &controls[count]);
    pointers[count] = &controls[count];
    ++count;
  }
  const int rc = ::io_submit(context_, static_cast<long>(count), pointers.data());
  if (IsFlush(*transfers[0]) && (rc == -EINVAL || rc == -EOPNOTSUPP || rc == -ENOSYS)) {
    kernel_flushes_ = false;
    return FlushOnThread(transfers[0]);
  }
  return rc;
}

void LibaioQueue::Prepare(Transfer* transfer, iocb* control) const {
  const std::span<const iovec> pieces = transfer->pieces();
  const auto offset = static_cast<long long>(transfer->offset_bytes());
  const auto count = static_cast<int>(pieces.size());
  if (IsFlush(*transfer)) {
    io_prep_fdsync(control, fd_);
  } else if (transfer->kind() == Device::Kind::kRead) {
    count == 1 ? io_prep_pread(control, fd_, pieces[0].iov_base, pieces[0].iov_len, offset)
               : io_prep_preadv(control, fd_, pieces.data(), count, offset);
  } else {
    count == 1 ? io_prep_pwrite(control, fd_, pieces[0].iov_base, pieces[0].iov_len, offset)
               : io_prep_pwritev(control, fd_, pieces.data(), count, offset);
  }
  io_set_eventfd(control, event_fd_);
  control->data = transfer;
}

// Returns as Submit().
int LibaioQueue::FlushOnThread(Transfer* transfer) {
  if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(1, "offload-flush");
  ++on_thread_;
  pool_->Post([this, transfer] {
    const int64_t result = ::fdatasync(fd_) == 0 ? 0 : -errno;
    std::lock_guard lock(mutex_);
    flushed_.push_back({transfer, result});
    ::eventfd_write(event_fd_, 1);  // fails only where it is readable anyway
  });
  return 1;
}

size_t LibaioQueue::Reap(std::span<Completion> completions) {
  const size_t flushed_count = TakeFlushed(completions);
  completions = completions.subspan(flushed_count);
  std::array<io_event, kTransfersPerCall> events;
  timespec no_time = {0, 0};
  const size_t wanted = std::min(events.size(), completions.size());
  if (wanted == 0) return flushed_count;
  const int count = ::io_getevents(context_, 0, static_cast<long>(wanted), events.data(), &no_time);
  for (int i = 0; i < count; ++i) {
    completions[i] = {static_cast<Transfer*>(events[i].data), static_cast<int64_t>(events[i].res)};
  }
  return flushed_count + static_cast<size_t>(std::max(count, 0));
}

size_t LibaioQueue::TakeFlushed(std::span<Completion> completions) {
  if (on_thread_ == 0) return 0;
  std::lock_guard lock(mutex_);
  const size_t count = std::min(flushed_.size(), completions.size());
  std::copy_n(flushed_.begin(), count, completions.begin());
  flushed_.erase(flushed_.begin(), flushed_.begin() + static_cast<ptrdiff_t>(count));
  on_thread_ -= count;
  return count;
}

// Both the kernel and the thread make the event readable; the device cleared it, then reaped.
void LibaioQueue::Wait() {
  pollfd event = {event_fd_, POLLIN, 0};
  eventfd_t count = 0;
  if (::poll(&event, 1, -1) > 0) ::eventfd_read(event_fd_, &count);
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelQueue>> MakeLibaioQueue(int fd, int event_fd,
                                                             uint32_t queue_depth) {
  auto queue = std::make_unique<LibaioQueue>(fd, event_fd);
  OFFLOAD_RETURN_IF_ERROR(queue->Init(queue_depth));
  return queue;
}

}  // namespace offload::aio

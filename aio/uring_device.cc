// The io_uring engine: one restricted ring (uring_ring.h), one fixed file, no polling. Completions
// wake the registered eventfd.

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <utility>

#include "aio/errno_status.h"
#include "aio/file_device.h"
#include "aio/submit_loop.h"
#include "aio/transfer.h"
#include "aio/uring_ring.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

constexpr uint32_t kQueueDepthMax = 4096;
constexpr size_t kCallBytesMax = size_t{1} << 30;  // one call's length is an unsigned int
constexpr unsigned kFixedFileIndex = 0;

class UringDevice final : public FileDevice {
 public:
  UringDevice(const Geometry& geometry, const OpenOptions& options)
      : FileDevice(geometry),
        queue_depth_(std::clamp<uint32_t>(options.queue_depth, 1, kQueueDepthMax)) {}
  // A buffer is free only after its completion, hence the drain before the ring goes.
  ~UringDevice() override { Drain(); }

  absl::Status Init(int fd);
  size_t Poll(bool wait) override;
  std::string_view engine() const override { return EngineName(Engine::kUring); }
  void RegisterBuffer(std::span<std::byte> bytes) override { ring_.RegisterBuffer(bytes); }
  uint64_t registered_bytes() const override { return ring_.registered_bytes(); }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  struct Request {
    std::unique_ptr<Op> op;
    Transfer transfer;
    absl::Status outcome;
  };

  void SubmitWaiting();
  void PrepareWaiting();
  void Prepare(io_uring_sqe* sqe, Request* request);
  void PrepareOnePiece(io_uring_sqe* sqe, const Transfer& transfer);
  void Fail(int error_number, uint64_t taken);
  bool Reap();
  void HandleResult(std::unique_ptr<Request> request, int result);
  void WaitForCompletion();
  size_t RunReady();

  const uint32_t queue_depth_;
  UringRing ring_;
  // Requests that the ring has or will get; at most queue_depth_, so the CQ cannot overflow.
  uint32_t in_kernel_ = 0;
  std::deque<Request*> prepared_;                 // stand in the SQ, not yet taken; in order
  std::deque<std::unique_ptr<Request>> waiting_;  // have no place in the ring yet
  std::deque<std::unique_ptr<Request>> ready_;    // have their outcome; the callback has not run
  int failed_errno_ = 0;  // after a fatal submit error nothing is submitted any more
};

absl::Status UringDevice::Init(int fd) {
  OFFLOAD_RETURN_IF_ERROR(MakeEvent());
  return ring_.Init(fd, event_fd_.get(), queue_depth_);
}

void UringDevice::Start(std::unique_ptr<Op> op) {
  Transfer transfer(op->kind, op->offset_bytes, op->pieces, geometry_.offset_alignment);
  waiting_.push_back(std::make_unique<Request>(Request{std::move(op), std::move(transfer), {}}));
}

size_t UringDevice::Poll(bool wait) {
  ClearEvent();  // first: whatever completes from now on signals again
  size_t count = CompleteRefused();
  SubmitWaiting();
  Reap();
  while (wait && count == 0 && ready_.empty() && in_flight_ > 0) {
    SubmitWaiting();  // what Reap() put back, to be continued or repeated
    if (ready_.empty()) WaitForCompletion();
  }
  count += RunReady();
  SubmitWaiting();  // what callbacks started
  if (!ready_.empty()) SignalReady();
  return count;
}

void UringDevice::SubmitWaiting() {
  while (failed_errno_ == 0 && !waiting_.empty() && in_kernel_ < queue_depth_) {
    PrepareWaiting();
    const SubmitResult result =
        SubmitAll([this] { return io_uring_sq_ready(ring_.get()); },
                  [this] { return io_uring_submit(ring_.get()); }, [this] { return Reap(); },
                  [](int stalls) { ::usleep(static_cast<useconds_t>(stalls) * 10); });
    if (result.error != 0) return Fail(result.error, result.submitted);
    prepared_.clear();
  }
  if (failed_errno_ == 0) return;
  for (; !waiting_.empty(); waiting_.pop_front()) {
    std::unique_ptr<Request>& request = waiting_.front();
    request->outcome = IoErrorStatus(failed_errno_, request->op->kind, request->op->offset_bytes,
                                     request->op->size_bytes);
    ready_.push_back(std::move(request));
  }
}

void UringDevice::PrepareWaiting() {
  while (!waiting_.empty() && in_kernel_ < queue_depth_) {
    io_uring_sqe* sqe = io_uring_get_sqe(ring_.get());
    if (sqe == nullptr) return;
    Request* request = waiting_.front().release();  // the kernel's, until its completion
    waiting_.pop_front();
    Prepare(sqe, request);
    prepared_.push_back(request);
    ++in_kernel_;
  }
}

void UringDevice::Prepare(io_uring_sqe* sqe, Request* request) {
  const Transfer& transfer = request->transfer;
  const std::span<const iovec> pieces = transfer.pieces();
  const uint64_t offset = transfer.offset_bytes();
  if (transfer.kind() == Kind::kFlush) {
    io_uring_prep_fsync(sqe, kFixedFileIndex, IORING_FSYNC_DATASYNC);
  } else if (pieces.size() == 1) {
    PrepareOnePiece(sqe, transfer);
  } else if (transfer.kind() == Kind::kRead) {
    io_uring_prep_readv(sqe, kFixedFileIndex, pieces.data(), static_cast<unsigned>(pieces.size()),
                        offset);
  } else {
    io_uring_prep_writev(sqe, kFixedFileIndex, pieces.data(), static_cast<unsigned>(pieces.size()),
                         offset);
  }
  io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(sqe, request);
}

void UringDevice::PrepareOnePiece(io_uring_sqe* sqe, const Transfer& transfer) {
  void* const data = transfer.pieces()[0].iov_base;
  const size_t size_bytes = std::min(transfer.pieces()[0].iov_len, kCallBytesMax);
  const auto length = static_cast<unsigned>(size_bytes);
  const uint64_t offset = transfer.offset_bytes();
  const bool reads = transfer.kind() == Kind::kRead;
  if (const std::optional<uint16_t> slot = ring_.SlotOf(data, size_bytes)) {
    reads ? io_uring_prep_read_fixed(sqe, kFixedFileIndex, data, length, offset, *slot)
          : io_uring_prep_write_fixed(sqe, kFixedFileIndex, data, length, offset, *slot);
  } else {
    reads ? io_uring_prep_read(sqe, kFixedFileIndex, data, length, offset)
          : io_uring_prep_write(sqe, kFixedFileIndex, data, length, offset);
  }
}

// The first `taken` of the prepared requests are the kernel's and will complete; the others never
// were, and nothing will hand them over any more.
void UringDevice::Fail(int error_number, uint64_t taken) {
  failed_errno_ = error_number;
  OFFLOAD_CHECK(taken <= prepared_.size()) << taken << " of " << prepared_.size();
  for (size_t i = taken; i < prepared_.size(); ++i) {
    waiting_.push_back(std::unique_ptr<Request>(prepared_[i]));
    --in_kernel_;
  }
  prepared_.clear();
  SubmitWaiting();
}

// Takes completions out of the ring. Runs no callback, so that it may be called between two
// attempts to submit.
bool UringDevice::Reap() {
  bool any = false;
  io_uring_cqe* cqe = nullptr;
  while (io_uring_peek_cqe(ring_.get(), &cqe) == 0) {
    std::unique_ptr<Request> request(static_cast<Request*>(io_uring_cqe_get_data(cqe)));
    const int result = cqe->res;
    io_uring_cqe_seen(ring_.get(), cqe);
    --in_kernel_;
    HandleResult(std::move(request), result);
    any = true;
  }
  return any;
}

void UringDevice::HandleResult(std::unique_ptr<Request> request, int result) {
  if (std::optional<absl::Status> outcome = Advance(request->transfer, result)) {
    request->outcome = *std::move(outcome);
    ready_.push_back(std::move(request));
    return;
  }
  waiting_.push_front(std::move(request));
}

// Nothing but a completion gives a buffer back, so errors of the wait itself are waited out.
void UringDevice::WaitForCompletion() {
  OFFLOAD_CHECK(in_kernel_ > 0) << in_flight_ << " in flight, " << waiting_.size() << " waiting";
  io_uring_cqe* cqe = nullptr;  // set only on 0
  const int rc = io_uring_wait_cqe(ring_.get(), &cqe);
  if (rc < 0 && rc != -EINTR) ::usleep(1000);
  Reap();
}

size_t UringDevice::RunReady() {
  std::deque<std::unique_ptr<Request>> ready = std::exchange(ready_, {});
  for (std::unique_ptr<Request>& request : ready) {
    Complete(std::move(request->op), std::move(request->outcome));
  }
  return ready.size();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileDevice>> MakeUringDevice(int fd, const Geometry& geometry,
                                                            const OpenOptions& options) {
  auto device = std::make_unique<UringDevice>(geometry, options);
  OFFLOAD_RETURN_IF_ERROR(device->Init(fd));
  return device;
}

}  // namespace offload::aio

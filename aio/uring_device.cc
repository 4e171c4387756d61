// The io_uring engine: one ring, one fixed file, no polling.
//
// Completions wake the registered eventfd. COOP_TASKRUN is used where the kernel has it;
// SINGLE_ISSUER and DEFER_TASKRUN are not, because they tie the ring to the thread that made it,
// and a device may be opened, used and closed on three threads one after the other (DESIGN.md).

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/errno_status.h"
#include "aio/file_device.h"
#include "aio/submit_loop.h"
#include "aio/transfer.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

constexpr uint32_t kQueueDepthMax = 4096;
constexpr size_t kCallBytesMax = size_t{1} << 30;  // one call's length is an unsigned int
constexpr unsigned kFixedFileIndex = 0;

absl::Status RefusalOf(const char* call, int rc) {
  return absl::FailedPreconditionError(absl::StrCat(call, ": ", ErrnoText(-rc)));
}

class UringDevice final : public FileDevice {
 public:
  UringDevice(const Geometry& geometry, const OpenOptions& options)
      : FileDevice(geometry),
        queue_depth_(std::clamp<uint32_t>(options.queue_depth, 1, kQueueDepthMax)) {}
  ~UringDevice() override;

  absl::Status Init(int fd);
  size_t Poll(bool wait) override;
  std::string_view engine() const override { return "uring"; }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  struct Request {
    std::unique_ptr<Op> op;
    Transfer transfer;
    absl::Status outcome;
  };

  absl::Status Restrict();
  void SubmitWaiting();
  void PrepareWaiting();
  void Prepare(io_uring_sqe* sqe, Request* request);
  void Fail(int error_number, uint64_t taken);
  bool Reap();
  void HandleResult(std::unique_ptr<Request> request, int result);
  void WaitForCompletion();
  size_t RunReady();

  const uint32_t queue_depth_;
  io_uring ring_{};
  bool ring_exists_ = false;
  uint32_t in_kernel_ =
      0;  // requests that the ring has or will get; at most queue_depth_, so the CQ cannot overflow
  std::deque<Request*> prepared_;                 // stand in the SQ, not yet taken; in order
  std::deque<std::unique_ptr<Request>> waiting_;  // have no place in the ring yet
  std::deque<std::unique_ptr<Request>> ready_;    // have their outcome; the callback has not run
  int failed_errno_ = 0;  // after a fatal submit error nothing is submitted any more
};

absl::Status UringDevice::Init(int fd) {
  event_fd_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd_.valid()) return RefusalOf("eventfd", -errno);
  int rc = io_uring_queue_init(queue_depth_, &ring_,
                               IORING_SETUP_R_DISABLED | IORING_SETUP_COOP_TASKRUN);
  if (rc == -EINVAL) rc = io_uring_queue_init(queue_depth_, &ring_, IORING_SETUP_R_DISABLED);
  if (rc < 0) return RefusalOf("io_uring_setup", rc);
  ring_exists_ = true;
  rc = io_uring_register_files(&ring_, &fd, 1);
  if (rc < 0) return RefusalOf("io_uring_register(FILES)", rc);
  rc = io_uring_register_eventfd(&ring_, event_fd_.get());
  if (rc < 0) return RefusalOf("io_uring_register(EVENTFD)", rc);
  return Restrict();
}

// From here on the ring can do nothing but transfers and flushes of the one registered file.
absl::Status UringDevice::Restrict() {
  io_uring_restriction allowed[7] = {};
  const uint8_t operations[] = {IORING_OP_READ, IORING_OP_READV, IORING_OP_WRITE, IORING_OP_WRITEV,
                                IORING_OP_FSYNC};
  size_t count = 0;
  for (const uint8_t operation : operations) {
    allowed[count].opcode = IORING_RESTRICTION_SQE_OP;
    allowed[count++].sqe_op = operation;
  }
  allowed[count].opcode = IORING_RESTRICTION_SQE_FLAGS_REQUIRED;
  allowed[count++].sqe_flags = IOSQE_FIXED_FILE;
  allowed[count].opcode = IORING_RESTRICTION_REGISTER_OP;
  allowed[count++].register_op = IORING_UNREGISTER_FILES;
  int rc = io_uring_register_restrictions(&ring_, allowed, count);
  if (rc < 0) return RefusalOf("io_uring_register(RESTRICTIONS)", rc);
  rc = io_uring_enable_rings(&ring_);
  return rc < 0 ? RefusalOf("io_uring_register(ENABLE_RINGS)", rc) : absl::OkStatus();
}

// A buffer is free only after its completion, hence the drain before the ring goes.
UringDevice::~UringDevice() {
  Drain();
  if (!ring_exists_) return;
  io_uring_unregister_files(
      &ring_);  // now; the ring itself is torn down later, and a lock on the file would linger
  io_uring_queue_exit(&ring_);
}

void UringDevice::Start(std::unique_ptr<Op> op) {
  Transfer transfer(op->kind, op->offset_bytes, std::move(op->pieces), geometry_.offset_alignment);
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
        SubmitAll([this] { return io_uring_sq_ready(&ring_); },
                  [this] { return io_uring_submit(&ring_); }, [this] { return Reap(); },
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
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
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
    const auto length = static_cast<unsigned>(std::min(pieces[0].iov_len, kCallBytesMax));
    if (transfer.kind() == Kind::kRead) {
      io_uring_prep_read(sqe, kFixedFileIndex, pieces[0].iov_base, length, offset);
    } else {
      io_uring_prep_write(sqe, kFixedFileIndex, pieces[0].iov_base, length, offset);
    }
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
  while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
    std::unique_ptr<Request> request(static_cast<Request*>(io_uring_cqe_get_data(cqe)));
    const int result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    --in_kernel_;
    HandleResult(std::move(request), result);
    any = true;
  }
  return any;
}

void UringDevice::HandleResult(std::unique_ptr<Request> request, int result) {
  if (std::optional<absl::Status> outcome = request->transfer.Advance(result)) {
    request->outcome = *std::move(outcome);
    ready_.push_back(std::move(request));
    return;
  }
  counters_.retries.fetch_add(1, std::memory_order_relaxed);
  waiting_.push_front(std::move(request));
}

// Nothing but a completion gives a buffer back, so errors of the wait itself are waited out.
void UringDevice::WaitForCompletion() {
  OFFLOAD_CHECK(in_kernel_ > 0) << in_flight_ << " in flight, " << waiting_.size() << " waiting";
  io_uring_cqe* cqe = nullptr;  // set only on 0
  const int rc = io_uring_wait_cqe(&ring_, &cqe);
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

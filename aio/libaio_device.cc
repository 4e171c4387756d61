// The libaio engine: the kernel's older asynchronous interface, which containers allow where they
// refuse io_uring. Completions make the eventfd readable (IOCB_FLAG_RESFD).
//
// Flushes are IOCB_CMD_FDSYNC. Where the kernel or the file system refuses that (before 4.18, some
// network and user-space file systems), a thread calls fdatasync instead, from the first refusal
// on.

#include <libaio.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "aio/errno_status.h"
#include "aio/file_device.h"
#include "aio/submit_loop.h"
#include "aio/transfer.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/worker_pool.h"

namespace offload::aio {
namespace {

constexpr uint32_t kQueueDepthMax = 4096;
constexpr size_t kEventsPerCall = 64;

class LibaioDevice final : public FileDevice {
 public:
  LibaioDevice(int fd, const Geometry& geometry, const OpenOptions& options)
      : FileDevice(geometry),
        fd_(fd),
        queue_depth_(std::clamp<uint32_t>(options.queue_depth, 1, kQueueDepthMax)) {}
  ~LibaioDevice() override;

  absl::Status Init();
  size_t Poll(bool wait) override;
  std::string_view engine() const override { return EngineName(Engine::kLibaio); }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  struct Request {
    std::unique_ptr<Op> op;
    Transfer transfer;
    absl::Status outcome;
    iocb control;  // the kernel copies it when it takes it
  };

  void SubmitWaiting();
  void PrepareWaiting();
  void Prepare(Request* request);
  int SubmitPrepared();
  void HandleRefusal(int error_number);
  void FlushOnThread(std::unique_ptr<Request> request);
  bool Reap();
  bool TakeFlushed();
  void HandleResult(std::unique_ptr<Request> request, int64_t result);
  void WaitForCompletion();
  size_t RunReady();

  const int fd_;
  const uint32_t queue_depth_;
  io_context_t context_ = nullptr;
  uint32_t in_kernel_ = 0;                        // taken and not yet reaped
  std::deque<Request*> prepared_;                 // to be taken next, in order
  std::deque<std::unique_ptr<Request>> waiting_;  // behind them
  std::deque<std::unique_ptr<Request>> ready_;    // have their outcome; the callback has not run

  bool kernel_flushes_ = true;  // until it refuses one
  size_t on_thread_ = 0;        // flushes that the thread has or has done
  std::mutex mutex_;
  std::vector<std::pair<std::unique_ptr<Request>, int>> flushed_;  // guarded by mutex_
  std::unique_ptr<WorkerPool> pool_;  // last: its thread uses the members above
};

absl::Status LibaioDevice::Init() {
  OFFLOAD_RETURN_IF_ERROR(MakeEvent());
  const int rc = ::io_setup(static_cast<int>(queue_depth_), &context_);
  return rc < 0 ? RefusalOf("io_setup", -rc) : absl::OkStatus();
}

// io_destroy returns when the kernel has let go of the file too, so that no lock lingers.
LibaioDevice::~LibaioDevice() {
  Drain();
  pool_.reset();
  if (context_ != nullptr) ::io_destroy(context_);
}

void LibaioDevice::Start(std::unique_ptr<Op> op) {
  Transfer transfer(op->kind, op->offset_bytes, op->pieces, geometry_.offset_alignment);
  waiting_.push_back(
      std::make_unique<Request>(Request{std::move(op), std::move(transfer), {}, {}}));
}

size_t LibaioDevice::Poll(bool wait) {
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

void LibaioDevice::SubmitWaiting() {
  PrepareWaiting();
  while (!prepared_.empty()) {
    const SubmitResult result =
        SubmitAll([this] { return prepared_.size(); }, [this] { return SubmitPrepared(); },
                  [this] { return Reap(); },
                  [](int stalls) { ::usleep(static_cast<useconds_t>(stalls) * 10); });
    if (result.error != 0) HandleRefusal(result.error);
    PrepareWaiting();
  }
}

void LibaioDevice::PrepareWaiting() {
  while (!waiting_.empty() && in_kernel_ + prepared_.size() < queue_depth_) {
    std::unique_ptr<Request> request = std::move(waiting_.front());
    waiting_.pop_front();
    if (request->transfer.kind() == Kind::kFlush && !kernel_flushes_) {
      FlushOnThread(std::move(request));
      continue;
    }
    Prepare(request.get());
    prepared_.push_back(request.release());  // the kernel's, until its completion
  }
}

void LibaioDevice::Prepare(Request* request) {
  const Transfer& transfer = request->transfer;
  const std::span<const iovec> pieces = transfer.pieces();
  const auto offset = static_cast<long long>(transfer.offset_bytes());
  const auto count = static_cast<int>(pieces.size());
  iocb* const control = &request->control;
  if (transfer.kind() == Kind::kFlush) {
    io_prep_fdsync(control, fd_);
  } else if (transfer.kind() == Kind::kRead) {
    count == 1 ? io_prep_pread(control, fd_, pieces[0].iov_base, pieces[0].iov_len, offset)
               : io_prep_preadv(control, fd_, pieces.data(), count, offset);
  } else {
    count == 1 ? io_prep_pwrite(control, fd_, pieces[0].iov_base, pieces[0].iov_len, offset)
               : io_prep_pwritev(control, fd_, pieces.data(), count, offset);
  }
  io_set_eventfd(control, event_fd_.get());
  control->data = request;
}

// One call for as many as fit; returns as io_submit does.
int LibaioDevice::SubmitPrepared() {
  std::array<iocb*, kEventsPerCall> controls;
  const size_t count = std::min(prepared_.size(), controls.size());
  for (size_t i = 0; i < count; ++i) controls[i] = &prepared_[i]->control;
  const int rc = ::io_submit(context_, static_cast<long>(count), controls.data());
  if (rc <= 0) return rc;
  prepared_.erase(prepared_.begin(), prepared_.begin() + rc);
  in_kernel_ += static_cast<uint32_t>(rc);
  return rc;
}

// io_submit fails for the first of its entries, never for those behind it.
void LibaioDevice::HandleRefusal(int error_number) {
  std::unique_ptr<Request> request(prepared_.front());
  prepared_.pop_front();
  const bool flushes = request->transfer.kind() == Kind::kFlush;
  if (flushes && (error_number == EINVAL || error_number == EOPNOTSUPP || error_number == ENOSYS)) {
    kernel_flushes_ = false;
    return FlushOnThread(std::move(request));
  }
  request->outcome = IoErrorStatus(error_number, request->op->kind, request->op->offset_bytes,
                                   request->op->size_bytes);
  ready_.push_back(std::move(request));
}

void LibaioDevice::FlushOnThread(std::unique_ptr<Request> request) {
  if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(1, "offload-flush");
  ++on_thread_;
  pool_->Post([this, raw = request.release()] {
    const int result = ::fdatasync(fd_) == 0 ? 0 : -errno;
    std::lock_guard lock(mutex_);
    flushed_.emplace_back(raw, result);
    SignalReady();
  });
}

// Takes what has completed. Runs no callback, so that it may be called between two attempts to
// submit.
bool LibaioDevice::Reap() {
  bool any = TakeFlushed();
  std::array<io_event, kEventsPerCall> events;
  timespec no_time = {0, 0};
  int count = static_cast<int>(kEventsPerCall);
  while (count == static_cast<int>(kEventsPerCall) && in_kernel_ > 0) {
    count = ::io_getevents(context_, 0, kEventsPerCall, events.data(), &no_time);
    for (int i = 0; i < count; ++i) {
      --in_kernel_;
      any = true;
      HandleResult(std::unique_ptr<Request>(static_cast<Request*>(events[i].data)),
                   static_cast<int64_t>(events[i].res));
    }
  }
  return any;
}

bool LibaioDevice::TakeFlushed() {
  if (on_thread_ == 0) return false;
  std::vector<std::pair<std::unique_ptr<Request>, int>> flushed;
  {
    std::lock_guard lock(mutex_);
    flushed.swap(flushed_);
  }
  on_thread_ -= flushed.size();
  for (auto& [request, result] : flushed) HandleResult(std::move(request), result);
  return !flushed.empty();
}

void LibaioDevice::HandleResult(std::unique_ptr<Request> request, int64_t result) {
  if (std::optional<absl::Status> outcome = Advance(request->transfer, result)) {
    request->outcome = *std::move(outcome);
    ready_.push_back(std::move(request));
    return;
  }
  waiting_.push_front(std::move(request));
}

// Both the kernel and the thread make the event readable; the caller cleared it, then looked.
void LibaioDevice::WaitForCompletion() {
  OFFLOAD_CHECK(in_kernel_ + on_thread_ > 0) << in_flight_ << " in flight, " << waiting_.size();
  pollfd event = {event_fd_.get(), POLLIN, 0};
  if (::poll(&event, 1, -1) > 0) ClearEvent();
  Reap();
}

size_t LibaioDevice::RunReady() {
  std::deque<std::unique_ptr<Request>> ready = std::exchange(ready_, {});
  for (std::unique_ptr<Request>& request : ready) {
    Complete(std::move(request->op), std::move(request->outcome));
  }
  return ready.size();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileDevice>> MakeLibaioDevice(int fd, const Geometry& geometry,
                                                             const OpenOptions& options) {
  auto device = std::make_unique<LibaioDevice>(fd, geometry, options);
  OFFLOAD_RETURN_IF_ERROR(device->Init());
  return device;
}

}  // namespace offload::aio

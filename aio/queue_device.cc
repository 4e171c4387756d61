#include "aio/queue_device.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>

#include "aio/errno_status.h"
#include "aio/submit_loop.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

constexpr size_t kCompletionsPerCall = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<FileDevice>> QueueDevice::Make(MakeKernelQueue& make_queue, int fd,
                                                              const Geometry& geometry,
                                                              const OpenOptions& options) {
  const uint32_t queue_depth = std::clamp<uint32_t>(options.queue_depth, 1, kQueueDepthMax);
  std::unique_ptr<QueueDevice> device(new QueueDevice(geometry, queue_depth));
  OFFLOAD_RETURN_IF_ERROR(device->MakeEvent());
  OFFLOAD_ASSIGN_OR_RETURN(device->queue_, make_queue(fd, device->event_fd(), queue_depth));
  return device;
}

QueueDevice::Request::Request(std::unique_ptr<Op> operation, uint32_t offset_alignment)
    : Transfer(operation->kind, operation->offset_bytes, operation->pieces, offset_alignment),
      op(std::move(operation)) {}

void QueueDevice::Start(std::unique_ptr<Op> op) {
  waiting_.push_back(std::make_unique<Request>(std::move(op), geometry_.offset_alignment));
}

size_t QueueDevice::Poll(bool wait) {
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

void QueueDevice::SubmitWaiting() {
  while (OfferWaiting()) {
    int error_number = broken_errno_;
    if (error_number == 0) {
      error_number = SubmitAll([this] { return offered_.size(); },
                               [this] { return SubmitOffered(); }, [this] { return Reap(); },
                               [](int stalls) { ::usleep(static_cast<useconds_t>(stalls) * 10); })
                         .error;
    }
    if (error_number != 0) RefuseFirst(error_number);
  }
}

// Fills up what is offered; false when that is nothing.
bool QueueDevice::OfferWaiting() {
  while (!waiting_.empty() && taken_ + offered_.size() < queue_depth_) {
    offered_.push_back(waiting_.front().release());
    waiting_.pop_front();
  }
  return !offered_.empty();
}

int QueueDevice::SubmitOffered() {
  const int answer = queue_->Submit(offered_);
  if (answer <= 0) return answer;
  OFFLOAD_CHECK(static_cast<size_t>(answer) <= offered_.size())
      << answer << " of " << offered_.size();
  offered_.erase(offered_.begin(), offered_.begin() + answer);
  taken_ += static_cast<uint32_t>(answer);
  return answer;
}

void QueueDevice::RefuseFirst(int error_number) {
  if (queue_->errors_break()) broken_errno_ = error_number;
  std::unique_ptr<Request> request(static_cast<Request*>(offered_.front()));
  offered_.erase(offered_.begin());
  const Op& op = *request->op;
  request->outcome = IoErrorStatus(error_number, op.kind, op.offset_bytes, op.size_bytes);
  ready_.push_back(std::move(request));
}

// Runs no callback, so that it may be called between two attempts to submit.
bool QueueDevice::Reap() {
  std::array<KernelQueue::Completion, kCompletionsPerCall> completions;
  size_t count = completions.size();
  bool any = false;
  while (taken_ > 0 && count == completions.size()) {
    count = queue_->Reap(completions);
    for (size_t i = 0; i < count; ++i) {
      const auto [transfer, result] = completions[i];
      --taken_;
      HandleResult(std::unique_ptr<Request>(static_cast<Request*>(transfer)), result);
    }
    any |= count > 0;
  }
  return any;
}

void QueueDevice::HandleResult(std::unique_ptr<Request> request, int64_t result) {
  if (std::optional<absl::Status> outcome = Advance(*request, result)) {
    request->outcome = *std::move(outcome);
    ready_.push_back(std::move(request));
    return;
  }
  waiting_.push_front(std::move(request));
}

void QueueDevice::WaitForCompletion() {
  OFFLOAD_CHECK(taken_ > 0) << in_flight_ << " in flight, " << waiting_.size() << " waiting";
  queue_->Wait();
  Reap();
}

size_t QueueDevice::RunReady() {
  std::deque<std::unique_ptr<Request>> ready = std::exchange(ready_, {});
  for (std::unique_ptr<Request>& request : ready) {
    Complete(std::move(request->op), std::move(request->outcome));
  }
  return ready.size();
}

}  // namespace offload::aio

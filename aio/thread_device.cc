// The thread engine: blocking preadv, pwritev and fdatasync on a few threads. Needs nothing of the
// kernel, and is the reference that the other engines are tested against.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "aio/file_device.h"
#include "aio/transfer.h"
#include "base/status_macros.h"
#include "base/worker_pool.h"

namespace offload::aio {
namespace {

constexpr uint32_t kThreadCountMax = 256;

class ThreadDevice final : public FileDevice {
 public:
  ThreadDevice(int fd, const Geometry& geometry, const OpenOptions& options)
      : FileDevice(geometry),
        fd_(fd),
        pool_(std::clamp<uint32_t>(options.thread_count, 1, kThreadCountMax), "offload-io") {}
  ~ThreadDevice() override { Drain(); }

  using FileDevice::MakeEvent;
  size_t Poll(bool wait) override;
  std::string_view engine() const override { return EngineName(Engine::kThreads); }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  struct Finished {
    std::unique_ptr<Op> op;
    absl::Status outcome;
  };

  void Run(std::unique_ptr<Op> op);
  int64_t Call(const Transfer& transfer) const;
  std::vector<Finished> TakeFinished(bool wait);

  const int fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Finished> finished_;  // guarded by mutex_
  WorkerPool pool_;                 // last: its threads use the members above
};

void ThreadDevice::Start(std::unique_ptr<Op> op) {
  // std::function copies what it holds, hence the bare pointer; a pool runs all that was posted.
  pool_.Post([this, raw = op.release()] { Run(std::unique_ptr<Op>(raw)); });
}

void ThreadDevice::Run(std::unique_ptr<Op> op) {
  Transfer transfer(op->kind, op->offset_bytes, op->pieces, geometry_.offset_alignment);
  std::optional<absl::Status> outcome;
  while (!outcome.has_value()) outcome = Advance(transfer, Call(transfer));
  // Under the lock, because with the last completion the owner may destroy the device.
  std::lock_guard lock(mutex_);
  finished_.push_back({std::move(op), *std::move(outcome)});
  SignalReady();
  changed_.notify_one();
}

int64_t ThreadDevice::Call(const Transfer& transfer) const {
  const std::span<const iovec> pieces = transfer.pieces();
  const auto count = static_cast<int>(pieces.size());
  const auto offset = static_cast<off_t>(transfer.offset_bytes());
  ssize_t result = 0;
  switch (transfer.kind()) {
    case Kind::kRead:
      result = ::preadv(fd_, pieces.data(), count, offset);
      break;
    case Kind::kWrite:
      result = ::pwritev(fd_, pieces.data(), count, offset);
      break;
    case Kind::kFlush:
      result = ::fdatasync(fd_);
      break;
  }
  return result < 0 ? -errno : result;
}

size_t ThreadDevice::Poll(bool wait) {
  ClearEvent();  // first: whatever happens from now on signals again
  size_t count = CompleteRefused();
  std::vector<Finished> finished = TakeFinished(wait && count == 0 && in_flight_ > 0);
  for (Finished& each : finished) Complete(std::move(each.op), std::move(each.outcome));
  return count + finished.size();
}

std::vector<ThreadDevice::Finished> ThreadDevice::TakeFinished(bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) changed_.wait(lock, [this] { return !finished_.empty(); });
  return std::exchange(finished_, {});
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileDevice>> MakeThreadDevice(int fd, const Geometry& geometry,
                                                             const OpenOptions& options) {
  auto device = std::make_unique<ThreadDevice>(fd, geometry, options);
  OFFLOAD_RETURN_IF_ERROR(device->MakeEvent());
  return device;
}

}  // namespace offload::aio

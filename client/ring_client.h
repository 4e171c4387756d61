// client/ring_client.h
//
// The rank's side of the shared memory: submits operations, hands completions to who waits for
// them, acquires tensors without a message when they are resident, and watches the daemon's life.
//
// One thread per session waits for completions (doorbell), the end of the handshake socket and, for
// a private daemon, the end of its process. When the daemon is gone it first takes the completions
// that are there, then fails the session's health and with it every operation that is not done.
//
// Invariants
//   * in flight ≤ kInFlightMax, so the submission ring always has room and the completion ring
//   never overflows.
//   * A pin is counted up before the tensor's word is read and down after the last use of its
//   bytes.
//
// Thread safety: all methods may be called from any thread, AttachMemory() and AttachTensors()
// before those that need them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/mapped_region.h"
#include "base/unique_fd.h"
#include "client/health.h"
#include "client/step_monitor.h"
#include "proto/doorbell.h"
#include "proto/ring.h"
#include "proto/shm_abi.h"

namespace offload::client {

class RingClient {
 public:
  struct Options {
    int socket = -1;  // of the handshake; outlives the object
    int pidfd = -1;   // of a private daemon; -1: none
    Health* health = nullptr;
    StepMonitor* monitor = nullptr;  // outlives the object
    // Describes the daemon's end, given what the socket said; called on the ring client's thread,
    // once, before anything fails.
    std::function<absl::Status(const absl::Status& said)> describe_end;
    // Called on the ring client's thread once the health has failed.
    std::function<void()> on_failure;
    // Finds the text of a failed operation.
    std::function<absl::StatusOr<std::string>(uint64_t tag)> explain;
  };
  static absl::StatusOr<std::unique_ptr<RingClient>> Start(Options options);
  ~RingClient();  // every operation that is not done ends with OFD-1802
  RingClient(const RingClient&) = delete;
  RingClient& operator=(const RingClient&) = delete;

  // From now on operations can be submitted. Checks magic and version of both memories. OFD-1502,
  // OFD-1503.
  absl::Status AttachMemory(MappedRegion slab, MappedRegion region, proto::Doorbell doorbell);
  // From now on tensors can be acquired. OFD-1503 when words or pins would stand outside.
  absl::Status AttachTensors(size_t tensor_count, uint64_t pins_offset);

  // From now on it is counted how long tensors are in use. Requires AttachTensors(). OFD-1503 when
  // the table would stand outside.
  absl::Status AttachUseTimes(uint64_t offset);

  // From now on gradient words can be read, with several ranks. Requires AttachTensors(). OFD-1503
  // when they would stand outside.
  absl::Status AttachGradientWords();

  absl::StatusOr<const std::byte*> Acquire(uint32_t tensor);
  void Release(uint32_t tensor);
  absl::StatusOr<const std::byte*> TryAcquire(uint32_t tensor);
  bool Prefetch(uint32_t tensor);
  // Says it when there is room.
  void ReleaseGradient(uint32_t tensor);
  proto::TensorState State(uint32_t tensor) const;
  void SetSchedulePosition(uint32_t position);

  // Sets the tag, blocks until there is room, submits; the tag, also when the session is dead
  // (Wait() then tells).
  uint64_t Submit(proto::SubmissionEntry entry);
  absl::Status Wait(uint64_t tag);
  // Whether Wait() would return at once. Of a tag that has yet to be waited for.
  bool IsDone(uint64_t tag) const;
  // The same for what the daemon answers in less time than it takes to wake two threads: looks for
  // the answer itself at first. Not counted as a stall.
  absl::Status WaitAwake(uint64_t tag);
  // The same, for what the operation answers; `cause`: what the thread waits for.
  absl::StatusOr<uint64_t> WaitForValue(uint64_t tag, proto::StallCause cause);

  // 0 with one rank, and in a forked child. Acquire: what the word says was written before it.
  uint64_t GradientWord(uint32_t tensor) const;
  const std::byte* slab() const { return slab_.data(); }
  uint64_t slab_bytes() const { return slab_.size(); }
  std::byte* region() const { return region_.data(); }
  uint64_t region_bytes() const { return region_.size(); }
  const proto::SlabHeader& slab_header() const {
    return *reinterpret_cast<const proto::SlabHeader*>(slab_.data());
  }
  // OK, or why the job or the session has failed.
  absl::Status status() const;
  // Stops the thread; nothing completes any more. Idempotent.
  void Stop();

 private:
  struct Operation {
    bool done = false;
    bool nobody_waits = false;  // forgotten when done
    proto::CompletionEntry completion{};
  };
  // The rings exist once memory is attached.
  struct Rings {
    Rings(std::byte* region, proto::Doorbell doorbell);
    proto::Doorbell doorbell;
    proto::SubmissionProducer submissions;
    proto::CompletionConsumer completions;
    proto::SleepFlag daemon_sleep;
    proto::SleepFlag rank_sleep;
  };

  explicit RingClient(Options options, UniqueFd wake);

  absl::StatusOr<const std::byte*> PinIfResident(uint32_t tensor);
  absl::StatusOr<const std::byte*> AcquireSlowly(uint32_t tensor, bool is_pending);
  uint64_t SubmitLocked(proto::SubmissionEntry entry, bool nobody_waits)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for the operation and forgets it; its completion, or missing when the session failed
  // first.
  std::optional<proto::CompletionEntry> Take(uint64_t tag);
  // The same once it has looked for the completion for kLookMicroseconds.
  std::optional<proto::CompletionEntry> TakeAwake(uint64_t tag);
  absl::Status StatusOf(const std::optional<proto::CompletionEntry>& completion);
  absl::Status TextOf(const proto::CompletionEntry& completion);
  proto::TensorWord* word(uint32_t tensor) const { return tensor_words_ + tensor; }
  proto::PinWord* pin(uint32_t tensor) const { return pins_ + tensor; }

  // The thread.
  void Run();
  // Takes completions until there are none and sleeping was announced.
  absl::Status TakeCompletions();
  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Dispatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  enum class Event { kWork, kDaemonEnded, kDescriptorsClosed, kStopped };
  Event WaitForEvent();
  void EndSession(const absl::Status& fault);

  const Options options_;
  const UniqueFd wake_;  // eventfd of our own: memory was attached, or stop
  MappedRegion slab_, region_;
  proto::TensorWord* tensor_words_ = nullptr;
  proto::GradientWord* gradient_words_ = nullptr;
  proto::PinWord* pins_ = nullptr;
  size_t tensor_count_ = 0;
  std::atomic<uint32_t> acquires_waiting_{0};
  std::atomic<bool> stopping_{false};

  mutable absl::Mutex mutex_;
  absl::CondVar changed_;  // an operation is done, there is room, or the session failed
  std::unique_ptr<Rings> rings_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Operation> operations_ ABSL_GUARDED_BY(mutex_);
  uint32_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_tag_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);  // of the daemon, found by a thread that looked

  std::thread thread_;
};

}  // namespace offload::client

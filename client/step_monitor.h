// client/step_monitor.h
//
// Watches a rank's steps: phases, what its threads wait for, how its prefetches come out. Sums go
// to the words that the daemon reads (proto/step_words.h); while OFFLOADD_TRACE names a file, every
// event goes there, too, together with what the daemon tells of its transfers.
//
// Which phase it is follows from the threads that use tensors: SetBackward() says of the calling
// thread whether it is inside a backward pass (backward.h).
//
// Cost of a use of a resident tensor without a trace: four loads and a thread-local one; a lock and
// a look at the clock when it is another tensor than the one before.
//
// Thread safety: Enter, Asked, Used, Missed and Stall from any thread, after Attach…() and
// StartTrace(); a forked child does nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/health.h"
#include "client/trace_file.h"
#include "proto/step_words.h"

namespace offload::client {

// A transfer of the job's store or scratch file.
struct TimedTransfer {
  const char* name = "";  // what it did; static
  uint32_t tensor = TraceEvent::kNoTensor;
  uint32_t extent = 0;
  uint64_t bytes = 0;
  int64_t begin_nanoseconds = 0, end_nanoseconds = 0;
};
struct TakenTransfers {
  std::vector<TimedTransfer> transfers;
  uint64_t dropped = 0;
  bool more = false;
};

class StepMonitor {
 public:
  struct TraceOptions {
    std::string path;
    uint32_t daemon_pid = 0;
    std::string job;
    // What the daemon has done since the last call; null: nobody asks it.
    std::function<absl::StatusOr<TakenTransfers>()> take_transfers;
    // Bytes of the job in memory.
    std::function<uint64_t()> resident_bytes;
  };
  static constexpr int kWriteMilliseconds = 250;  // between two pieces of a trace

  // `health` outlives the object.
  explicit StepMonitor(const Health* health);
  ~StepMonitor();
  StepMonitor(const StepMonitor&) = delete;
  StepMonitor& operator=(const StepMonitor&) = delete;

  // `words` outlive every call but those of Stop().
  void Attach(proto::StepWords* words) { words_ = words; }
  void AttachTensors(size_t count);
  // Of the trainer's tensors, each with its own; outlives every call but those of StopTrace().
  void AttachUseTimes(std::span<proto::UseTimes> times) { use_times_ = times; }
  // OFD-1002 when the file cannot be written.
  absl::Status StartTrace(TraceOptions options);
  void NameTensors(std::vector<std::string> names);
  // Writes what there is and ends the trace. Idempotent.
  void StopTrace();

  // A step's call begins or ends.
  void Enter(proto::StepPhase phase);
  // A tensor was asked for ahead.
  void Asked(uint32_t tensor);
  // A tensor was found in the slab.
  void Used(uint32_t tensor) {
    NoteThread();
    if (asked_[tensor].load(std::memory_order_relaxed) != 0) CountOnTime(tensor);
    if (used_tensor_.load(std::memory_order_relaxed) != tensor) NoteUse(tensor);
  }
  // It was not; what the thread is going to wait for.
  proto::StallCause Missed(uint32_t tensor, bool is_pending);

  // A thread is blocked, from the constructor to the destructor.
  class Stall {
   public:
    Stall(StepMonitor* monitor, proto::StallCause cause, uint32_t tensor = TraceEvent::kNoTensor);
    ~Stall();
    Stall(const Stall&) = delete;
    Stall& operator=(const Stall&) = delete;

   private:
    StepMonitor& monitor_;
    const proto::StallCause cause_;
    const uint32_t tensor_;
    const int64_t begin_nanoseconds_;
  };
  // Of all stalls.
  double stall_seconds() const {
    return static_cast<double>(stall_nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  bool is_tracing() const { return tracing_.load(std::memory_order_acquire); }
  proto::StepPhase phase() const { return phase_.load(std::memory_order_relaxed); }
  // The phase of what the calling thread does.
  proto::StepPhase PhaseOfThread() const;
  void NoteThread() {
    if (const proto::StepPhase now = PhaseOfThread(); now != phase()) Enter(now);
  }
  void CountOnTime(uint32_t tensor);
  void CountPrefetch(proto::PrefetchResult result);
  void EndArrow(uint32_t tensor, uint64_t id);
  void NoteUse(uint32_t tensor);
  void EndUse(int64_t now_nanoseconds) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  TraceEvent Event(char type, const char* category, const char* name) const;
  void AddTransfer(const TimedTransfer& transfer);
  void TakeTransfers();
  void WritePiece();
  void RunWriter();

  const Health* const health_;
  proto::StepWords unattached_{};
  proto::StepWords* words_ = &unattached_;
  std::span<proto::UseTimes> use_times_;      // by tensor; empty when nobody counts
  std::vector<std::atomic<uint64_t>> asked_;  // by tensor: the id of its arrow; 0: not asked for
  std::atomic<uint64_t> next_id_{1};
  std::atomic<int64_t> stall_nanoseconds_{0};
  std::atomic<proto::StepPhase> phase_{proto::StepPhase::kForward};
  std::atomic<bool> tracing_{false};

  TraceOptions trace_options_;
  std::unique_ptr<TraceFile> trace_;
  uint32_t process_ = 0, main_thread_ = 0;
  std::thread writer_;
  bool asks_daemon_ = false;  // the writer's

  absl::Mutex mutex_;
  int64_t phase_since_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint32_t> used_tensor_{TraceEvent::kNoTensor};  // written with the lock
  int64_t used_since_ ABSL_GUARDED_BY(mutex_) = 0;
  proto::StepPhase used_in_ ABSL_GUARDED_BY(mutex_) = proto::StepPhase::kForward;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace offload::client

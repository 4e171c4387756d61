#include "client/step_monitor.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "absl/time/time.h"
#include "base/clock.h"
#include "client/backward.h"

namespace offload::client {
namespace {

using proto::PrefetchResult;
using proto::StallCause;
using proto::StepPhase;

// The track on which tensors in use follow each other; no thread has this number.
constexpr uint32_t kUseTrack = 1;

uint32_t ThreadId() {
  thread_local const auto id = static_cast<uint32_t>(::syscall(SYS_gettid));
  return id;
}

int64_t Now() { return Clock::Real().NowNanoseconds(); }

const char* NameOf(StepPhase phase) {
  return proto::kStepPhaseNames[static_cast<size_t>(phase)].data();
}

const char* NameOfStall(StallCause cause) {
  constexpr const char* kNames[] = {"wait: update", "wait: late",     "wait: miss",
                                    "wait: commit", "wait: transfer", "wait: ranks"};
  static_assert(std::size(kNames) == proto::kStallCauses);
  return kNames[static_cast<size_t>(cause)];
}

}  // namespace

StepMonitor::StepMonitor(const Health* health) : health_(health), phase_since_(Now()) {}

StepMonitor::~StepMonitor() { StopTrace(); }

void StepMonitor::AttachTensors(size_t count) {
  asked_ = std::vector<std::atomic<uint64_t>>(count);
}

// ---- Phases ------------------------------------------------------------------------------------

StepPhase StepMonitor::PhaseOfThread() const {
  return IsInBackward() ? StepPhase::kBackward : StepPhase::kForward;
}

void StepMonitor::Enter(StepPhase next) {
  if (health_->forked()) return;
  if (next == StepPhase::kStep) SetBackward(false);
  absl::MutexLock lock(&mutex_);
  const StepPhase before = phase_.exchange(next, std::memory_order_relaxed);
  const int64_t now = Now();
  const int64_t since = std::exchange(phase_since_, now);
  words_->phase_nanoseconds[static_cast<size_t>(before)].fetch_add(
      static_cast<uint64_t>(now - since), std::memory_order_relaxed);
  if (next == StepPhase::kStep) EndUse(now);
  if (!is_tracing()) return;
  TraceEvent event = Event('X', "phase", NameOf(before));
  event.thread = main_thread_;
  event.begin_nanoseconds = since;
  event.duration_nanoseconds = now - since;
  trace_->Add(event);
}

// ---- Tensors -----------------------------------------------------------------------------------

void StepMonitor::CountPrefetch(PrefetchResult result) {
  words_->prefetches[static_cast<size_t>(result)].fetch_add(1, std::memory_order_relaxed);
}

void StepMonitor::Asked(uint32_t tensor) {
  const uint64_t id = next_id_.fetch_add(1, std::memory_order_relaxed);
  asked_[tensor].store(id, std::memory_order_relaxed);
  if (!is_tracing()) return;
  TraceEvent event = Event('X', "prefetch", "prefetch");
  event.tensor = tensor;
  event.duration_nanoseconds = 1000;
  trace_->Add(event);
  event.type = 's';
  event.id = id;
  trace_->Add(event);
}

void StepMonitor::CountOnTime(uint32_t tensor) {
  const uint64_t id = asked_[tensor].exchange(0, std::memory_order_relaxed);
  if (id == 0) return;
  CountPrefetch(PrefetchResult::kOnTime);
  if (is_tracing()) EndArrow(tensor, id);
}

StallCause StepMonitor::Missed(uint32_t tensor, bool is_pending) {
  NoteThread();
  const uint64_t id = asked_[tensor].exchange(0, std::memory_order_relaxed);
  if (id != 0 || !is_pending)
    CountPrefetch(id != 0 ? PrefetchResult::kLate : PrefetchResult::kMiss);
  if (used_tensor_.load(std::memory_order_relaxed) != tensor) NoteUse(tensor);
  if (is_tracing() && id != 0) EndArrow(tensor, id);
  if (is_pending) return StallCause::kUpdate;
  return id != 0 ? StallCause::kLate : StallCause::kMiss;
}

void StepMonitor::EndArrow(uint32_t tensor, uint64_t id) {
  TraceEvent event = Event('f', "prefetch", "prefetch");
  event.thread = kUseTrack;
  event.tensor = tensor;
  event.id = id;
  trace_->Add(event);
}

// A tensor is in use until the next one is, or the step begins.
void StepMonitor::NoteUse(uint32_t tensor) {
  if (health_->forked()) return;
  absl::MutexLock lock(&mutex_);
  const int64_t now = Now();
  EndUse(now);
  used_tensor_.store(tensor, std::memory_order_relaxed);
  used_since_ = now;
  used_in_ = PhaseOfThread();
}

void StepMonitor::EndUse(int64_t now_nanoseconds) {
  const uint32_t tensor = used_tensor_.exchange(TraceEvent::kNoTensor, std::memory_order_relaxed);
  if (tensor == TraceEvent::kNoTensor) return;
  if (tensor < use_times_.size()) {
    use_times_[tensor].nanoseconds[used_in_ == StepPhase::kBackward ? 1 : 0].fetch_add(
        static_cast<uint64_t>(now_nanoseconds - used_since_), std::memory_order_relaxed);
  }
  if (!is_tracing()) return;
  TraceEvent event = Event('X', "use", "");
  event.thread = kUseTrack;
  event.tensor = tensor;
  event.begin_nanoseconds = used_since_;
  event.duration_nanoseconds = now_nanoseconds - used_since_;
  trace_->Add(event);
}

// ---- Stalls ------------------------------------------------------------------------------------

StepMonitor::Stall::Stall(StepMonitor* monitor, StallCause cause, uint32_t tensor)
    : monitor_(*monitor), cause_(cause), tensor_(tensor), begin_nanoseconds_(Now()) {}

StepMonitor::Stall::~Stall() {
  if (monitor_.health_->forked()) return;
  const int64_t nanoseconds = Now() - begin_nanoseconds_;
  monitor_.stall_nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed);
  monitor_.words_
      ->stall_nanoseconds[static_cast<size_t>(monitor_.phase())][static_cast<size_t>(cause_)]
      .fetch_add(static_cast<uint64_t>(nanoseconds), std::memory_order_relaxed);
  if (!monitor_.is_tracing()) return;
  TraceEvent event = monitor_.Event('X', "wait", NameOfStall(cause_));
  event.tensor = tensor_;
  event.begin_nanoseconds = begin_nanoseconds_;
  event.duration_nanoseconds = nanoseconds;
  monitor_.trace_->Add(event);
}

// ---- The trace ---------------------------------------------------------------------------------

absl::Status StepMonitor::StartTrace(TraceOptions options) {
  absl::StatusOr<std::unique_ptr<TraceFile>> trace = TraceFile::Create(options.path);
  if (!trace.ok()) return trace.status();
  trace_ = *std::move(trace);
  trace_options_ = std::move(options);
  process_ = static_cast<uint32_t>(::getpid());
  main_thread_ = ThreadId();
  asks_daemon_ = trace_options_.take_transfers != nullptr;
  trace_->NameProcess(process_, "trainer, job " + trace_options_.job);
  trace_->NameThread(process_, main_thread_, "trainer");
  trace_->NameThread(process_, kUseTrack, "tensors in use");
  if (asks_daemon_) trace_->NameProcess(trace_options_.daemon_pid, "offloadd");
  TakeTransfers();  // from now on it records them
  const absl::Status written = trace_->Write();
  if (!written.ok()) return written;
  tracing_.store(true, std::memory_order_release);
  writer_ = std::thread([this] { RunWriter(); });
  return absl::OkStatus();
}

void StepMonitor::NameTensors(std::vector<std::string> names) {
  if (trace_ != nullptr) trace_->SetTensorNames(std::move(names));
}

void StepMonitor::StopTrace() {
  if (!writer_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    EndUse(Now());
    stopping_ = true;
  }
  writer_.join();
  tracing_.store(false, std::memory_order_release);
}

TraceEvent StepMonitor::Event(char type, const char* category, const char* name) const {
  TraceEvent event;
  event.type = type;
  event.category = category;
  event.name = name;
  event.process = process_;
  event.thread = ThreadId();
  event.begin_nanoseconds = Now();
  return event;
}

void StepMonitor::AddTransfer(const TimedTransfer& transfer) {
  TraceEvent event = Event('b', "io", transfer.name);
  event.process = trace_options_.daemon_pid;
  event.thread = kUseTrack;
  event.id = next_id_.fetch_add(1, std::memory_order_relaxed);
  event.tensor = transfer.tensor;
  event.extent = transfer.extent;
  event.bytes = transfer.bytes;
  event.begin_nanoseconds = transfer.begin_nanoseconds;
  trace_->Add(event);
  event.type = 'e';
  event.begin_nanoseconds = transfer.end_nanoseconds;
  trace_->Add(event);
}

// A daemon that does not answer is asked no more: the trainer will hear of it elsewhere.
void StepMonitor::TakeTransfers() {
  bool more = asks_daemon_;
  while (more) {
    const absl::StatusOr<TakenTransfers> taken = trace_options_.take_transfers();
    asks_daemon_ = taken.ok();
    more = taken.ok() && taken->more;
    if (!taken.ok()) return;
    for (const TimedTransfer& transfer : taken->transfers) AddTransfer(transfer);
    trace_->AddDropped(taken->dropped);
  }
}

void StepMonitor::WritePiece() {
  TakeTransfers();
  TraceEvent resident = Event('C', "memory", "resident");
  resident.bytes = trace_options_.resident_bytes();
  trace_->Add(resident);
  if (const absl::Status status = trace_->Write(); !status.ok())
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
}

void StepMonitor::RunWriter() {
  bool is_last = false;
  while (!is_last) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(kWriteMilliseconds));
      is_last = stopping_;
    }
    WritePiece();
  }
}

}  // namespace offload::client

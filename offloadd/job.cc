#include "offloadd/job.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "offloadd/environment.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/limits.h"
#include "offloadd/step_plan.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

absl::Status WrongState(std::string_view what) { return MakeError(ErrorId::kProtocol, what); }
absl::Status Closed() { return MakeError(ErrorId::kSessionEnded, "the job is being closed"); }

absl::StatusOr<aio::Engine> ParseEngine(const std::string& text) {
  if (text.empty()) return aio::Engine::kAuto;
  if (const std::optional<aio::Engine> engine = aio::EngineOfName(text)) return *engine;
  return MakeError(ErrorId::kBadValue, absl::StrCat("io_engine \"", text, "\""),
                   absl::StrCat("Use ", ToAbsl(aio::kEngineNames)));
}

constexpr double kNeverSeconds = std::numeric_limits<double>::infinity();

// Steps from one commit to the next.
absl::StatusOr<uint64_t> ParseDurability(const std::string& text) {
  if (text.empty() || text == "step") return 1;
  constexpr std::string_view kCheckpoint = "checkpoint:";
  uint64_t steps = 0;
  if (std::string_view(text).starts_with(kCheckpoint) &&
      absl::SimpleAtoi(text.substr(kCheckpoint.size()), &steps) && steps > 0)
    return steps;
  return MakeError(ErrorId::kBadValue, absl::StrCat("durability \"", text, "\""),
                   "Use step, or checkpoint:N for a commit after every N steps");
}

// Beside the trainer's own threads.
uint32_t DefaultUpdateThreads() {
  return std::clamp<uint32_t>(std::thread::hardware_concurrency() / 2, 1, 4);
}

}  // namespace

Job::Job(EventLoop* loop) : loop_(loop) {
  context_.loop = loop;
  context_.clock = &Clock::Real();
  context_.room_timeout_seconds = NumberFrom("OFFLOADD_ROOM_TIMEOUT", kLimits.room_timeout_seconds);
  context_.complete = [this](uint64_t tag, absl::Status status, uint64_t value) {
    Complete(tag, std::move(status), value);
  };
  context_.fail = [this](absl::Status status) { Fail(std::move(status)); };
}

Job::~Job() {
  if (store_ != nullptr) loop_->Unwatch(store_->event_fd());
  if (scratch_ != nullptr) loop_->Unwatch(scratch_->event_fd());
  if (rings_.has_value()) loop_->Unwatch(rings_->doorbell().fd());
  OFFLOAD_CHECK(context_.outstanding == 0) << context_.outstanding << " operations under way";
}

// ---- Opening -----------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<Job>> Job::Open(EventLoop* loop,
                                               const proto::v1::OpenJobRequest& request,
                                               const std::string& pool,
                                               std::function<bool()> cancelled,
                                               proto::v1::OpenJobReply* reply) {
  std::unique_ptr<Job> job(new Job(loop));
  job->cancelled_ = std::move(cancelled);
  job->name_ = request.job();
  job->pool_ = pool;
  if (!swap::IsValidJobName(request.job())) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("job name \"", request.job(), "\""),
                     "Use letters, digits and . _ - #, at most 128, not beginning with a dot");
  }
  if (request.ram_bytes() > kLimits.ram_bytes_max ||
      request.update_threads() > kLimits.update_threads_max) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("ram of ", request.ram_bytes(), " bytes with ",
                                  request.update_threads(), " update threads"));
  }
  job->ram_bytes_ = AlignDown(request.ram_bytes(), proto::kSectorBytes);
  OFFLOAD_ASSIGN_OR_RETURN(job->io_.engine, ParseEngine(request.io_engine()));
  OFFLOAD_ASSIGN_OR_RETURN(job->context_.checkpoint_steps, ParseDurability(request.durability()));
  if (request.generations() > swap::kGenerationsMax) {
    return MakeError(ErrorId::kBadValue, absl::StrCat(request.generations(), " spare generations; ",
                                                      "at most ", swap::kGenerationsMax));
  }
  job->generations_ = request.generations();
  OFFLOAD_RETURN_IF_ERROR(swap::CheckPool(pool));
  OFFLOAD_RETURN_IF_ERROR(job->OpenStore());
  OFFLOAD_RETURN_IF_ERROR(job->MakeMemories());
  const uint32_t threads =
      request.update_threads() != 0 ? request.update_threads() : DefaultUpdateThreads();
  job->workers_ = std::make_unique<WorkerPool>(threads, "update");
  job->context_.workers = job->workers_.get();
  reply->set_exists(job->exists_);
  if (job->exists_) {
    reply->set_step(job->store_->committed().epoch);
    reply->set_trainer_state(job->store_->committed().blob);
  }
  reply->set_slab_bytes(job->slab_.size_bytes());
  reply->set_region_bytes(job->region_.size_bytes());
  reply->set_io_engine(job->io_engine_);
  spdlog::info("job {}: pool {}, {}, ram {}, {} update threads, {}", job->name_, pool,
               job->io_engine_, FormatBytes(job->ram_bytes_), threads,
               job->exists_ ? absl::StrCat("resumed at step ", job->step_) : "new");
  return job;
}

// OFFLOADD_LOCK_TIMEOUT: how long to wait for a job that is open elsewhere, or whose killed daemon
// still writes.
swap::StoreOptions Job::MakeStoreOptions() const {
  swap::StoreOptions options;
  options.io = io_;
  options.lock_timeout_seconds = NumberFrom("OFFLOADD_LOCK_TIMEOUT", options.lock_timeout_seconds);
  options.cancelled = cancelled_;
  return options;
}

absl::Status Job::OpenStore() {
  const swap::StoreOptions options = MakeStoreOptions();
  absl::StatusOr<std::unique_ptr<swap::Store>> store = swap::Store::Open(pool_, name_, options);
  if (store.ok()) {
    store_ = *std::move(store);
    context_.store = store_.get();
    loop_->Watch(store_->event_fd(), [] {});  // the turn polls
    exists_ = true;
    step_ = store_->committed().epoch;
    io_engine_ = std::string(store_->device().engine());
    return absl::OkStatus();
  }
  if (!absl::IsNotFound(store.status()) || ErrorIdOf(store.status()).has_value())
    return store.status();
  // A new job: models are built through the scratch file, and it tells which engine there is.
  OFFLOAD_RETURN_IF_ERROR(SetScratch());
  io_engine_ = std::string(scratch_->device().engine());
  return absl::OkStatus();
}

absl::Status Job::SetScratch() {
  if (scratch_ != nullptr) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, swap::SplitPools(pool_));
  OFFLOAD_ASSIGN_OR_RETURN(scratch_, swap::Scratch::Create(pools.front(), io_));
  context_.scratch = scratch_.get();
  loop_->Watch(scratch_->event_fd(), [] {});
  return absl::OkStatus();
}

absl::Status Job::MakeMemories() {
  constexpr uint64_t kOpenRegionBytes = proto::kRegionFixedBytes + proto::kLoadingStagingBytes;
  if (ram_bytes_ < kOpenRegionBytes + sizeof(proto::SlabHeader)) {
    return MakeError(ErrorId::kBudgetTooSmall,
                     absl::StrCat("ram of ", FormatBytes(ram_bytes_), " does not hold the ",
                                  FormatBytes(kOpenRegionBytes), " of rings and staging"),
                     "Raise ram: offloadctl plan shows the floors of a model");
  }
  OFFLOAD_ASSIGN_OR_RETURN(slab_, proto::SharedMemory::Create("offloadd-slab", ram_bytes_));
  OFFLOAD_ASSIGN_OR_RETURN(region_, proto::SharedMemory::Create("offloadd-region", ram_bytes_));
  OFFLOAD_RETURN_IF_ERROR(slab_.Allocate(0, proto::PaddedBytes(sizeof(proto::SlabHeader))));
  OFFLOAD_RETURN_IF_ERROR(slab_.SealForWriting());
  OFFLOAD_RETURN_IF_ERROR(region_.Allocate(0, kOpenRegionBytes));
  proto::InitializeSlab(slab_.data());
  proto::InitializeRegion(region_.data());
  context_.slab = slab_.data();
  context_.region = region_.data();
  context_.region_bytes = kOpenRegionBytes;
  header()->durable_step.store(step_, std::memory_order_relaxed);
  header()->updated_step.store(step_, std::memory_order_relaxed);
  return absl::OkStatus();
}

void Job::AttachRings(proto::Doorbell doorbell) {
  rings_.emplace(region_.data(), std::move(doorbell));
  UpdateLimits();
  loop_->Watch(rings_->doorbell().fd(), [this] {
    if (!rings_.has_value() || rings_->doorbell().Drain()) return;
    loop_->Unwatch(rings_->doorbell().fd());  // readable for ever; the socket tells the rest
  });
}

// What a submission may name from now on.
void Job::UpdateLimits() {
  if (!rings_.has_value()) return;
  rings_->submissions().SetLimits({.region_bytes = context_.region_bytes,
                                   .scratch_bytes = scratch_bytes_,
                                   .catalogue = sealed_ ? &context_.catalogue : nullptr});
}

// ---- Publishing --------------------------------------------------------------------------------

void Job::Publish(const std::string& trainer_state, Done done) {
  if (context_.failed()) return done(context_.failure);
  if (!sealed_ || closing_ || publishing_)
    return done(WrongState("Publish before Seal or for the second time"));
  if (context_.published) return done(absl::OkStatus());
  if (trainer_state.size() > kLimits.trainer_state_bytes_max)
    return done(WrongState("a trainer state that is too large"));
  if (!transfers_->idle()) return done(WrongState("Publish while puts are under way"));
  publishing_ = true;
  context_.commit_wanted = true;
  transfers_->WriteBundles(
      [this, trainer_state, done = std::move(done)](absl::Status status) mutable {
        if (!status.ok() || context_.failed())
          return FinishPublish(std::move(done), trainer_state, std::move(status));
        store_->Commit(0, trainer_state,
                       context_.Counted([this, trainer_state,
                                         done = std::move(done)](absl::Status committed) mutable {
                         FinishPublish(std::move(done), trainer_state, std::move(committed));
                       }));
      });
}

void Job::FinishPublish(Done done, const std::string& trainer_state, absl::Status status) {
  publishing_ = false;
  context_.commit_wanted = false;
  if (context_.failed()) status = context_.failure;
  if (status.ok()) status = store_->Publish();
  if (!status.ok()) {
    Fail(status);
    return done(status);
  }
  context_.published = true;
  MakeScrubber();
  done(absl::OkStatus());
}

// ---- Steps -------------------------------------------------------------------------------------

absl::Status Job::SetSchedule(const std::vector<uint32_t>& tensors) {
  if (!sealed_) return WrongState("SetSchedule before Seal");
  if (tensors.size() > kLimits.schedule_touches_max)
    return WrongState("a schedule that is too long");
  for (const uint32_t tensor : tensors) {
    if (tensor >= context_.catalogue.tensors.size())
      return WrongState(absl::StrCat("a schedule with tensor ", tensor));
  }
  cache_->SetSchedule(tensors);
  executor_->Reorder();
  return absl::OkStatus();
}

void Job::Step(std::vector<proto::v1::StepRequest> messages, StepDone done) {
  if (context_.failed()) return done(context_.failure);
  if (!context_.published || closing_)
    return done(WrongState("Step before Publish or after Close"));
  if (waiting_step_.has_value()) return done(WrongState("two steps at once"));
  ReadRing(proto::kInFlightMax);  // what came before the step belongs before it
  if (context_.failed()) return done(context_.failure);
  waiting_step_ = WaitingStep{std::move(messages), std::move(done)};
  if (executor_->busy()) return executor_->Hurry();
  StartRecordedStep();
}

// Records the step that waits; the one before it is committed.
void Job::StartRecordedStep() {
  if (!waiting_step_.has_value() || executor_->busy()) return;
  // Between two steps it is the turn of a change of snapshots.
  if (!changes_.empty() && !NeedsGrowth(changes_.front())) return;
  WaitingStep waiting = *std::exchange(waiting_step_, std::nullopt);
  absl::StatusOr<StepPlan> plan = MakeStepPlan(waiting.messages, context_);
  if (!plan.ok()) return waiting.done(plan.status());
  if (plan->step != step_ + 1) {
    return waiting.done(WrongState(absl::StrCat("step ", plan->step, " after step ", step_)));
  }
  step_ = plan->step;
  cache_->SetPosition(rings_.has_value() ? rings_->schedule_position() : 0);
  executor_->Begin(*std::move(plan));
  if (!durable_waiters_.empty()) executor_->CommitSoon();
  waiting.done(store_->committed().epoch);
}

void Job::OnCommitted(uint64_t step) {
  header()->durable_step.store(step, std::memory_order_relaxed);
  for (StepDone& waiter : std::exchange(durable_waiters_, {})) waiter(step);
  OnStepDone();
}

// A step is committed, or written and part of an interval.
void Job::OnStepDone() {
  const double now = context_.clock->NowSeconds();
  if (last_step_seconds_ > 0) seconds_per_step_ = now - last_step_seconds_;
  last_step_seconds_ = now;
  StartRecordedStep();
}

void Job::WaitDurable(StepDone done) {
  if (context_.failed()) return done(context_.failure);
  if (!context_.published) return done(WrongState("WaitDurable before Publish"));
  if (!executor_->busy() && !waiting_step_.has_value() && store_->committed().epoch == step_)
    return done(step_);
  executor_->Hurry();
  executor_->CommitSoon();
  durable_waiters_.push_back(std::move(done));
}

// ---- The end -----------------------------------------------------------------------------------

void Job::Close(Done done) {
  closing_ = true;
  if (drained_) return done(context_.failure);
  close_waiters_.push_back(std::move(done));
}

void Job::RankGone() {
  if (rank_gone_) return;
  rank_gone_ = true;
  closing_ = true;
  context_.pins = nullptr;
  if (rings_.has_value()) {
    loop_->Unwatch(rings_->doorbell().fd());
    rings_.reset();
  }
  if (cache_ != nullptr) cache_->DropWishes();
}

// Moves towards the end: updates and puts first, then a commit for what was put without a step.
void Job::Drain() {
  if (drained_) return;
  if (sealed_ && !context_.failed()) {
    executor_->Hurry();
    if (publishing_ || executor_->busy() || waiting_step_.has_value() || !transfers_->idle())
      return;
    if (context_.published && context_.writes_in_flight == 0 && executor_->HasUncommitted())
      return executor_->CommitSoon();
  }
  if (scrubber_ != nullptr) scrubber_->Stop();
  if (context_.outstanding > 0 || (scrubber_ != nullptr && !scrubber_->idle())) return;
  drained_ = true;
  if (cache_ != nullptr) cache_->FailWaiters(Closed());
  for (Done& waiter : std::exchange(close_waiters_, {})) waiter(context_.failure);
}

void Job::Fail(absl::Status status) {
  OFFLOAD_CHECK(!status.ok());
  if (context_.failed()) return;
  spdlog::error("job {}: {}", name_, ToStd(status.message()));
  context_.failure = status;
  proto::PublishFailure(header(), status);
  if (waiting_step_.has_value()) std::exchange(waiting_step_, std::nullopt)->done(status);
  for (StepDone& waiter : std::exchange(durable_waiters_, {})) waiter(status);
  if (cache_ != nullptr) cache_->FailWaiters(context_.failure);
  if (transfers_ != nullptr) transfers_->FailQueued();
}

std::string Job::ExplainFailure(uint64_t tag) const {
  for (auto text = failure_texts_.rbegin(); text != failure_texts_.rend(); ++text) {
    if (text->first == tag) return text->second;
  }
  return context_.failed() ? std::string(context_.failure.message()) : "";
}

// ---- The ring ----------------------------------------------------------------------------------

void Job::ReadRing(uint32_t entries_max) {
  for (uint32_t i = 0; rings_.has_value() && i < entries_max; ++i) {
    absl::StatusOr<std::optional<proto::SubmissionEntry>> next = rings_->Next();
    if (!next.ok()) {
      Fail(next.status());  // also tells the rank why
      loop_->Unwatch(rings_->doorbell().fd());
      rings_.reset();
      rank_at_fault_ = true;
      return;
    }
    if (!next->has_value()) return;
    Handle(**next);
  }
}

void Job::Handle(const proto::SubmissionEntry& entry) {
  if (context_.failed()) return Complete(entry.tag, context_.failure, 0);
  if (closing_) return Complete(entry.tag, Closed(), 0);
  switch (entry.operation) {
    case proto::RingOperation::kNop:
      return Complete(entry.tag, absl::OkStatus(), 0);
    case proto::RingOperation::kAcquire:
      return cache_->Acquire(entry.tensor, entry.tag);
    case proto::RingOperation::kPrefetch:
      cache_->Prefetch(entry.tensor);
      return Complete(entry.tag, absl::OkStatus(), 0);
    case proto::RingOperation::kPut:
    case proto::RingOperation::kGet:
      return transfers_->Add(entry);
    case proto::RingOperation::kScratchWrite:
      return ScratchWrite(entry);
    case proto::RingOperation::kScratchRead:
      return scratch_->Read(entry.element_offset,
                            {region_.data() + entry.region_offset, entry.element_count},
                            context_.Counted([this, tag = entry.tag](absl::Status status) {
                              Complete(tag, std::move(status), 0);
                            }));
  }
}

// In pieces of half an extent of fp32, or a whole one of bf16: what is read back begins and ends at
// extents.
void Job::ScratchWrite(const proto::SubmissionEntry& entry) {
  constexpr uint64_t kPieceBytes = uint64_t{proto::kExtentElements} * 2;
  struct Pieces {
    uint32_t left = 0;
    absl::Status status;
  };
  auto pieces = std::make_shared<Pieces>();
  pieces->left = static_cast<uint32_t>(CeilDivide(entry.element_count, kPieceBytes));
  for (uint64_t begin = 0; begin < entry.element_count; begin += kPieceBytes) {
    const uint64_t size_bytes = std::min(kPieceBytes, entry.element_count - begin);
    scratch_->Write(entry.element_offset + begin,
                    {region_.data() + entry.region_offset + begin, size_bytes},
                    context_.Counted([this, pieces, tag = entry.tag](absl::Status status) {
                      pieces->status.Update(status);
                      if (--pieces->left == 0) Complete(tag, pieces->status, 0);
                    }));
  }
}

void Job::Complete(uint64_t tag, absl::Status status, uint64_t value) {
  if (!rings_.has_value()) return;
  if (!status.ok()) {
    failure_texts_.emplace_back(tag, std::string(status.message()));
    if (failure_texts_.size() > kLimits.failure_texts_max) failure_texts_.pop_front();
  }
  rings_->Complete(tag, value, status);
}

// ---- Turns -------------------------------------------------------------------------------------

size_t Job::PollDevices() {
  size_t count = 0;
  if (store_ != nullptr) count += store_->Poll(false);
  if (scratch_ != nullptr) count += scratch_->Poll(false);
  return count;
}

int Job::Turn() {
  if (rings_.has_value()) rings_->Awake();
  ReadRing(kLimits.ring_entries_per_turn);
  if (drained_) return SleepLimit(/*waiting=*/false, /*completions=*/0, kNeverSeconds);
  bool waiting = false;
  double scrub_seconds = kNeverSeconds;
  size_t completions = PollDevices();
  if (sealed_) {
    if (rings_.has_value()) cache_->SetPosition(rings_->schedule_position());
    // Transfers before updates: what they hold is held before an update could claim it.
    waiting |= transfers_->Turn();
    waiting |= cache_->Turn();
    waiting |= executor_->Turn();
    if (scrubber_ != nullptr) scrub_seconds = scrubber_->Turn(context_.clock->NowSeconds());
    completions += PollDevices();  // hands what was started to the kernel
  }
  RunChanges();
  if (closing_) Drain();
  UpdateHeader();
  return SleepLimit(waiting || !changes_.empty() || (closing_ && !drained_), completions,
                    scrub_seconds);
}

// Shows the rank what was done; how long the loop may sleep then.
int Job::SleepLimit(bool waiting, size_t completions, double scrub_seconds) {
  if (rings_.has_value()) rings_->Publish();
  if (completions > 0) return 0;
  if (rings_.has_value() && !rings_->PrepareToSleep()) return 0;
  if (waiting) return kLimits.room_poll_ms;
  return std::isinf(scrub_seconds) ? -1 : static_cast<int>(std::min(scrub_seconds, 60.0) * 1e3) + 1;
}

}  // namespace offload::daemon

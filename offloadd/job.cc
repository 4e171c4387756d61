#include "offloadd/job.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "offloadd/environment.h"
#include "offloadd/limits.h"
#include "offloadd/step_plan.h"
#include "proto/trainer_states.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

absl::Status WrongState(std::string_view what) { return MakeError(ErrorId::kProtocol, what); }
absl::Status Closed() { return MakeError(ErrorId::kSessionEnded, "the job is being closed"); }

constexpr double kNeverSeconds = std::numeric_limits<double>::infinity();

std::vector<uint32_t> TensorsOf(const StepPlan& plan) {
  std::vector<uint32_t> tensors;
  for (const TaskPlan& task : plan.tasks)
    tensors.insert(tensors.end(), task.tensors.begin(), task.tensors.end());
  return tensors;
}

}  // namespace

// ---- Beginning and end -------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<Job>> Job::Create(JobIdentity identity, Machine& machine) {
  absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
  if (!loop.ok()) return loop.status();
  std::shared_ptr<Job> job(new Job(std::move(identity), *std::move(loop), machine));
  if (!machine.RunsLoops()) return job;
  job->thread_ = std::thread([raw = job.get()] {
    prctl(PR_SET_NAME, "job");
    raw->loop_->Run();
  });
  return job;
}

Job::Job(JobIdentity identity, std::unique_ptr<EventLoop> loop, Machine& machine)
    : identity_(std::move(identity)),
      loop_(std::move(loop)),
      machine_(machine),
      activity_(&machine.clock()),
      meter_(&machine.clock(), machine.replan_options().busy_bytes) {
  context_.loop = loop_.get();
  context_.clock = &machine_.clock();
  context_.activity = &activity_;
  context_.room_timeout_seconds = NumberFrom("OFFLOADD_ROOM_TIMEOUT", kLimits.room_timeout_seconds);
  context_.reads_ahead = NumberFrom("OFFLOADD_READ_AHEAD", 1) != 0;
  context_.complete = [this](uint32_t rank, uint64_t tag, const absl::Status& status,
                             uint64_t value) { ranks_[rank]->Complete(tag, status, value); };
  context_.fail = [this](absl::Status status) { Fail(std::move(status)); };
  context_.waits_for_ranks = [this](uint32_t rank) {
    return context_.ranks[rank].is_stepping || context_.ranks[rank].is_exchanging ||
           (gradients_ != nullptr && gradients_->Waits(rank)) ||
           (transfers_ != nullptr && transfers_->Waits(rank));
  };
  context_.is_ahead_of = [this](uint32_t rank, uint32_t other) {
    return gradients_ != nullptr && gradients_->IsAheadOf(rank, other);
  };
  loop_->SetTurn([this] { return Turn(); });
}

Job::~Job() {
  if (thread_.joinable()) {
    std::promise<void> drained;
    loop_->Post([&] { Shutdown([&drained] { drained.set_value(); }); });
    drained.get_future().wait();
    loop_->Stop();
    thread_.join();
  }
  OFFLOAD_CHECK(phase() == JobPhase::kDrained) << NameOf(phase());
  OFFLOAD_CHECK(context_.outstanding == 0 && !OffLoopIsBusy())
      << context_.outstanding << " operations under way";
}

void Job::SetPhase(JobPhase phase) {
  OFFLOAD_CHECK(CanFollow(phase_, phase)) << NameOf(phase_) << " to " << NameOf(phase);
  phase_.store(phase, std::memory_order_release);
  if (phase == JobPhase::kTraining) history_.Begin(Work());
}

absl::Status Job::Check(JobCall call) const {
  if (context_.failed()) return context_.failure;
  return end_reason_.ok() ? CheckAllowed(call, phase()) : end_reason_;
}

absl::Status Job::Ending() const {
  if (context_.failed()) return context_.failure;
  return end_reason_.ok() ? Closed() : end_reason_;
}

void Job::BeginClosing() {
  cancelled_ = true;
  leaving_.store(true, std::memory_order_release);
  if (IsClosing(phase())) return;
  const bool is_sealing = phase() == JobPhase::kSealing;
  SetPhase(JobPhase::kClosing);
  AnswerWaiting(Ending());
  if (!is_sealing) AnswerSeal(Ending());  // else off the loop it is still told how it goes
}

void Job::Shutdown(std::function<void()> done) {
  BeginClosing();
  if (phase() == JobPhase::kDrained) return done();
  leave_waiters_.push_back(std::move(done));
}

void Job::EndWithDaemon(std::function<void()> done) {
  if (!IsClosing(phase()) && !context_.failed() && end_reason_.ok()) end_reason_ = DaemonEnds();
  Shutdown(std::move(done));
}

// Moves towards the end: updates first, then a commit of steps that wait for one. Unsettled puts go
// with the open epoch, and so do partial steps.
void Job::Drain() {
  if (phase() != JobPhase::kClosing || OffLoopIsBusy()) return;
  if (IsSealed() && !context_.failed()) {
    executor_->Hurry();
    if (executor_->busy() || StepIsReady() || !transfers_->idle()) return;
    if (context_.published && context_.writes_in_flight == 0 && executor_->HasUncommitted())
      return executor_->CommitSoon();
  }
  if (scrubber_ != nullptr) scrubber_->Stop();
  if (context_.outstanding > 0 || (scrubber_ != nullptr && !scrubber_->idle())) return;
  FinishDraining();
}

// Closes the store, so that whoever waits for its lock has it.
void Job::FinishDraining() {
  if (store_ != nullptr) SaveRemovedFiles();
  SetPhase(JobPhase::kDrained);
  if (cache_ != nullptr) cache_->FailWaiters(Ending());
  UnwatchDevices();
  context_.store = nullptr;
  context_.scratch = nullptr;
  scrubber_.reset();
  store_.reset();
  scratch_.reset();
  for (DurableWaiter& waiter : std::exchange(durable_waiters_, {})) waiter.done(Ending());
  for (Done& waiter : std::exchange(close_waiters_, {})) waiter(context_.failure);
  for (std::function<void()>& waiter : std::exchange(leave_waiters_, {})) waiter();
}

// Told once: the run goes on in a file that nobody can open any more.
void Job::CheckFiles() {
  if (!removed_files_.empty()) return;
  const absl::Status status = store_->CheckFiles();
  if (status.ok()) return;
  removed_files_ = std::string(status.message());
  spdlog::error("job {}: {}", identity_.name, removed_files_);
}

void Job::SaveRemovedFiles() {
  const absl::Status saved = store_->SaveRemovedFiles();
  if (saved.ok()) return;
  const absl::Status lost =
      MakeError(ErrorId::kStoreDamaged,
                absl::StrCat(store_->path(),
                             " was removed during the run and is not written anew, what the job "
                             "has trained is gone (",
                             absl::StripSuffix(saved.message(), "."), ")"),
                "Save the model from the trainer, where it still has it, or go on from a copy");
  spdlog::error("job {}: {}", identity_.name, ToStd(lost.message()));
  if (!context_.failed()) context_.failure = lost;
}

void Job::Fail(absl::Status status) {
  OFFLOAD_CHECK(!status.ok());
  if (context_.failed()) return;
  spdlog::error("job {}: {}", identity_.name, ToStd(status.message()));
  context_.failure = status;
  proto::PublishFailure(header(), status);
  if (gate_.has_value()) gate_->Clear();
  AnswerStep(status);
  AnswerWaiting(status);
  for (DurableWaiter& waiter : std::exchange(durable_waiters_, {})) waiter.done(status);
  if (cache_ != nullptr) cache_->FailWaiters(context_.failure);
  if (transfers_ != nullptr) transfers_->FailQueued(context_.failure);
  if (gradients_ != nullptr) gradients_->FailQueued(context_.failure);
}

// ---- Publishing --------------------------------------------------------------------------------

// Every rank's state is part of the first commit, as of every other.
void Job::Publish(Rank& rank, const std::string& trainer_state, Done done) {
  absl::Status status = Check(JobCall::kPublish);
  if (status.ok()) status = CheckAllAreHere();
  if (!status.ok()) return done(std::move(status));
  if (phase() == JobPhase::kTraining) return done(absl::OkStatus());
  if (rank.calls.publish != nullptr) return done(WrongState("Publish for the second time"));
  if (trainer_state.size() >
      proto::TrainerStateBytesMax(world_size(), kLimits.trainer_state_bytes_max))
    return done(WrongState("a trainer state that is too large"));
  // Another rank may have come here while the first one still puts.
  if (rank.number() == 0 && !transfers_->idle())
    return done(WrongState("Publish while puts are under way"));
  trainer_states_[rank.number()] = trainer_state;
  rank.calls.publish = std::move(done);
  if (All([](const Rank& each) { return each.calls.publish != nullptr; })) StartPublishing();
}

void Job::StartPublishing() {
  SetPhase(JobPhase::kPublishing);
  context_.commit_wanted = true;
  transfers_->WriteBundles([this](absl::Status status) {
    if (!status.ok() || context_.failed()) return FinishPublish(std::move(status));
    store_->Commit(
        0, proto::EncodeTrainerStates(trainer_states_),
        context_.Counted([this](absl::Status committed) { FinishPublish(std::move(committed)); }));
  });
}

// The store gets its name off the loop.
void Job::FinishPublish(absl::Status status) {
  context_.commit_wanted = false;
  if (context_.failed()) status = context_.failure;
  auto named = std::make_shared<absl::Status>(std::move(status));
  OffLoop(
      [this, named] {
        if (named->ok()) *named = machine_.PublishStore(*store_);
      },
      [this, named] {
        if (!named->ok()) Fail(*named);
        if (phase() == JobPhase::kPublishing)
          SetPhase(named->ok() ? JobPhase::kTraining : JobPhase::kSealed);
        if (!named->ok()) return AnswerPublish(*named);
        context_.published = true;
        if (!IsClosing(phase())) MakeScrubber();
        AnswerPublish(absl::OkStatus());
      });
}

void Job::AnswerPublish(const absl::Status& status) {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->calls.publish == nullptr) continue;
    std::exchange(rank->calls.publish, nullptr)(status);
  }
}

void Job::EndLoad(Done done) {
  if (absl::Status status = Check(JobCall::kEndLoad); !status.ok()) return done(std::move(status));
  if (StepIsReady() || transfers_->putting())
    return done(WrongState("EndLoad while a step or puts are under way"));
  const bool loaded = context_.is_unsettled();
  context_.unsettled_puts = context_.is_partial = false;
  if (!loaded || !(executor_->busy() || executor_->HasUncommitted())) return done(absl::OkStatus());
  executor_->CommitSoon();
  durable_waiters_.push_back(
      {step_,
       [done = std::move(done)](const absl::StatusOr<uint64_t>& step) { done(step.status()); }});
}

// ---- Steps -------------------------------------------------------------------------------------

// The first rank's counts: the others go the same way, each at its own place.
absl::Status Job::SetSchedule(Rank& rank, const std::vector<uint32_t>& tensors) {
  if (absl::Status status = Check(JobCall::kSetSchedule); !status.ok()) return status;
  if (tensors.size() > kLimits.schedule_touches_max)
    return WrongState("a schedule that is too long");
  for (const uint32_t tensor : tensors) {
    if (tensor >= context_.catalogue.tensors.size())
      return WrongState(absl::StrCat("a schedule with tensor ", tensor));
  }
  if (rank.number() != 0) return absl::OkStatus();
  cache_->SetSchedule(tensors);
  executor_->Reorder();
  touches_.clear();
  if (tensors.size() <= proto::kPlannedTouchesMax) touches_ = tensors;
  PlanStep(tensors);
  return absl::OkStatus();
}

// Those that are there stay: an update may be reading them.
absl::Status Job::SetSquareRoots(std::shared_ptr<const kernels::SquareRoots> roots) {
  OFFLOAD_RETURN_IF_ERROR(Check(JobCall::kSetSquareRoots));
  if (roots == nullptr) return WrongState("square roots of a wrong size");
  if (context_.square_roots == nullptr) {
    context_.square_roots = std::move(roots);
    return absl::OkStatus();
  }
  if (*roots == *context_.square_roots) return absl::OkStatus();
  return MakeError(ErrorId::kRanksDiffer, "the ranks' torch libraries take different square roots",
                   "Run all ranks with one libtorch");
}

absl::Status Job::BeginStep(const std::vector<proto::v1::StepRequest>& messages) {
  OFFLOAD_RETURN_IF_ERROR(Check(JobCall::kBeginStep));
  if (world_size() > 1 || !context_.updates_ahead || OffLoopIsBusy() || !gate_->empty())
    return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(StepPlan plan, MakeStepPlan(messages, context_));
  if (plan.step == step_ + 1) executor_->Expect(std::move(plan));
  return absl::OkStatus();
}

absl::Status Job::CheckStep() const {
  OFFLOAD_RETURN_IF_ERROR(Check(JobCall::kStep));
  return CheckAllAreHere();
}

void Job::Step(Rank& rank, std::vector<proto::v1::StepRequest> messages, StepDone done) {
  if (absl::Status status = CheckStep(); !status.ok()) return done(std::move(status));
  if (OffLoopIsBusy()) {
    // The ring is read after it, and what came before the step belongs before it.
    return OffLoop(nullptr, [this, &rank, messages = std::move(messages), done = std::move(done)] {
      Step(rank, messages, done);
    });
  }
  ReadRing(rank, proto::kInFlightMax);
  AddStep(rank, std::move(messages), std::move(done));
}

void Job::AddStep(Rank& rank, std::vector<proto::v1::StepRequest> messages, StepDone done) {
  absl::Status status = CheckStep();
  if (!status.ok()) return done(std::move(status));
  std::optional<std::string> trainer_state;
  if (!messages.empty() && messages.front().has_trainer_state())
    trainer_state = messages.front().trainer_state();
  if (trainer_state.has_value() &&
      trainer_state->size() >
          proto::TrainerStateBytesMax(world_size(), kLimits.trainer_state_bytes_max)) {
    return done(WrongState(absl::StrCat("a trainer state of ", trainer_state->size(), " bytes")));
  }
  const uint64_t step = messages.empty() ? 0 : messages.front().step();
  if (status = gate_->Add(rank.number(), std::move(messages)); !status.ok())
    return done(std::move(status));
  rank.step = step;
  rank.trainer_state = std::move(trainer_state);
  rank.calls.step = std::move(done);
  UpdateMemory(rank);
  if (gradients_ != nullptr) gradients_->Step(rank.number());
  if (!StepIsReady()) return;
  history_.Call(Work());
  if (!executor_->MayBegin()) return executor_->Hurry();
  StartRecordedStep();
}

// A sum is there and finite, or the step is none. What the trainer has written it has looked at.
absl::Status Job::CheckSums(const StepMessages& messages) const {
  if (gradients_ == nullptr) return absl::OkStatus();
  for (const proto::v1::StepRequest& message : messages) {
    for (int i = 0; i < message.tensors_size(); ++i) {
      const uint32_t tensor = message.tensors(i);
      if (i < message.own_gradient_offset_size() && message.own_gradient_offset(i) != 0) continue;
      const std::string& name = context_.catalogue.tensors[tensor].name;
      if (!gradients_->HasSum(tensor)) {
        return MakeError(ErrorId::kGradientOfRanks,
                         absl::StrCat("no rank has given a gradient of \"", name, "\""));
      }
      if (!gradients_->IsFinite(tensor)) {
        return MakeError(
            ErrorId::kNonFinite,
            absl::StrCat("the gradient of \"", name, "\", summed over ", world_size(), " ranks"));
      }
    }
  }
  return absl::OkStatus();
}

// Records the step that waits; the one before it is written.
void Job::StartRecordedStep() {
  if (!StepIsReady() || !executor_->MayBegin()) return;
  if (gradients_ != nullptr && !gradients_->IsSettled()) return;
  if (transfers_->putting()) return;  // they came before it
  // Between two steps it is the turn of a change of snapshots, which a partial one lets wait.
  if (!changes_.empty() && !NeedsGrowth(changes_.front()) && !context_.is_partial) return;
  absl::StatusOr<StepPlan> plan = TakeStep();
  if (!plan.ok()) {
    if (gradients_ != nullptr) gradients_->CancelStep();
    for (const std::unique_ptr<Rank>& rank : ranks_) rank->trainer_state.reset();
    return AnswerStep(plan.status());
  }
  step_ = plan->step;
  AddToHistory();
  ConsiderReplan();
  if (gradients_ != nullptr) gradients_->BeginNextStep(TensorsOf(*plan));
  plan->trainer_state = TakeTrainerStates();
  TakePositions();
  executor_->Begin(*std::move(plan));
  if (!durable_waiters_.empty() && !executor_->committing()) executor_->CommitSoon();
  AnswerStep(store_->committed().epoch);
}

// What a rank gave before the others zeroed theirs is in no sum any more. One that has nothing has
// zeroed it, too.
absl::Status Job::CheckNobodyIsBehind() const {
  if (gradients_ == nullptr) return absl::OkStatus();
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    if (!gate_->NamesTensors(rank) || !gradients_->IsBehind(rank)) continue;
    return MakeError(ErrorId::kGradientOfRanks,
                     absl::StrCat("rank ", rank, " steps with gradients of a backward pass, since ",
                                  "which other ranks have zeroed theirs without a step"),
                     "Zero gradients without a step only after a backward pass on every rank");
  }
  return absl::OkStatus();
}

absl::StatusOr<StepPlan> Job::TakeStep() {
  const absl::Status standing = CheckNobodyIsBehind();
  OFFLOAD_ASSIGN_OR_RETURN(const StepMessages messages, gate_->Take());
  OFFLOAD_RETURN_IF_ERROR(standing);
  OFFLOAD_ASSIGN_OR_RETURN(StepPlan plan, MakeStepPlan(messages, context_));
  if (plan.step != step_ + 1)
    return WrongState(absl::StrCat("step ", plan.step, " after step ", step_));
  OFFLOAD_RETURN_IF_ERROR(CheckSums(messages));
  return plan;
}

// What is committed with the step that begins; missing when no rank gave anything new.
std::optional<std::string> Job::TakeTrainerStates() {
  bool has_news = false;
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (!rank->trainer_state.has_value()) continue;
    trainer_states_[rank->number()] = *std::exchange(rank->trainer_state, std::nullopt);
    has_news = true;
  }
  if (!has_news) return std::nullopt;
  return proto::EncodeTrainerStates(trainer_states_);
}

void Job::AnswerStep(const absl::StatusOr<uint64_t>& durable_step) {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->calls.step == nullptr) continue;
    const StepDone done = std::exchange(rank->calls.step, nullptr);
    UpdateMemory(*rank);
    done(durable_step);
  }
}

void Job::OnCommitted(uint64_t step) {
  ++commits_;
  CheckFiles();
  header()->durable_step.store(step, std::memory_order_relaxed);
  for (DurableWaiter& waiter : std::exchange(durable_waiters_, {})) {
    if (waiter.step <= step) {
      waiter.done(step);
    } else {
      durable_waiters_.push_back(std::move(waiter));
    }
  }
  // A step of an interval was done when it was written.
  context_.durability.has_intervals() ? StartRecordedStep() : OnStepDone();
}

// A step is committed, or written and part of an interval.
void Job::OnStepDone() {
  const double now = context_.clock->NowSeconds();
  if (last_step_seconds_ > 0) seconds_per_step_ = now - last_step_seconds_;
  last_step_seconds_ = now;
  StartRecordedStep();
}

void Job::WaitDurable(StepDone done) {
  absl::Status status = Check(JobCall::kWaitDurable);
  if (status.ok() && context_.is_partial) status = WrongState("WaitDurable after a partial step");
  if (!status.ok()) return done(std::move(status));
  if (!executor_->busy() && store_->committed().epoch == step_) return done(step_);
  executor_->Hurry();
  executor_->CommitSoon();
  durable_waiters_.push_back({step_, std::move(done)});
}

absl::StatusOr<uint64_t> Job::Checkpoint() {
  OFFLOAD_RETURN_IF_ERROR(Check(JobCall::kCheckpoint));
  if (context_.is_partial) return WrongState("Checkpoint after a partial step");
  executor_->CommitSoon();
  return step_;
}

std::string Job::ExplainFailure(const Rank& rank, uint64_t tag) const {
  std::string text = rank.ExplainFailure(tag);
  return text.empty() && context_.failed() ? std::string(context_.failure.message()) : text;
}

// ---- The rings ---------------------------------------------------------------------------------

absl::Status Job::Map(Rank& rank, proto::Doorbell doorbell) {
  if (absl::Status status = Check(JobCall::kMap); !status.ok()) return status;
  if (absl::Status status = rank.region().SealForWriting(); !status.ok()) return status;
  rank.AttachRings(std::move(doorbell));
  rank.state = Rank::State::kMapped;
  UpdateLimits();
  loop_->Watch(rank.rings()->doorbell().fd(), [this, &rank] {
    if (rank.rings() == nullptr || rank.rings()->doorbell().Drain()) return;
    loop_->Unwatch(rank.rings()->doorbell().fd());  // readable for ever; the socket tells the rest
  });
  return absl::OkStatus();
}

void Job::DetachRings(Rank& rank) {
  if (rank.rings() == nullptr) return;
  loop_->Unwatch(rank.rings()->doorbell().fd());
  rank.DetachRings();
}

// What submissions may name from now on.
void Job::UpdateLimits() {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->rings() == nullptr) continue;
    rank->rings()->submissions().SetLimits(
        {.region_bytes = context_.ranks[rank->number()].region_bytes,
         .scratch_bytes = scratch_bytes_,
         .catalogue = IsSealed() ? &context_.catalogue : nullptr,
         .has_several_ranks = world_size() > 1,
         .adds_gradients = gradients_ != nullptr});
  }
}

void Job::ReadRing(Rank& rank, uint32_t entries_max) {
  for (uint32_t i = 0; rank.rings() != nullptr && i < entries_max; ++i) {
    absl::StatusOr<std::optional<proto::SubmissionEntry>> next = rank.rings()->Next();
    if (!next.ok()) return BreakOff(rank, next.status());
    if (!next->has_value()) return;
    Handle(rank, **next);
  }
}

// The rank wrote nonsense.
void Job::BreakOff(Rank& rank, const absl::Status& fault) {
  if (world_size() == 1) {
    Fail(fault);  // also tells the rank why
  } else {
    EndBecause(
        MakeError(ErrorId::kRankLost,
                  absl::StrCat(Describe(rank), " has broken the protocol: ", fault.message())));
  }
  DetachRings(rank);
  rank.EndSession();
}

void Job::Handle(Rank& rank, const proto::SubmissionEntry& entry) {
  if (context_.failed() || IsClosing(phase()) || !rank.is_here())
    return rank.Complete(entry.tag, Ending(), 0);
  switch (entry.operation) {
    case proto::RingOperation::kNop:
      return rank.Complete(entry.tag, absl::OkStatus(), 0);
    case proto::RingOperation::kAcquire:
      return cache_->Acquire(rank.number(), entry.tensor, entry.tag);
    case proto::RingOperation::kPrefetch:
      cache_->Prefetch(entry.tensor);
      return rank.Complete(entry.tag, absl::OkStatus(), 0);
    case proto::RingOperation::kPut:
    case proto::RingOperation::kGet:
      return transfers_->Add(rank.number(), entry);
    case proto::RingOperation::kScratchWrite:
      return ScratchWrite(rank, entry);
    case proto::RingOperation::kScratchRead:
      return scratch_->Read(entry.element_offset,
                            {RegionOf(rank) + entry.region_offset, entry.element_count},
                            context_.Counted([&rank, tag = entry.tag](const absl::Status& status) {
                              rank.Complete(tag, status, 0);
                            }));
    case proto::RingOperation::kReleaseGradient:
      executor_->ReleaseGradient(entry.tensor);
      return rank.Complete(entry.tag, absl::OkStatus(), 0);
    case proto::RingOperation::kStep:
    case proto::RingOperation::kBeginStep:
      return HandleStepCommand(rank, entry);
    case proto::RingOperation::kBeginGradients:
    case proto::RingOperation::kGradient:
    case proto::RingOperation::kEndPass:
    case proto::RingOperation::kAwaitGradient:
    case proto::RingOperation::kPublishNorm:
      return gradients_->Handle(rank.number(), entry);
  }
}

// A step, or the announcement of one, by the ring. The rank waits for the answer of a step and for
// nothing else, so it is shown at once, and not after what the turn has yet to do.
void Job::HandleStepCommand(Rank& rank, const proto::SubmissionEntry& entry) {
  std::vector<proto::v1::StepRequest> messages(1);
  if (!messages.front().ParseFromString(rank.rings()->CopyStepCommand(entry.element_count))) {
    return BreakOff(rank, MakeError(ErrorId::kProtocol, "the step command is no StepRequest"));
  }
  if (entry.operation == proto::RingOperation::kBeginStep)
    return rank.Complete(entry.tag, BeginStep(messages), 0);
  AddStep(rank, std::move(messages),
          [&rank, tag = entry.tag](const absl::StatusOr<uint64_t>& durable_step) {
            rank.Complete(tag, durable_step.status(), durable_step.value_or(0));
            if (rank.rings() != nullptr) rank.rings()->Publish();
          });
}

// In pieces of half an extent of fp32, or a whole one of bf16: what is read back begins and ends at
// extents.
void Job::ScratchWrite(Rank& rank, const proto::SubmissionEntry& entry) {
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
                    {RegionOf(rank) + entry.region_offset + begin, size_bytes},
                    context_.Counted([&rank, pieces, tag = entry.tag](const absl::Status& status) {
                      pieces->status.Update(status);
                      if (--pieces->left == 0) rank.Complete(tag, pieces->status, 0);
                    }));
  }
}

// ---- Turns -------------------------------------------------------------------------------------

size_t Job::PollDevices() {
  size_t count = 0;
  if (store_ != nullptr) count += store_->Poll(false);
  if (scratch_ != nullptr) count += scratch_->Poll(false);
  return count;
}

// The last rank's position is the one that updates are paced by.
void Job::TakePositions() {
  std::vector<WeightCache::Position> positions;
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank->rings() != nullptr && rank->is_here())
      positions.push_back({rank->number(), rank->step, rank->position()});
  }
  if (!positions.empty()) cache_->SetPositions(positions);
}

int Job::Turn() {
  StartOffLoop();
  if (OffLoopIsBusy()) {
    if (world_size() > 1) WatchRanks();
    return TurnOffLoop();
  }
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr) continue;
    if (rank->rings() != nullptr) rank->rings()->Awake();
    ReadRing(*rank, kLimits.ring_entries_per_turn);
  }
  AnswerLooks();
  if (world_size() > 1) WatchRanks();  // also for what they have just begun to wait for
  if (phase() == JobPhase::kDrained)
    return SleepLimit(/*waiting=*/false, /*completions=*/0, kNeverSeconds);
  bool waiting = false;
  double scrub_seconds = kNeverSeconds;
  size_t completions = PollDevices();
  if (IsSealed()) {
    TakePositions();
    ShareCores();
    // Transfers before updates: what they hold is held before an update could claim it.
    waiting |= transfers_->Turn();
    StartRecordedStep();
    waiting |= cache_->Turn();
    waiting |= executor_->Turn();
    if (scrubber_ != nullptr) scrub_seconds = scrubber_->Turn(context_.clock->NowSeconds());
    completions += PollDevices();  // hands what was started to the kernel
  }
  RunChanges();
  Drain();
  UpdateHeader();
  return SleepLimit(waiting || !changes_.empty() || phase() == JobPhase::kClosing, completions,
                    scrub_seconds);
}

// Brings to an end what is under way, so that the work off the loop may begin, or waits for it.
int Job::TurnOffLoop() {
  const size_t completions = off_loop_running_ ? 0 : PollDevices();
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank != nullptr && rank->rings() != nullptr) rank->rings()->Publish();
  }
  return completions > 0 ? 0 : LateRankMilliseconds(-1);
}

// Shows the ranks what was done; how long the loop may sleep then.
int Job::SleepLimit(bool waiting, size_t completions, double scrub_seconds) {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank != nullptr && rank->rings() != nullptr) rank->rings()->Publish();
  }
  if (completions > 0 || OffLoopIsBusy()) return 0;
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank != nullptr && rank->rings() != nullptr && !rank->rings()->PrepareToSleep()) return 0;
  }
  if (waiting) return kLimits.room_poll_ms;
  if (std::isinf(scrub_seconds)) return LateRankMilliseconds(-1);
  return LateRankMilliseconds(static_cast<int>(std::min(scrub_seconds, 60.0) * 1e3) + 1);
}

}  // namespace offload::daemon

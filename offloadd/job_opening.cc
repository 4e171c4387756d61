// Job's beginning: from a request to an open store, or none yet, and the memories; and what runs
// off the loop.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/checked.h"
#include "base/durability.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "offloadd/environment.h"
#include "offloadd/job.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/limits.h"
#include "proto/trainer_states.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

absl::StatusOr<aio::Engine> ParseEngine(const std::string& text) {
  if (text.empty()) return aio::Engine::kAuto;
  if (const std::optional<aio::Engine> engine = aio::EngineOfName(text)) return *engine;
  return MakeError(ErrorId::kBadValue, absl::StrCat("io_engine \"", text, "\""),
                   absl::StrCat("Use ", ToAbsl(aio::kEngineNames)));
}

}  // namespace

// ---- The request -------------------------------------------------------------------------------

absl::Status Job::ReadOptions(const proto::v1::OpenJobRequest& request) {
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(request.job()));
  if (request.ram_bytes() > kLimits.ram_bytes_max) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("ram is ", FormatBytes(request.ram_bytes()), ", a job has ",
                                  FormatBytes(kLimits.ram_bytes_max), " at most"),
                     "Set ram to what the job may take of this node's memory");
  }
  if (request.update_threads() > kLimits.update_threads_max) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("update_threads is ", request.update_threads(), ", a job has ",
                                  kLimits.update_threads_max, " at most"),
                     "Set it to the cores that updates may take, or leave it out");
  }
  ram_bytes_ = AlignDown(request.ram_bytes(), proto::kSectorBytes);
  update_threads_asked_ = request.update_threads();
  OFFLOAD_ASSIGN_OR_RETURN(io_.engine, ParseEngine(request.io_engine()));
  OFFLOAD_ASSIGN_OR_RETURN(context_.durability, ParseDurability(request.durability()));
  const std::string& ahead = request.update_in_backward();
  if (!ahead.empty() && ahead != "auto" && ahead != "never") {
    return MakeError(ErrorId::kBadValue, absl::StrCat("update_in_backward \"", ahead, "\""),
                     "Use auto or never");
  }
  context_.updates_ahead = ahead != "never";
  if (request.generations() > swap::kGenerationsMax) {
    return MakeError(ErrorId::kBadValue, absl::StrCat(request.generations(), " spare generations; ",
                                                      "at most ", swap::kGenerationsMax));
  }
  generations_ = request.generations();
  return machine_.CheckPool(identity_.pool);
}

// The first rank of a launch opens the store; the others only get a region each.
void Job::OpenJob(Rank::Member member, const proto::v1::OpenJobRequest& request, OpenDone done) {
  Rank* known = FindRank(member.session);
  if (IsClosing(phase())) return done(Ending());
  if (known == nullptr) {
    const absl::Status status = AddRank(std::move(member), request, &known);
    if (!status.ok()) return done(status);
  } else if (known->is_open || known->calls.open != nullptr) {
    return done(MakeError(ErrorId::kProtocol, "OpenJob for the second time"));
  }
  known->calls.open = std::move(done);
  known->calls.open_since_seconds = context_.clock->NowSeconds();
  AnswerOpening();
}

absl::Status Job::AddRank(Rank::Member member, const proto::v1::OpenJobRequest& request,
                          Rank** added) {
  if (phase() != JobPhase::kOpening) {
    return MakeError(ErrorId::kStoreLocked,
                     absl::StrCat("job \"", identity_.name, "\" runs without this rank, process ",
                                  identity_.pid, " has opened it"));
  }
  const bool is_first = world_size() == 0;
  absl::StatusOr<proto::v1::World> world = WorldOf(request);
  absl::Status status = world.status();
  const std::optional<CpuList> processors = ParseCpuList(request.processors());
  if (!processors.has_value()) {
    status =
        MakeError(ErrorId::kBadValue, absl::StrCat("processors \"", request.processors(), "\""),
                  "Write them as the kernel does, 0-3,8");
  }
  if (status.ok() && is_first) status = ReadOptions(request);
  if (status.ok()) status = membership_.Add(*world, request, member.pid);
  if (!status.ok()) {
    if (is_first) BeginClosing();
    return status;
  }
  processors_ = Union(processors_, *processors);
  RunNearRanks();  // with those that are there, since threads are made before the others come
  if (is_first) {
    ranks_.resize(world_size());
    context_.ranks.resize(world_size());
    join_deadline_seconds_ = context_.clock->NowSeconds() + JoinTimeoutSeconds();
    auto made = std::make_shared<Made>();
    OffLoop([this, made, placement = SlabPlacement()] { OpenStore(placement, *made); },
            [this, made] { FinishOpening(*made); });
  }
  member.number = world->rank();
  std::unique_ptr<Rank>& rank = ranks_[member.number];
  rank = std::make_unique<Rank>(std::move(member));
  *added = rank.get();
  auto made = std::make_shared<absl::Status>();
  OffLoop(
      [this, made, raw = rank.get(), placement = PlacementFor(*processors)] {
        if (!cancelled_) *made = raw->MakeRegion(machine_, ram_bytes_, placement);
      },
      [this, made, raw = rank.get()] {
        if (!made->ok()) return GiveUpOpening(*made);
        context_.ranks[raw->number()] = {.region = raw->region().data(),
                                         .region_bytes = kOpenRegionBytes};
        UpdateMemory(*raw);
        AnswerOpening();
      });
  return absl::OkStatus();
}

Placement Job::PlacementFor(const CpuList& processors) const {
  return machine_.PlacementFor(processors, identity_.is_private);
}

// It is made before it is known where all of several ranks compute.
Placement Job::SlabPlacement() const {
  return PlacementFor(world_size() == 1 ? processors_ : CpuList());
}

// This thread, the loop's, and those that it makes.
void Job::RunNearRanks() {
  const Placement placement = PlacementFor(processors_);
  if (!placement.processors.empty()) machine_.RunThreadOn(placement.processors);
}

// ---- Off the loop ------------------------------------------------------------------------------

// OFFLOADD_LOCK_TIMEOUT: how long to wait for a job that is open elsewhere, or whose killed daemon
// still writes.
swap::StoreOptions Job::MakeStoreOptions() const {
  swap::StoreOptions options;
  options.io = io_;
  options.lock_timeout_seconds = NumberFrom("OFFLOADD_LOCK_TIMEOUT", options.lock_timeout_seconds);
  options.cancelled = [this] { return cancelled_.load(std::memory_order_relaxed); };
  return options;
}

void Job::OpenStore(const Placement& placement, Made& made) {
  const swap::PoolRates rates = machine_.MeasurePool(identity_.pool, io_);
  made.rates = {.read_bytes_per_second = rates.read_bytes_per_second,
                .write_bytes_per_second = rates.write_bytes_per_second,
                .latency_seconds = rates.latency_seconds};
  absl::StatusOr<std::unique_ptr<swap::Store>> store =
      machine_.OpenStore(identity_.pool, identity_.name, MakeStoreOptions());
  if (store.ok()) {
    made.store = *std::move(store);
  } else if (absl::IsNotFound(store.status()) && !ErrorIdOf(store.status()).has_value()) {
    // A new job: models are built through the scratch file, and it tells which engine there is.
    made.status = MakeScratch(0, made);
  } else {
    made.status = store.status();
  }
  if (made.status.ok()) made.status = MakeSlab(placement, made);
}

absl::Status Job::MakeSlab(const Placement& placement, Made& made) const {
  const uint64_t open_bytes = proto::OpenBytes(world_size());
  if (ram_bytes_ < open_bytes) {
    return MakeError(ErrorId::kBudgetTooSmall,
                     absl::StrCat("ram of ", FormatBytes(ram_bytes_), " does not hold the ",
                                  FormatBytes(open_bytes), " of rings and staging"),
                     "Raise ram: offloadctl plan shows the floors of a model");
  }
  OFFLOAD_ASSIGN_OR_RETURN(made.slab,
                           machine_.CreateMemory("offloadd-slab", ram_bytes_, placement));
  OFFLOAD_RETURN_IF_ERROR(made.slab.Allocate(0, proto::PaddedBytes(sizeof(proto::SlabHeader))));
  OFFLOAD_RETURN_IF_ERROR(made.slab.SealForWriting());
  proto::InitializeSlab(made.slab.data());
  return absl::OkStatus();
}

// At least so many bytes of it.
absl::Status Job::MakeScratch(uint64_t bytes, Made& made) {
  if (scratch_ == nullptr && made.scratch == nullptr) {
    swap::ScratchOptions options{.io = io_};
    options.compute = [this](std::function<void()> work, std::function<void()> done) {
      context_.Compute(std::move(work), std::move(done));
    };
    OFFLOAD_ASSIGN_OR_RETURN(made.scratch,
                             machine_.CreateScratch(identity_.pool, std::move(options)));
  }
  swap::Scratch& scratch = made.scratch != nullptr ? *made.scratch : *scratch_;
  return bytes > 0 ? scratch.Reserve(bytes) : absl::OkStatus();
}

void Job::OffLoop(std::function<void()> work, std::function<void()> done) {
  off_loop_.push_back({std::move(work), std::move(done)});
}

void Job::StartOffLoop() {
  while (!off_loop_running_ && !off_loop_.empty() && context_.outstanding == 0) {
    Task task = std::move(off_loop_.front());
    off_loop_.pop_front();
    if (!task.work) {
      task.done();
      continue;
    }
    off_loop_running_ = true;
    UnwatchDevices();
    if (!off_loop_thread_) off_loop_thread_ = machine_.MakeExecutor(1, "job-files");
    off_loop_thread_([this, work = std::move(task.work), done = std::move(task.done)]() mutable {
      work();
      loop_->Post([this, done = std::move(done)] {
        off_loop_running_ = false;
        done();
        WatchDevices();
      });
    });
  }
}

// While another thread has the devices nobody here polls them: what is readable then would stay so,
// and the loop would not sleep.
void Job::UnwatchDevices() {
  for (const int fd : std::exchange(watched_devices_, {})) loop_->Unwatch(fd);
}

void Job::WatchDevices() {
  UnwatchDevices();
  if (store_ != nullptr) watched_devices_.push_back(store_->event_fd());
  if (scratch_ != nullptr) watched_devices_.push_back(scratch_->event_fd());
  for (const int fd : watched_devices_) loop_->Watch(fd, [] {});  // the turn polls
}

void Job::TakeOver(Made& made) {
  if (made.store != nullptr) {
    store_ = std::move(made.store);
    context_.store = store_.get();
    store_->SetWatch(meter_.Watch(activity_.Watch()));
  }
  if (made.scratch != nullptr) {
    scratch_ = std::move(made.scratch);
    context_.scratch = scratch_.get();
    scratch_->SetWatch(meter_.Watch(activity_.Watch()));
  }
}

// ---- Back on the loop --------------------------------------------------------------------------

void Job::FinishOpening(Made& made) {
  if (IsClosing(phase())) return;
  if (!made.status.ok()) return GiveUpOpening(made.status);
  TakeOver(made);
  slab_ = std::move(made.slab);
  context_.slab = slab_.data();
  store_existed_ = store_ != nullptr;
  trainer_states_.resize(world_size());
  if (store_existed_) {
    step_ = store_->committed().epoch;
    const std::vector<std::string> states = proto::DecodeTrainerStates(store_->committed().blob);
    for (uint32_t rank = 0; rank < std::min<size_t>(world_size(), states.size()); ++rank)
      trainer_states_[rank] = states[rank];
  }
  io_engine_ = store_existed_ ? store_->device().engine() : scratch_->device()->engine();
  header()->durable_step.store(step_, std::memory_order_relaxed);
  header()->updated_step.store(step_, std::memory_order_relaxed);
  opened_rates_ = made.rates;
  opened_ = true;
}

// When all ranks have said where they compute: this thread runs there.
void Job::StartWorkers() {
  const Placement placement = PlacementFor(processors_);
  opened_rates_.cores = placement.processors.empty()
                            ? machine_.cores()
                            : static_cast<uint32_t>(placement.processors.size());
  context_.depths = proto::ChooseDepths(opened_rates_, update_threads_asked_);
  context_.write_cost = proto::WriteCost(opened_rates_);
  const uint32_t threads = update_threads_asked_ != 0 ? update_threads_asked_ : opened_rates_.cores;
  context_.workers.Start(machine_.MakeExecutor(threads, "update"), threads);
  const CpuList nodes = SlabPlacement().nodes;
  spdlog::info("job {}: pool {}, {}, ram {}, {} update threads, {}{}{}", identity_.name,
               identity_.pool, io_engine_, FormatBytes(ram_bytes_), context_.depths.update_threads,
               store_existed_ ? absl::StrCat("resumed at step ", step_) : "new",
               world_size() > 1 ? absl::StrCat(", ", world_size(), " ranks") : "",
               nodes.empty() ? "" : absl::StrCat(", memory on NUMA nodes ", FormatCpuList(nodes)));
}

// Nobody is a rank of a job that could not be opened; their memories stay as long as the others'.
void Job::GiveUpOpening(const absl::Status& status) {
  if (end_reason_.ok()) end_reason_ = status;
  BeginClosing();
}

bool Job::OpeningIsDone() const {
  return opened_ && membership_.IsComplete() &&
         std::all_of(context_.ranks.begin(), context_.ranks.end(),
                     [](const RankMemory& memory) { return memory.region != nullptr; });
}

// Everybody at once, when everything is there.
void Job::AnswerOpening() {
  if (phase() == JobPhase::kOpening && OpeningIsDone()) {
    StartWorkers();
    SetPhase(JobPhase::kOpen);
  }
  if (phase() == JobPhase::kOpening || IsClosing(phase())) return;
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank->calls.open == nullptr) continue;
    rank->is_open = true;
    std::exchange(rank->calls.open, nullptr)(OpenReply(*rank));
  }
}

// Names to those who wait the ranks that are missing, again and again, and gives up in the end.
void Job::WatchJoining() {
  if (phase() != JobPhase::kOpening || world_size() < 2 || membership_.IsComplete()) return;
  const double now = context_.clock->NowSeconds();
  if (now >= join_deadline_seconds_) {
    return GiveUpOpening(MakeError(ErrorId::kRankMissing,
                                   absl::StrCat("job \"", identity_.name, "\" waited in vain for ",
                                                membership_.DescribeMissing())));
  }
  proto::v1::OpenJobReply reply;
  for (const uint32_t missing : membership_.Missing()) reply.add_missing_ranks(missing);
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->calls.open == nullptr ||
        now < rank->calls.open_since_seconds + kLimits.rank_report_seconds)
      continue;
    std::exchange(rank->calls.open, nullptr)(reply);
  }
}

proto::v1::OpenJobReply Job::OpenReply(const Rank& rank) const {
  proto::v1::OpenJobReply reply;
  reply.set_exists(store_existed_);
  if (store_existed_) {
    const proto::ResumedState state =
        proto::StateOfRank(proto::DecodeTrainerStates(store_->committed().blob), rank.number());
    reply.set_step(step_);
    reply.set_trainer_state(state.state);
    reply.set_trainer_state_is_own(state.is_own);
    // What cannot be read is told at Seal.
    if (const auto stored = DecodeCatalogue(store_->spec().catalogue); stored.ok()) {
      for (const proto::Tensor& tensor : stored->tensors) reply.add_trainable(tensor.trainable);
    }
  }
  reply.set_slab_bytes(slab_.size_bytes());
  reply.set_region_bytes(rank.region().size_bytes());
  reply.set_io_engine(io_engine_);
  reply.set_pipeline_blocks(context_.depths.pipeline_blocks);
  reply.set_write_cost(context_.write_cost);
  return reply;
}

}  // namespace offload::daemon

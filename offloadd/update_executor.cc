#include "offloadd/update_executor.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/fault_point.h"
#include "offloadd/extent_transfer.h"
#include "offloadd/limits.h"

namespace offload::daemon {
namespace {

// Of the update of one extent, when each finds something that was read wrong.
constexpr int kTriesMax = 3;

// Extents whose state lives in DRAM need no block: one for each thread, the next one of each, and
// two being written.
uint32_t ExtentsInFlightMax(const JobContext& context) {
  return std::max(context.plan.pipeline_blocks, 2 * context.workers.thread_count() + 2);
}

// In the order of their next use.
std::vector<uint32_t> SortedTensors(std::vector<UpdateOrder::Task> tasks) {
  std::ranges::stable_sort(tasks, {}, &UpdateOrder::Task::next_use);
  std::vector<uint32_t> tensors;
  for (const UpdateOrder::Task& task : tasks) tensors.push_back(task.store_tensor);
  return tensors;
}

}  // namespace

UpdateExecutor::UpdateExecutor(JobContext* context, WeightCache* cache, ResidentState* state,
                               Events events)
    : context_(context),
      cache_(cache),
      state_(state),
      events_(std::move(events)),
      write_back_(context, cache, state),
      blocks_(*context),
      read_ahead_(context, state, &blocks_),
      update_ahead_(context, cache, state, &blocks_, &read_ahead_),
      exchange_(context, cache, state, &blocks_),
      pace_(kLimits.schedule_stall_seconds),
      committed_seconds_(context->clock->NowSeconds()),
      extents_in_flight_max_(ExtentsInFlightMax(*context)),
      gradient_offset_(proto::FullStateBytes(context->catalogue)) {}

// ---- A step ------------------------------------------------------------------------------------

void UpdateExecutor::Begin(StepPlan plan) {
  OFFLOAD_CHECK(MayBegin() && unfinished_.empty()) << "step " << plan.step;
  step_ = plan.step;
  const Durability& durability = context_->durability;
  step_is_checkpoint_ =
      durability.steps > 0
          ? *step_ % durability.steps == 0
          : !commit_.has_value() &&  // from whose end the next interval counts
                context_->clock->NowSeconds() - committed_seconds_ >= durability.seconds;
  context_->unsettled_puts = false;
  context_->is_partial = plan.is_partial;
  if (plan.trainer_state.has_value()) trainer_state_ = std::move(plan.trainer_state);
  hurry_ = false;
  updated_ahead_ = update_ahead_.expects() && update_ahead_.HasStarted();
  update_ahead_.BeginStep(plan);
  pace_.Begin(cache_->position(), context_->clock->NowSeconds());
  std::vector<UpdateOrder::Task> order;
  for (TaskPlan& task_plan : plan.tasks) {
    const uint32_t store_tensor = task_plan.store_tensor;
    cache_->MarkPending(task_plan.tensors);
    order.push_back({store_tensor, cache_->NextUse(store_tensor)});
    Task task;
    task.extent_count = proto::ExtentCount(context_->store_tensor(store_tensor).element_count);
    task.plan = std::move(task_plan);
    task.norms_only = kernels::NeedsNorms(*task.plan.members.front().optimizer);
    if (task.norms_only) task.norms.resize(task.extent_count);
    unfinished_.emplace(store_tensor, std::move(task));
  }
  uncomputed_tasks_ = static_cast<uint32_t>(unfinished_.size());
  read_ahead_.BeginStep(SortedTensors(order));
  order_.Reset(std::move(order));
  if (uncomputed_tasks_ == 0) events_.on_updated(*step_);
}

// Beside a commit nothing is written that is not in it.
bool UpdateExecutor::HasNews() const {
  if (written_step_.has_value()) return true;
  if (commit_.has_value()) return false;
  return context_->store->has_uncommitted_writes() ||
         context_->writes_in_flight > context_->writes_aside || !state_->unwritten().empty();
}

bool UpdateExecutor::HasUncommitted() const {
  return !context_->is_unsettled() && (commit_.has_value() || HasNews());
}

void UpdateExecutor::CommitSoon() {
  if (context_->is_partial) return;
  const bool is_held = commit_.has_value() && commit_->epoch == step_;
  if ((step_.has_value() && !is_held) || (!context_->unsettled_puts && HasNews()))
    commit_asked_ = true;
}

void UpdateExecutor::Demand(uint32_t store_tensor) {
  order_.Demand(store_tensor);
  if (commit_.has_value() && write_back_.Awaits(store_tensor)) write_back_.Hasten(store_tensor);
}

void UpdateExecutor::TakeDepths() {
  extents_in_flight_max_ = ExtentsInFlightMax(*context_);
  exchange_.Want(context_->depths.pipeline_blocks);
}

void UpdateExecutor::Reorder() {
  order_.Reorder([this](uint32_t store_tensor) { return cache_->NextUse(store_tensor); });
}

bool UpdateExecutor::Turn() {
  if (context_->failed()) return false;
  while (extents_in_flight_ < extents_in_flight_max_) {
    for (auto task = started_.begin();
         task != started_.end() && extents_in_flight_ < extents_in_flight_max_;) {
      StartExtents(**task);
      task = HasMore(**task) ? std::next(task) : started_.erase(task);
    }
    if (!started_.empty() || !StartTask()) break;
  }
  if (step_.has_value() ? unfinished_.empty() : CommitsStep()) FinishStep();
  ContinueCommit();
  if (MayWorkAhead()) WorkAhead();
  return !order_.empty() && extents_in_flight_ < extents_in_flight_max_;
}

// Beside a commit: an update that writes would write into its epoch.
bool UpdateExecutor::MayChange(uint32_t store_tensor) const {
  return !commit_.has_value() ||
         (state_->LeavesAll(store_tensor) && !write_back_.Awaits(store_tensor));
}

Readiness UpdateExecutor::Look(uint32_t store_tensor) {
  if (!MayChange(store_tensor)) return Readiness::kBusy;
  const Task& task = unfinished_.at(store_tensor);
  if (cache_->held(store_tensor) || cache_->loading(store_tensor) ||
      update_ahead_.IsUnderWay(store_tensor))
    return Readiness::kBusy;
  for (const uint32_t tensor : task.plan.tensors) {
    if (!cache_->Unused(tensor)) return Readiness::kBusy;
  }
  // The members that are not updated have to be there, too.
  if (context_->store_tensor(store_tensor).bundle && !cache_->loaded(store_tensor)) {
    cache_->EnsureLoading(store_tensor);
    return Readiness::kBusy;
  }
  return cache_->HasSlot(store_tensor) ? Readiness::kReady : Readiness::kNeedsRoom;
}

bool UpdateExecutor::StartTask() {
  if (order_.empty()) return false;
  const bool polite = pace_.Polite(hurry_ || !context_->HasPins(), cache_->has_schedule(),
                                   cache_->position(), context_->clock->NowSeconds());
  bool had_weights = true;
  const std::optional<uint32_t> store_tensor = order_.Next(
      polite, [this](uint32_t tensor) { return Look(tensor); },
      [this, &had_weights](uint32_t tensor, std::optional<uint64_t> needed) {
        had_weights = false;
        // The rank has moved since the tasks were sorted; distances are compared from where it is
        // now.
        if (needed.has_value()) needed = cache_->NextUse(tensor);
        return cache_->Claim(tensor, needed);
      });
  if (!store_tensor.has_value()) return false;
  Task& task = unfinished_.at(*store_tensor);
  if (!cache_->claimed(*store_tensor)) {
    had_weights = cache_->loaded(*store_tensor);
    cache_->Claim(*store_tensor, std::nullopt);
  }
  task.reads_weights = !had_weights;
  started_.push_back(&task);
  return true;
}

std::string UpdateExecutor::AuditPlaces() const {
  const auto held_back = std::ranges::count_if(
      held_back_, [](const auto& extent) { return extent->block != nullptr; });
  return exchange_.Audit(read_ahead_.piece_count() + static_cast<uint64_t>(held_back));
}

// ---- Before the step ---------------------------------------------------------------------------

void UpdateExecutor::Expect(StepPlan plan) {
  if (context_->updates_ahead) update_ahead_.Expect(std::move(plan));
}

bool UpdateExecutor::Forget(uint32_t store_tensor) {
  read_ahead_.Forget(store_tensor);
  return update_ahead_.Forget(store_tensor);
}

// Work ahead binds the open sequence and the state that the store has now: nothing may be about to
// change either. Who waits for weights goes first.
bool UpdateExecutor::MayWorkAhead() const {
  return context_->published && !busy() && !hurry_ && !commit_asked_ && !context_->commit_wanted &&
         !context_->changing_snapshots && !context_->unsettled_puts && !cache_->demanded();
}

// Updates go before reads: they end in the backward, and what is read stays in its block.
void UpdateExecutor::WorkAhead() {
  do {
    update_ahead_.Turn();
  } while (update_ahead_.WaitsForBlocks() && read_ahead_.GiveBack());
  const bool updates = update_ahead_.expects() ? update_ahead_.HasWork() : updated_ahead_;
  if (!context_->reads_ahead || updates || cache_->reading()) return;
  read_ahead_.Turn([this](uint32_t store_tensor, uint32_t index) {
    return update_ahead_.Has(store_tensor, index);
  });
}

// ---- An extent ---------------------------------------------------------------------------------

void UpdateExecutor::StartExtents(Task& task) {
  const uint32_t resident = context_->plan.state_resident[task.plan.store_tensor];
  while (!task.again.empty() && extents_in_flight_ < extents_in_flight_max_) {
    const uint32_t index = task.again.back();
    task.again.pop_back();
    if (StartExtent(task, index)) continue;
    task.again.push_back(index);
    return;
  }
  while (task.next_extent < task.extent_count && extents_in_flight_ < extents_in_flight_max_) {
    // Counted before the extent runs: its end may begin the task anew.
    if (!StartExtent(task, ExtentAtTurn(task.next_extent++, task.extent_count, resident))) {
      --task.next_extent;
      break;
    }
  }
}

// The task has more to be started than was thought.
void UpdateExecutor::StartAgain(Task& task) {
  if (std::find(started_.begin(), started_.end(), &task) == started_.end())
    started_.push_back(&task);
}

bool UpdateExecutor::NeedsBlock(const Task& task, uint32_t index) const {
  if (task.plan.spilled) return true;
  const uint32_t store_tensor = task.plan.store_tensor;
  if (state_->Has(store_tensor, index)) return false;
  return proto::StateBytes(context_->store_tensor(store_tensor), index) > 0;
}

std::shared_ptr<UpdateExecutor::Extent> UpdateExecutor::MakeExtent(Task& task, uint32_t index) {
  auto extent = std::make_shared<Extent>();
  extent->task = &task;
  extent->update = DescribeExtent(*context_, task.plan.store_tensor, index, task.plan.members);
  extent->update.norms_only = task.norms_only;
  ++extents_in_flight_;
  return extent;
}

bool UpdateExecutor::StartExtent(Task& task, uint32_t index) {
  const uint32_t store_tensor = task.plan.store_tensor;
  if (std::optional<UpdateAhead::Updated> updated = update_ahead_.Take(store_tensor, index)) {
    CompareGradient(task, index, *std::move(updated));
    return true;
  }
  std::shared_ptr<ReadAhead::Piece> piece;
  const bool needs_block = NeedsBlock(task, index);
  if (needs_block) {
    piece = read_ahead_.Take(store_tensor, index);
    if (piece == nullptr && !HasBlock()) return false;
  }
  const std::shared_ptr<Extent> extent = MakeExtent(task, index);
  if (needs_block) extent->block = piece != nullptr ? piece->block : blocks_.Take();
  PlacePlanes(*extent);
  Read(extent, piece);
  return true;
}

PlaneMemory UpdateExecutor::PlaceWeights(const ExtentUpdate& update) const {
  const proto::StoreTensor& tensor = context_->store_tensor(update.store_tensor);
  return {.bytes = cache_->slot(update.store_tensor) + WeightExtentOffset(tensor, update.index),
          .size_bytes = proto::PaddedBytes(WeightBytes(tensor, update.elements))};
}

void UpdateExecutor::PlacePlanes(Extent& extent) {
  ExtentUpdate& update = extent.update;
  const proto::StoreTensor& tensor = context_->store_tensor(update.store_tensor);
  update.planes = state_->Has(update.store_tensor, update.index)
                      ? state_->Planes(update.store_tensor, update.index)
                      : StatePlanes(tensor, update.index, extent.block);
  update.planes[proto::Plane::kWeight] = PlaceWeights(update);
  for (const proto::Plane plane : proto::kUpdatedPlanes) {
    if (update.planes[plane].bytes == nullptr) continue;
    update.left[plane] = state_->Leaves(update.store_tensor, update.index, plane);
    update.verifies_first |= state_->IsUnwritten(update.store_tensor, update.index, plane);
  }
}

// Everything that is not in memory yet. The extra count keeps the extent from computing before all
// reads are under way.
void UpdateExecutor::Read(const std::shared_ptr<Extent>& extent,
                          const std::shared_ptr<ReadAhead::Piece>& piece) {
  ExtentUpdate& update = extent->update;
  const auto done = [this, extent](const absl::Status& status) { FinishRead(extent, status); };
  const bool state_is_there = piece != nullptr || state_->Loaded(update.store_tensor, update.index);
  PlaneFlags wanted;
  for (const proto::Plane plane : proto::kUpdateOnlyPlanes) {
    wanted[plane] = !state_is_there;
    if (piece != nullptr) update.planes[plane].stamp = piece->update.planes[plane].stamp;
  }
  wanted[proto::Plane::kWeight] = extent->task->reads_weights;
  extent->transfers = 1;
  if (piece != nullptr && !piece->is_read) {
    ++extent->transfers;
    piece->on_read = done;
  }
  if (piece != nullptr) extent->status.Update(piece->status);
  extent->transfers += ReadPlanes(*context_, wanted, update, done);
  const absl::StatusOr<uint32_t> ties = ReadTies(*context_, *state_, update, done);
  extent->transfers += ties.value_or(0);
  ReadGradient(extent);
  FinishRead(extent, ties.status());
}

void UpdateExecutor::ReadGradient(const std::shared_ptr<Extent>& extent) {
  if (!extent->task->plan.spilled) return;
  const ExtentUpdate& update = extent->update;
  const proto::StoreTensor& tensor = context_->store_tensor(update.store_tensor);
  std::byte* gradient = extent->block + gradient_offset_;
  extent->update.spilled_gradient = gradient;
  ++extent->transfers;
  context_->scratch->Read(
      extent->task->plan.scratch_offset + WeightExtentOffset(tensor, update.index),
      {gradient, proto::PaddedBytes(WeightBytes(tensor, update.elements))},
      context_->Counted([this, extent](absl::Status status) { FinishRead(extent, status); }));
}

// Planes that were in memory and are spoiled have the same bytes in the store: otherwise the update
// would have verified first.
void UpdateExecutor::ReadAgain(const std::shared_ptr<Extent>& extent) {
  ExtentUpdate& update = extent->update;
  const auto read_wrong = [&](proto::Plane plane, std::byte* bytes, const swap::Stamp& stamp) {
    const swap::ExtentId id = ExtentIdOf(update.store_tensor, plane, update.index);
    if (extent->tries == kTriesMax) return extent->status.Update(ChecksumError(*update.store, id));
    ++extent->transfers;
    context_->store->ReadAgain(
        {id, bytes}, stamp,
        context_->Counted([this, extent](absl::Status status) { FinishRead(extent, status); }));
  };
  extent->transfers = 1;
  PlaneFlags spoiled;
  for (const proto::Plane plane : proto::kUpdatedPlanes) {
    const PlaneMemory& memory = update.planes[plane];
    if (update.wrong[plane]) read_wrong(plane, memory.bytes, *memory.stamp);
    spoiled[plane] = update.is_spoiled && !update.wrong[plane];
  }
  if (update.wrong[proto::Plane::kTies])
    read_wrong(proto::Plane::kTies, update.ties_in.plane->data(), *update.ties_in.stamp);
  extent->transfers += ReadPlanes(*context_, spoiled, update, [this, extent](absl::Status status) {
    FinishRead(extent, status);
  });
  ++extent->tries;
  FinishRead(extent, absl::OkStatus());
}

// The gradient that the update before the step has taken may not be the step's.
void UpdateExecutor::CompareGradient(Task& task, uint32_t index, UpdateAhead::Updated updated) {
  const std::shared_ptr<Extent> extent = MakeExtent(task, index);
  extent->ahead = std::move(updated);
  auto is_right = std::make_shared<bool>(false);
  context_->Compute(
      [extent, is_right] {
        *is_right = DigestGradients(extent->update) == extent->ahead->gradient_digest;
      },
      [this, extent, is_right] { Adopt(extent, *is_right); });
}

// What was written becomes the step's, and its weights come to their slot; or the extent begins
// anew.
void UpdateExecutor::Adopt(const std::shared_ptr<Extent>& extent, bool is_right) {
  update_ahead_.Judge(is_right);
  if (context_->failed()) return Release(*extent);
  ExtentUpdate& update = extent->update;
  if (!is_right) {
    Release(*extent);
    extent->task->again.push_back(update.index);
    return StartAgain(*extent->task);
  }
  if (absl::Status status = context_->store->Adopt(extent->ahead->writes, extent->ahead->sequence);
      !status.ok()) {
    context_->fail(status);
    return Release(*extent);
  }
  update.members = {};
  update.planes[proto::Plane::kWeight] = PlaceWeights(update);
  update.left[proto::Plane::kWeight] = true;
  PlaneFlags wanted;
  wanted[proto::Plane::kWeight] = true;
  extent->transfers =
      ReadPlanes(*context_, wanted, update,
                 [this, extent](const absl::Status& status) { FinishRead(extent, status); });
}

void UpdateExecutor::FinishRead(const std::shared_ptr<Extent>& extent, const absl::Status& status) {
  extent->status.Update(status);
  if (--extent->transfers > 0) return;
  if (!extent->status.ok()) context_->fail(extent->status);
  if (context_->failed()) return Release(*extent);
  Compute(extent);
}

void UpdateExecutor::Compute(const std::shared_ptr<Extent>& extent) {
  context_->Compute([extent] { RunExtentUpdate(extent->update); },
                    [this, extent] { FinishCompute(extent); });
}

void UpdateExecutor::FinishCompute(const std::shared_ptr<Extent>& extent) {
  const ExtentUpdate& update = extent->update;
  if (!update.status.ok()) context_->fail(update.status);
  if (context_->failed()) return Release(*extent);
  if (update.HasWrong()) return ReadAgain(extent);
  if (state_->Has(update.store_tensor, update.index))
    state_->SetLoaded(update.store_tensor, update.index);
  if (extent->task->norms_only) return FinishNorms(*extent);
  if (!extent->ahead.has_value()) state_->MarkUnwritten(update);
  Task& task = *extent->task;
  if (++task.computed == task.extent_count) {
    cache_->Updated(update.store_tensor);
    cache_->Hold(update.store_tensor);  // until the last write
    events_.on_computed(task.plan.tensors);
    if (--uncomputed_tasks_ == 0) events_.on_updated(*step_);
  }
  Write(extent);  // the task may end here, when nothing of it is written
}

// After the last extent the task begins anew, with its trust ratios; its weights are in the slab by
// then.
void UpdateExecutor::FinishNorms(Extent& extent) {
  Task& task = *extent.task;
  task.norms[extent.update.index] = std::move(extent.update.norms);
  Release(extent);
  if (++task.computed < task.extent_count) return;
  for (size_t member = 0; member < task.plan.members.size(); ++member) {
    std::vector<kernels::Norms> blocks;
    for (const std::vector<kernels::Norms>& extent_norms : task.norms)
      blocks.push_back(extent_norms[member]);
    task.plan.members[member].trust_ratio = kernels::TrustRatio(blocks);
  }
  task.norms_only = false;
  task.norms.clear();
  task.computed = 0;
  task.next_extent = 0;
  task.reads_weights = false;
  StartAgain(task);
}

void UpdateExecutor::Write(const std::shared_ptr<Extent>& extent) {
  // Of what stays in memory these alone are written.
  if (commit_.has_value() && extent->update.ties_out.plane.has_value()) {
    held_back_.push_back(extent);
    return;
  }
  const std::vector<swap::WriteRequest> requests = WritesOf(extent->update);
  if (requests.empty()) return FinishWrite(extent, absl::OkStatus());
  context_->store->Write(requests, context_->CountedWrite([this, extent](absl::Status status) {
    FinishWrite(extent, status);
  }));
}

void UpdateExecutor::FinishWrite(const std::shared_ptr<Extent>& extent,
                                 const absl::Status& status) {
  if (!status.ok()) context_->fail(status);
  Release(*extent);
  Task& task = *extent->task;
  if (context_->failed() || ++task.written < task.extent_count) return;
  const uint32_t store_tensor = task.plan.store_tensor;
  cache_->Unhold(store_tensor);
  unfinished_.erase(store_tensor);
  if (CommitsStep() && !commit_.has_value()) write_back_.Allow(store_tensor);
}

void UpdateExecutor::Release(Extent& extent) {
  if (extent.block != nullptr) blocks_.Return(std::exchange(extent.block, nullptr));
  --extents_in_flight_;
}

// ---- The commit --------------------------------------------------------------------------------

// When a step has ended, before the next one begins and before anything is done ahead of it.
void UpdateExecutor::ExchangePlaces() {
  const bool is_ahead = read_ahead_.piece_count() > 0 || !update_ahead_.empty();
  if (step_.has_value() || commit_.has_value() || is_ahead || !exchange_.Turn()) return;
  has_exchanged_ = true;
  extents_in_flight_max_ = ExtentsInFlightMax(*context_);
}

// After the last write of a step, or when a commit is asked for without one. (Puts that begin while
// one is asked for would come into it, so none does.)
void UpdateExecutor::FinishStep() {
  if (CommitsStep()) {
    if (commit_.has_value() || context_->changing_snapshots) return;  // in a later turn
    BeginCommit();
    if (!step_.has_value() || !context_->durability.has_intervals()) return;
  } else {
    written_step_ = step_;
  }
  hurry_ = false;  // who waited for the step has it
  const uint64_t written = *std::exchange(step_, std::nullopt);
  ExchangePlaces();
  events_.on_written(written);
}

// Of all that there is.
void UpdateExecutor::BeginCommit() {
  const swap::CommitInfo& committed = context_->store->committed();
  commit_.emplace();
  commit_->epoch = step_.value_or(written_step_.value_or(committed.epoch));
  commit_->blob = trainer_state_.has_value() ? *std::move(trainer_state_) : committed.blob;
  trainer_state_.reset();
  written_step_.reset();
  commit_asked_ = false;
  context_->commit_wanted = true;
  write_back_.AllowAll();
}

void UpdateExecutor::ContinueCommit() {
  if (!commit_.has_value() || commit_->in_store) return;
  if (!write_back_.done() || context_->writes_in_flight > 0) return;
  commit_->in_store = true;
  FaultPoint("job.before_commit");
  context_->store->Commit(
      commit_->epoch, std::move(commit_->blob),
      context_->Counted([this](const absl::Status& status) { FinishCommit(status); }));
}

void UpdateExecutor::FinishCommit(const absl::Status& status) {
  const uint64_t epoch = commit_->epoch;
  commit_.reset();
  context_->commit_wanted = false;
  if (!status.ok()) return context_->fail(status);
  committed_seconds_ = context_->clock->NowSeconds();
  if (!context_->durability.has_intervals()) step_.reset();
  if (!step_.has_value()) hurry_ = false;  // who waited has what there was
  ExchangePlaces();
  for (const std::shared_ptr<Extent>& extent : std::exchange(held_back_, {})) Write(extent);
  events_.on_committed(epoch);
}

}  // namespace offload::daemon

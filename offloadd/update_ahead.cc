#include "offloadd/update_ahead.h"

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/fault_point.h"
#include "offloadd/extent_transfer.h"

namespace offload::daemon {
namespace {

// Of its first extent, which is as large as any.
uint64_t WeightBlockBytes(const proto::StoreTensor& tensor) {
  return proto::PaddedBytes(WeightBytes(tensor, proto::ExtentElements(tensor.element_count, 0)));
}

bool SaySame(const kernels::OptimizerSpec& a, const kernels::OptimizerSpec& b) {
  return a.index() == b.index() && a.averaging() == b.averaging() &&
         std::ranges::equal(a.values(), b.values(), [](double x, double y) {
           return std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y);
         });
}

bool SaySame(const MemberUpdate& a, const MemberUpdate& b) {
  return a.begin == b.begin && a.count == b.count && a.step == b.step && a.gradient == b.gradient &&
         std::bit_cast<uint64_t>(a.gradient_scale) == std::bit_cast<uint64_t>(b.gradient_scale) &&
         SaySame(*a.optimizer, *b.optimizer);
}

}  // namespace

bool SaySame(const TaskPlan& a, const TaskPlan& b) {
  return a.store_tensor == b.store_tensor && a.tensors == b.tensors && a.spilled == b.spilled &&
         a.scratch_offset == b.scratch_offset &&
         std::ranges::equal(a.members, b.members, [](const MemberUpdate& x, const MemberUpdate& y) {
           return SaySame(x, y);
         });
}

// ---- What is expected --------------------------------------------------------------------------

void UpdateAhead::Expect(StepPlan plan) {
  expects_ = true;
  has_started_ = false;
  allowed_extents_ = 0;
  released_.clear();
  for (auto& [store_tensor, tensor] : tensors_) {
    if (!tensor.is_of_step) Forget(tensor);
  }
  std::erase_if(tensors_, [](const auto& entry) { return entry.second.under_way == 0; });
  policy_.Judge(used_extents_ - std::exchange(judged_used_, used_extents_),
                lost_extents_ - std::exchange(judged_lost_, lost_extents_));
  if (context_->durability.has_intervals()) return;
  uint64_t extents = 0;
  for (TaskPlan& task : plan.tasks) {
    const uint32_t store_tensor = task.store_tensor;
    if (!IsEligible(task) || tensors_.count(store_tensor) != 0) continue;
    Tensor& tensor = tensors_[store_tensor];
    tensor.plan = std::move(task);
    tensor.is_waiting = true;
    ++waiting_tensors_;
    const uint32_t count = proto::ExtentCount(context_->store_tensor(store_tensor).element_count);
    for (uint32_t index = 0; index < count; ++index) extents += !state_->Has(store_tensor, index);
  }
  allowed_extents_ = policy_.Allowed(extents);
}

bool UpdateAhead::IsEligible(const TaskPlan& plan) const {
  const proto::StoreTensor& tensor = context_->store_tensor(plan.store_tensor);
  return !tensor.bundle && !plan.spilled && !kernels::NeedsNorms(*plan.members.front().optimizer) &&
         WeightBlockBytes(tensor) <= blocks_->block_bytes() &&
         blocks_->count() >= (NeedsTwoBlocks(plan.store_tensor) ? 2 : 1);
}

// Blocks have room for a gradient where some are spilled; those of `store_tensor` are not.
bool UpdateAhead::NeedsTwoBlocks(uint32_t store_tensor) const {
  return proto::FullStateBytes(context_->catalogue) +
             WeightBlockBytes(context_->store_tensor(store_tensor)) >
         blocks_->block_bytes();
}

void UpdateAhead::Release(uint32_t tensor) {
  const uint32_t store_tensor = context_->catalogue.placements[tensor].store_tensor;
  const auto found = tensors_.find(store_tensor);
  if (!expects_ || found == tensors_.end()) return;
  Tensor& released = found->second;
  if (released.is_forgotten || released.is_of_step || std::exchange(released.is_released, true))
    return;
  released_.push_back(store_tensor);
}

// Nothing of it may be newer than the last commit: its other place would be in use.
bool UpdateAhead::IsEligible(uint32_t store_tensor, uint32_t index) const {
  if (state_->Has(store_tensor, index)) return false;
  const uint64_t open = context_->store->open_sequence();
  const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
  return std::ranges::none_of(proto::kUpdatedPlanes, [&](proto::Plane plane) {
    return tensor.planes.Has(plane) &&
           context_->store->stamp(ExtentIdOf(store_tensor, plane, index)).sequence == open;
  });
}

// ---- An extent ---------------------------------------------------------------------------------

void UpdateAhead::Turn() {
  while (WaitsForBlocks()) {
    const uint32_t store_tensor = released_.front();
    Tensor& tensor = tensors_.at(store_tensor);
    const uint32_t extents = proto::ExtentCount(context_->store_tensor(store_tensor).element_count);
    if (tensor.next_extent == extents) {
      StopWaiting(tensor);
      released_.pop_front();
      continue;
    }
    if (IsEligible(store_tensor, tensor.next_extent)) {
      if (!Start(tensor, tensor.next_extent)) return;
      --allowed_extents_;
      has_started_ = true;
    }
    ++tensor.next_extent;
  }
}

// False: there are not enough blocks. What was read ahead is of use here, too.
bool UpdateAhead::Start(Tensor& tensor, uint32_t index) {
  const uint32_t store_tensor = tensor.plan.store_tensor;
  const bool is_read = read_ahead_->Has(store_tensor, index);
  const bool needs_two = NeedsTwoBlocks(store_tensor);
  if (blocks_->free_count() + is_read < size_t{1} + needs_two) return false;
  ++tensor.under_way;
  auto extent = std::make_shared<Extent>();
  const std::shared_ptr<ReadAhead::Piece> piece = read_ahead_->Take(store_tensor, index);
  extent->state_block = piece != nullptr ? piece->block : blocks_->Take();
  if (needs_two) extent->weight_block = blocks_->Take();
  extent->update = DescribeExtent(*context_, store_tensor, index, tensor.plan.members);
  extent->update.takes_gradient_digest = true;
  PlacePlanes(*extent);
  Read(extent, piece);
  return true;
}

// Weights that are in the slab are taken from there, and stay.
void UpdateAhead::PlacePlanes(Extent& extent) {
  ExtentUpdate& update = extent.update;
  const proto::StoreTensor& tensor = context_->store_tensor(update.store_tensor);
  update.planes = StatePlanes(tensor, update.index, extent.state_block);
  PlaneMemory& weight = update.planes[proto::Plane::kWeight];
  weight.bytes = extent.weight_block != nullptr
                     ? extent.weight_block
                     : extent.state_block + proto::FullStateBytes(context_->catalogue);
  weight.size_bytes = proto::PaddedBytes(WeightBytes(tensor, update.elements));
  if (!cache_->loaded(update.store_tensor)) return;
  cache_->Hold(update.store_tensor);
  extent.holds_weights = true;
  update.weight_source =
      cache_->slot(update.store_tensor) + WeightExtentOffset(tensor, update.index);
}

// The extra count keeps the extent from computing before all reads are under way.
void UpdateAhead::Read(const std::shared_ptr<Extent>& extent,
                       const std::shared_ptr<ReadAhead::Piece>& piece) {
  const auto done = [this, extent](const absl::Status& status) { FinishRead(extent, status); };
  PlaneFlags wanted;
  for (const proto::Plane plane : proto::kUpdateOnlyPlanes) {
    wanted[plane] = piece == nullptr;
    if (piece != nullptr) extent->update.planes[plane].stamp = piece->update.planes[plane].stamp;
  }
  wanted[proto::Plane::kWeight] = !extent->holds_weights;
  extent->transfers = 1;
  if (piece != nullptr && !piece->is_read) {
    ++extent->transfers;
    piece->on_read = done;
  }
  if (piece != nullptr) extent->status.Update(piece->status);
  extent->transfers += ReadPlanes(*context_, wanted, extent->update, done);
  const absl::StatusOr<uint32_t> ties = ReadTies(*context_, *state_, extent->update, done);
  extent->transfers += ties.value_or(0);
  FinishRead(extent, ties.status());
}

void UpdateAhead::FinishRead(const std::shared_ptr<Extent>& extent, const absl::Status& status) {
  extent->status.Update(status);
  if (--extent->transfers > 0) return;
  // The step itself will meet what is wrong, and say it.
  if (!extent->status.ok() || context_->failed()) return End(*extent);
  context_->Compute([extent] { RunExtentUpdate(extent->update); },
                    [this, extent] { Write(extent); });
}

void UpdateAhead::Write(const std::shared_ptr<Extent>& extent) {
  const ExtentUpdate& update = extent->update;
  const bool is_late = context_->commit_wanted || context_->changing_snapshots ||
                       update.sequence != context_->store->open_sequence();
  if (!update.status.ok() || update.HasWrong() || is_late || context_->failed() ||
      tensors_.at(update.store_tensor).is_forgotten)
    return End(*extent);
  FaultPoint("job.update_ahead");
  extent->writes = WritesOf(update);
  ++context_->writes_aside;
  context_->store->WriteAside(extent->writes,
                              context_->CountedWrite([this, extent](const absl::Status& status) {
                                --context_->writes_aside;
                                FinishWrite(extent, status);
                              }));
}

void UpdateAhead::FinishWrite(const std::shared_ptr<Extent>& extent, const absl::Status& status) {
  if (!status.ok()) context_->fail(status);
  const ExtentUpdate& update = extent->update;
  Tensor& tensor = tensors_.at(update.store_tensor);
  if (tensor.is_forgotten) {
    ++lost_extents_;
  } else if (!context_->failed()) {
    Updated updated{update.sequence, std::move(extent->writes), update.gradient_digest,
                    update.roots};
    for (swap::WriteRequest& write : updated.writes) write.bytes = nullptr;
    if (tensor.is_of_step) {
      of_step_[{update.store_tensor, update.index}] = std::move(updated);
    } else {
      tensor.updated[update.index] = std::move(updated);
    }
  }
  End(*extent);
}

void UpdateAhead::End(Extent& extent) {
  blocks_->Return(extent.state_block);
  if (extent.weight_block != nullptr) blocks_->Return(extent.weight_block);
  const uint32_t store_tensor = extent.update.store_tensor;
  if (extent.holds_weights) cache_->Unhold(store_tensor);
  const auto tensor = tensors_.find(store_tensor);
  if (--tensor->second.under_way > 0) return;
  if (tensor->second.is_forgotten || tensor->second.is_of_step) tensors_.erase(tensor);
}

// ---- The step ----------------------------------------------------------------------------------

void UpdateAhead::BeginStep(const StepPlan& plan) {
  expects_ = false;
  released_.clear();
  allowed_extents_ = 0;
  std::unordered_map<uint32_t, const TaskPlan*> tasks;
  for (const TaskPlan& task : plan.tasks) tasks[task.store_tensor] = &task;
  lost_extents_ += of_step_.size();
  of_step_.clear();
  for (auto& [store_tensor, tensor] : tensors_) {
    StopWaiting(tensor);
    const auto task = tasks.find(store_tensor);
    tensor.is_of_step =
        !tensor.is_forgotten && task != tasks.end() && SaySame(tensor.plan, *task->second);
    if (!tensor.is_of_step) Forget(tensor);
    for (auto& [index, updated] : std::exchange(tensor.updated, {}))
      of_step_[{store_tensor, index}] = std::move(updated);
  }
  std::erase_if(tensors_, [](const auto& entry) { return entry.second.under_way == 0; });
}

std::optional<UpdateAhead::Updated> UpdateAhead::Take(uint32_t store_tensor, uint32_t index) {
  const auto found = of_step_.find({store_tensor, index});
  if (found == of_step_.end()) return std::nullopt;
  Updated updated = std::move(found->second);
  of_step_.erase(found);
  const uint32_t* const roots =
      context_->square_roots == nullptr ? nullptr : context_->square_roots->corrections();
  if (updated.sequence == context_->store->open_sequence() && updated.roots == roots)
    return updated;
  ++lost_extents_;
  return std::nullopt;
}

bool UpdateAhead::Has(uint32_t store_tensor, uint32_t index) const {
  const auto found = tensors_.find(store_tensor);
  return found != tensors_.end() && !found->second.is_forgotten && !found->second.is_of_step &&
         index < found->second.next_extent;
}

bool UpdateAhead::IsUnderWay(uint32_t store_tensor) const {
  const auto found = tensors_.find(store_tensor);
  return found != tensors_.end() && found->second.under_way > 0;
}

bool UpdateAhead::Forget(uint32_t store_tensor) {
  const auto found = tensors_.find(store_tensor);
  if (found == tensors_.end()) return true;
  Forget(found->second);
  if (found->second.under_way > 0) return false;
  tensors_.erase(found);
  return true;
}

void UpdateAhead::Forget(Tensor& tensor) {
  lost_extents_ += tensor.updated.size();
  tensor.updated.clear();
  tensor.is_forgotten = true;
  StopWaiting(tensor);
  std::erase(released_, tensor.plan.store_tensor);
}

}  // namespace offload::daemon

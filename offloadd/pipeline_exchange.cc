#include "offloadd/pipeline_exchange.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"

namespace offload::daemon {
namespace {

constexpr uint32_t kMovesMax = 64;  // of a turn: each looks through all tensors

uint32_t Extents(const JobContext& context, uint32_t store_tensor) {
  const proto::StoreTensor& tensor = context.store_tensor(store_tensor);
  const bool has_state = tensor.trainable && proto::StateBytes(tensor, 0) > 0;
  return has_state ? proto::ExtentCount(tensor.element_count) : 0;
}

double Share(const JobContext& context, uint32_t store_tensor) {
  return static_cast<double>(context.plan.state_resident[store_tensor]) /
         std::max(1u, Extents(context, store_tensor));
}

}  // namespace

PipelineExchange::PipelineExchange(JobContext* context, const WeightCache* cache,
                                   ResidentState* state, PipelineBlocks* blocks)
    : context_(context), cache_(cache), state_(state), blocks_(blocks) {
  place_count_ = blocks_->count();
  for (uint32_t i = 0; i < context_->catalogue.store_tensors.size(); ++i) {
    const uint32_t kept = context_->plan.state_resident[i];
    place_count_ += kept;
    may_keep_ |= kept > 0;
    passing_count_ += std::max(Extents(*context_, i), kept) - kept;
  }
}

void PipelineExchange::Want(uint32_t block_count) {
  wanted_ = block_count == blocks_->count() ? std::nullopt : std::optional(block_count);
}

bool PipelineExchange::Turn() {
  const bool is_written =
      !context_->unsettled_puts && context_->writes_in_flight == context_->writes_aside;
  if (!wanted_.has_value() || context_->failed() || !is_written) return false;
  if (blocks_->block_bytes() == 0) return false;  // plain SGD keeps nothing
  const uint64_t before = taken_ + given_;
  for (uint32_t moves = 0; moves < kMovesMax && blocks_->count() != *wanted_; ++moves) {
    if (!(blocks_->count() < *wanted_ ? Take() : Give())) break;
  }
  if (blocks_->count() == *wanted_) wanted_.reset();
  context_->plan.pipeline_blocks = blocks_->count();
  return taken_ + given_ > before;
}

// Nobody reads or writes the state of the tensor.
bool PipelineExchange::IsFree(uint32_t store_tensor) const { return !cache_->held(store_tensor); }

// Blocks are of the size of the largest place: smaller ones are no blocks.
std::optional<uint32_t> PipelineExchange::WhoKeepsMost() const {
  std::optional<uint32_t> most;
  for (uint32_t i = 0; i < context_->catalogue.store_tensors.size(); ++i) {
    const uint32_t kept = context_->plan.state_resident[i];
    if (kept == 0 || (most.has_value() && Share(*context_, i) <= Share(*context_, *most))) continue;
    const bool fits =
        proto::StateBytes(context_->store_tensor(i), kept - 1) == blocks_->block_bytes();
    const bool is_stored = !state_->IsUnwritten(i, kept - 1, proto::Plane::kResidual);
    if (fits && is_stored && IsFree(i)) most = i;
  }
  return most;
}

std::optional<uint32_t> PipelineExchange::WhoKeepsLeast() const {
  std::optional<uint32_t> least;
  for (uint32_t i = 0; i < context_->catalogue.store_tensors.size(); ++i) {
    const uint32_t kept = context_->plan.state_resident[i];
    if (kept >= Extents(*context_, i)) continue;
    if (least.has_value() && Share(*context_, i) >= Share(*context_, *least)) continue;
    const bool fits = proto::StateBytes(context_->store_tensor(i), kept) == blocks_->block_bytes();
    if (fits && IsFree(i)) least = i;
  }
  return least;
}

// More blocks than extents that pass through them are of no use.
bool PipelineExchange::Take() {
  if (blocks_->count() >= passing_count_) return false;
  const std::optional<uint32_t> store_tensor = WhoKeepsMost();
  if (!store_tensor.has_value()) return false;
  blocks_->Add(state_->GiveUpLast(*store_tensor));
  ++passing_count_;
  ++taken_;
  return true;
}

bool PipelineExchange::Give() {
  if (blocks_->free_count() == 0 || (!may_keep_ && given_ >= taken_)) return false;
  const std::optional<uint32_t> store_tensor = WhoKeepsLeast();
  if (!store_tensor.has_value()) return false;
  state_->KeepNext(*store_tensor, blocks_->Remove());
  --passing_count_;
  ++given_;
  return true;
}

std::string PipelineExchange::Audit(uint64_t blocks_in_use) const {
  if (blocks_->free_count() + blocks_in_use != blocks_->count()) {
    return absl::StrCat("of ", blocks_->count(), " blocks ", blocks_->free_count(),
                        " are free and ", blocks_in_use, " in use");
  }
  std::set<const std::byte*> places;
  uint64_t count = blocks_in_use, large_count = 0;  // those without bytes may lie together
  const auto add = [&](const std::byte* place, uint64_t size_bytes) {
    ++count;
    large_count += size_bytes > 0;
    if (size_bytes > 0) places.insert(place);
  };
  for (const std::byte* const block : blocks_->free()) add(block, blocks_->block_bytes());
  for (uint32_t i = 0; i < context_->catalogue.store_tensors.size(); ++i) {
    const std::vector<uint64_t>& offsets = context_->layout.state_offset[i];
    if (context_->plan.state_resident[i] != offsets.size())
      return absl::StrCat("store tensor ", i, " keeps extents without places");
    for (uint32_t index = 0; index < offsets.size(); ++index)
      add(context_->slab + offsets[index], proto::StateBytes(context_->store_tensor(i), index));
  }
  if (places.size() != large_count) return "places have two owners";
  return count == place_count_ ? "" : "there were more or fewer places";
}

}  // namespace offload::daemon

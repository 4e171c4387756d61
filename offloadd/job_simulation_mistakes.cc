// Mistakes of a replan that the simulator makes itself, to show that it would find them.

#include <cstdint>
#include <optional>

#include "offloadd/job_simulation.h"

namespace offload::daemon {

bool Simulation::IsBetweenSteps() const {
  return !job_->executor()->busy() && job_->phase() == JobPhase::kTraining;
}

// A store tensor whose last kept extent, or whose next one, is as large as a block.
std::optional<uint32_t> Simulation::WhoKeeps(bool next) const {
  const ResidentState& state = *job_->resident_state();
  const uint64_t block_bytes = job_->executor()->blocks().block_bytes();
  for (uint32_t i = 0; i < plan_.catalogue.store_tensors.size(); ++i) {
    const proto::StoreTensor& tensor = plan_.catalogue.store_tensors[i];
    if (!tensor.trainable || proto::StateBytes(tensor, 0) != block_bytes) continue;
    if (block_bytes > 0 && state.Has(i, 0) != next) return i;  // of one extent each
  }
  return std::nullopt;
}

void Simulation::PlantMistake() {
  if (job_->executor() == nullptr || job_->phase() != JobPhase::kTraining) return;
  PipelineBlocks& blocks = job_->executor()->blocks();
  switch (options_.mistake) {
    case PlantedMistake::kNone:
    case PlantedMistake::kControl:
    case PlantedMistake::kHidesPartial:  // a script does
      return;
    case PlantedMistake::kChangesAmid:
      has_mistaken_ = ChangesAmid();
      break;
    case PlantedMistake::kDropsUnwritten:
      has_mistaken_ = DropsUnwritten();
      break;
    case PlantedMistake::kStaysUnread:
      has_mistaken_ = TakesAsRead();
      break;
    case PlantedMistake::kKeepsBlock:
      has_mistaken_ = blocks.free_count() > 1;
      if (has_mistaken_) blocks.Take();
      break;
    case PlantedMistake::kHasTwoOwners:
      has_mistaken_ = HasTwoOwners();
      break;
  }
  result_.mistakes += has_mistaken_;
}

// While an update works in a block, its extent begins to stay elsewhere: what is there is nobody's.
bool Simulation::ChangesAmid() {
  UpdateExecutor& executor = *job_->executor();
  const std::optional<uint32_t> tensor = WhoKeeps(/*next=*/true);
  if (!tensor.has_value() || !executor.Updating(*tensor) || executor.blocks().free_count() == 0 ||
      executor.buffer_bytes() == 0)
    return false;
  job_->resident_state()->KeepNext(*tensor, executor.blocks().Remove());
  return true;
}

bool Simulation::DropsUnwritten() {
  const std::optional<uint32_t> tensor = WhoKeeps(/*next=*/false);
  ResidentState& state = *job_->resident_state();
  if (!tensor.has_value() || !IsBetweenSteps() ||
      !state.IsUnwritten(*tensor, 0, proto::Plane::kResidual))
    return false;
  state.SetWritten({*tensor, 0});
  job_->executor()->blocks().Add(state.GiveUpLast(*tensor));
  return true;
}

bool Simulation::TakesAsRead() {
  const std::optional<uint32_t> tensor = WhoKeeps(/*next=*/true);
  PipelineBlocks& blocks = job_->executor()->blocks();
  if (!tensor.has_value() || !IsBetweenSteps() || blocks.free_count() < 2) return false;
  job_->resident_state()->KeepNext(*tensor, blocks.Remove());
  job_->resident_state()->SetLoaded(*tensor, 0);
  return true;
}

bool Simulation::HasTwoOwners() {
  const std::optional<uint32_t> tensor = WhoKeeps(/*next=*/true);
  PipelineBlocks& blocks = job_->executor()->blocks();
  if (!tensor.has_value() || !IsBetweenSteps() || blocks.free_count() == 0) return false;
  std::byte* const block = blocks.Take();
  job_->resident_state()->KeepNext(*tensor, block);
  blocks.Return(block);
  return true;
}

}  // namespace offload::daemon

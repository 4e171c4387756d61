// What a seed chooses: a model, where it stands in memory, and what the ranks of a launch do.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/update.h"
#include "offloadd/job_simulation.h"
#include "offloadd/rank.h"
#include "proto/depths.h"

namespace offload::daemon {
namespace {

using proto::Dtype;
using proto::GradientHome;
using proto::GradientStart;

constexpr uint64_t kSteps = 3;  // of a launch, at most
// Of one that is to replan: it takes some to know.
constexpr uint64_t kStepsReplansLeast = 4, kStepsReplansMost = 8;

kernels::OptimizerSpec ChooseOptimizer(Random& random) {
  switch (random.Below(8)) {
    case 0:
      return kernels::OptimizerSpec("sgd", {{"lr", 0.1}});
    case 1:
      return kernels::OptimizerSpec("sgd", {{"lr", 0.1}, {"momentum", 0.9}});
    case 2:
      return kernels::OptimizerSpec("lamb", {{"lr", 0.01}});
    case 3:
      return kernels::OptimizerSpec("adagrad", {{"lr", 0.1}});
    default:
      return kernels::OptimizerSpec("adamw", {{"lr", 0.01}});
  }
}

uint64_t ChooseElements(Random& random, uint64_t bundled_in_four) {
  if (random.OneIn(250)) return proto::kExtentElements + 1 + random.Below(3000);
  if (random.Below(4) < bundled_in_four) return 1 + random.Below(500);  // bundled
  return proto::kBundledElementsMax + 1 + random.Below(3000);
}

}  // namespace

// ---- The model ---------------------------------------------------------------------------------

void Simulation::ChooseModel() {
  favours_ahead_ = random_.OneIn(4);
  favours_replans_ = options_.mistake != PlantedMistake::kNone || random_.OneIn(6);
  favours_beside_ = !favours_replans_ && !favours_ahead_ && random_.OneIn(5);
  favours_partial_ = !favours_replans_ && !favours_ahead_ && !favours_beside_ && random_.OneIn(5);
  if (options_.mistake == PlantedMistake::kHidesPartial)
    favours_partial_ = true, favours_ahead_ = favours_replans_ = favours_beside_ = false;
  const uint64_t count = (favours_replans_ ? 4 : 2) + random_.Below(3);
  // Places pass only where all are of one size.
  const uint64_t equal_elements = proto::kBundledElementsMax + 1 + random_.Below(3000);
  const Dtype equal_dtype = random_.OneIn(2) ? Dtype::kFloat32 : Dtype::kBFloat16;
  const uint64_t bundled_in_four = favours_ahead_ || random_.OneIn(8) ? 0
                                   : favours_partial_                 ? 1
                                                                      : 3;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t elements =
        favours_replans_ ? equal_elements : ChooseElements(random_, bundled_in_four);
    tensors_.push_back({.name = absl::StrCat("tensor.", i),
                        .shape = {static_cast<int64_t>(elements)},
                        .dtype = favours_replans_   ? equal_dtype
                                 : random_.OneIn(2) ? Dtype::kFloat32
                                                    : Dtype::kBFloat16,
                        .trainable = i == 0 || !random_.OneIn(6),
                        .element_count = elements});
  }
  plan_.optimizer = ChooseOptimizer(random_);
  plan_.groups.assign(1 + random_.Below(2), plan_.optimizer);
  for (size_t i = 1; i < plan_.groups.size(); ++i) plan_.groups[i].Set("lr", 0.05);
  plan_.generations = static_cast<uint32_t>(random_.Below(SimulatedMachine::kGenerationsMax + 1));
  auto catalogue = proto::BuildCatalogue(tensors_, plan_.optimizer);
  OFFLOAD_CHECK(catalogue.ok()) << catalogue.status().ToString();
  plan_.catalogue = *std::move(catalogue);
}

void Simulation::ChooseLaunch() {
  plan_.world_size = favours_ahead_ ? 1 : static_cast<uint32_t>(1 + random_.Below(4));
  plan_.interval = favours_ahead_ || random_.OneIn(2) ? 1 : 1 + random_.Below(3);
  if (favours_replans_ && !random_.OneIn(4)) plan_.interval = 1;
  if (favours_beside_) plan_.interval = 2 + random_.Below(2);
  if (options_.mistake == PlantedMistake::kChangesAmid) plan_.interval = 1;
  if (options_.mistake == PlantedMistake::kDropsUnwritten) plan_.interval = 3;
  if (favours_partial_ && !random_.OneIn(6)) {
    plan_.world_size = 1;
    plan_.interval = 2 + random_.Below(3);
  }
  ChooseElsewhere();
  plan_.update_in_backward = random_.OneIn(4) ? "never" : "auto";
  plan_.gradient_sum = plan_.world_size > 1 && random_.OneIn(4);
  ChooseMemory();
  ChooseGradientHomes();
  ChooseRegions();
  auto layout = proto::ComputeSlabLayout(plan_.catalogue, plan_.memory);
  OFFLOAD_CHECK(layout.ok()) << layout.status().ToString();
  plan_.layout = *std::move(layout);
  plan_.ram_bytes = proto::PaddedBytes(plan_.layout.total_bytes) +
                    plan_.world_size * (plan_.memory.region_bytes + kOpenRegionBytes) +
                    proto::PaddedBytes(proto::OverheadBytes(plan_.catalogue));
  machine_.SetScratchBytes(plan_.memory.scratch_bytes);
  ChooseRates();
  machine_.SetPollsPerCompletion(favours_beside_ ? static_cast<uint32_t>(10 + random_.Below(300))
                                                 : 1);
  steps_left_ = static_cast<uint32_t>(
      favours_replans_
          ? kStepsReplansLeast + random_.Below(kStepsReplansMost - kStepsReplansLeast + 1)
          : random_.Below(kSteps + 1) + (favours_beside_ || favours_partial_ ? plan_.interval : 0));
  slowness_.clear();
  for (uint32_t rank = 0; rank < plan_.world_size; ++rank)
    slowness_.push_back(random_.OneIn(3) ? 1 + random_.Below(20) : 1);
}

// Whole extents: members of a bundle are written together.
void Simulation::ChooseElsewhere() {
  plan_.elsewhere.clear();
  if (!favours_partial_ || plan_.world_size > 1 || plan_.interval == 1) return;
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    if (tensors_[tensor].trainable && !IsBundled(tensor) && !random_.OneIn(3))
      plan_.elsewhere.insert(tensor);
  }
}

// From drives that give some kilobytes per second to ones that no machine has: what steps measure
// is something else. Judged after every step, by whatever it shows.
void Simulation::ChooseRates() {
  plan_.update_threads = random_.OneIn(3) ? 2 : 0;
  // Slow and fast ones ask for pipelines that are too flat or too deep.
  const bool is_fast = random_.OneIn(2);
  const auto rate = [this, is_fast] {
    if (favours_replans_) return is_fast ? 1e11 : 1e3 * (1 + random_.Unit());
    return std::pow(10, 3 + 8 * random_.Unit());
  };
  machine_.SetRates({.read_bytes_per_second = rate(),
                     .write_bytes_per_second = rate(),
                     .latency_seconds = random_.Unit() * 1e-3},
                    static_cast<uint32_t>(2 + random_.Below(31)));
  // Transfers end in the turn in which they begin, as the clock that stands still would see it.
  const auto tick = static_cast<int64_t>(std::pow(10, 2 + 3 * random_.Unit()));
  machine_.SetTick(favours_replans_ ? tick : 0);
  machine_.SetReplanOptions({.steps = 1, .bytes = 1, .busy_bytes = 1, .gap_steps = 1});
}

void Simulation::ChooseMemory() {
  const proto::Catalogue& catalogue = plan_.catalogue;
  proto::MemoryPlan& memory = plan_.memory = {};
  memory.world_size = plan_.world_size;
  const uint64_t resident_one_in = 1 + random_.Below(4);
  const bool keeps_state = (random_.OneIn(3) && !favours_replans_) || favours_beside_;
  uint64_t largest_bytes = 0, all_bytes = 0;
  for (const proto::StoreTensor& tensor : catalogue.store_tensors) {
    const bool is_resident = tensor.bundle || random_.OneIn(resident_one_in);
    memory.weight_resident.push_back(is_resident);
    const uint32_t extents = proto::ExtentCount(tensor.element_count);
    memory.state_resident.push_back(!tensor.trainable ? 0
                                    : keeps_state
                                        ? extents
                                        : static_cast<uint32_t>(random_.Below(extents + 1)));
    if (is_resident) continue;
    largest_bytes = std::max(largest_bytes, proto::WeightSlotBytes(tensor));
    all_bytes += proto::WeightSlotBytes(tensor);
  }
  memory.window_bytes = random_.OneIn(2) ? largest_bytes : std::max(largest_bytes, all_bytes);
  if (random_.OneIn(4)) memory.window_bytes = largest_bytes * 2;
  plan_.holds_all = memory.window_bytes >= all_bytes;
  memory.pipeline_blocks = static_cast<uint32_t>(1 + random_.Below(4));
  // More than any good pipeline has, so that some are given away, or hardly enough.
  if (favours_replans_)
    memory.pipeline_blocks =
        random_.OneIn(2)
            ? 1
            : static_cast<uint32_t>(proto::Depths().pipeline_blocks + 1 + random_.Below(3));
  if (favours_ahead_ && !favours_replans_)
    memory.state_resident.assign(memory.state_resident.size(), 0);
}

void Simulation::ChooseGradientHomes() {
  proto::MemoryPlan& memory = plan_.memory;
  const bool spills = !favours_ahead_ && !favours_replans_ && random_.OneIn(2);
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    proto::GradientPlacement home;
    const proto::StoreTensor& tensor =
        plan_.catalogue.store_tensors[plan_.catalogue.placements[i].store_tensor];
    if (tensors_[i].trainable) {
      home.home = plan_.world_size == 1 ? GradientHome::kRegion : GradientHome::kSlab;
      if (spills && !tensor.bundle && random_.OneIn(2)) {
        home.home = plan_.world_size == 1 ? GradientHome::kScratch : GradientHome::kSlabScratch;
        home.offset_bytes = memory.scratch_bytes;
        memory.scratch_bytes += proto::WeightSlotBytes(tensor);
        memory.pipeline_gradients = true;
        memory.sum_blocks = plan_.world_size == 1 ? 0 : static_cast<uint32_t>(1 + random_.Below(2));
      }
    }
    memory.gradients.push_back(home);
  }
}

void Simulation::ChooseRegions() {
  plan_.slots = static_cast<uint32_t>(1 + random_.Below(3));
  plan_.slot_bytes = 0;
  for (const proto::Tensor& tensor : tensors_) {
    const uint64_t elements = proto::ExtentElements(tensor.element_count, 0);
    plan_.slot_bytes = std::max(plan_.slot_bytes, proto::PaddedBytes(elements * sizeof(float)));
  }
  plan_.pins_offset = proto::kRegionFixedBytes;
  plan_.transfer_offset =
      plan_.pins_offset + proto::PaddedBytes(tensors_.size() * sizeof(proto::PinWord));
  plan_.slots_offset = plan_.transfer_offset + plan_.slot_bytes;
  uint64_t end_bytes = plan_.slots_offset + plan_.slots * plan_.slot_bytes;
  plan_.own_offset.clear();
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    plan_.own_offset.push_back(end_bytes);
    if (plan_.memory.gradients[i].home == GradientHome::kRegion)
      plan_.memory.gradients[i].offset_bytes = end_bytes;
    end_bytes +=
        proto::PaddedBytes(tensors_[i].element_count * proto::DtypeBytes(tensors_[i].dtype));
  }
  plan_.memory.region_bytes = end_bytes;
  plan_.memory.other_region_bytes = plan_.world_size == 1 ? 0 : end_bytes;
}

proto::v1::OpenJobRequest Simulation::OpenRequest(uint32_t rank) const {
  proto::v1::OpenJobRequest request;
  request.set_job("job");
  request.set_pool("memory");
  request.set_ram_bytes(plan_.ram_bytes);
  request.set_update_threads(plan_.update_threads);
  request.set_durability(plan_.interval == 1 ? "step"
                                             : absl::StrCat("checkpoint:", plan_.interval));
  request.set_update_in_backward(plan_.update_in_backward);
  request.set_generations(plan_.generations);
  if (plan_.world_size == 1) return request;
  proto::v1::World& world = *request.mutable_world();
  world.set_run_id(run_id_);
  world.set_rank(rank);
  world.set_world_size(plan_.world_size);
  world.set_local_rank(rank);
  world.set_local_world_size(plan_.world_size);
  world.set_gradient_sum(plan_.gradient_sum);
  return request;
}

std::vector<proto::v1::SealRequest> Simulation::SealMessages() const {
  proto::v1::SealRequest message;
  const proto::MemoryPlan& memory = plan_.memory;
  message.mutable_optimizer()->set_name(std::string(plan_.optimizer.name()));
  for (const double value : plan_.optimizer.values())
    message.mutable_optimizer()->add_parameters(value);
  message.set_window_bytes(memory.window_bytes);
  message.set_pipeline_blocks(memory.pipeline_blocks);
  message.set_pipeline_gradients(memory.pipeline_gradients);
  message.set_scratch_bytes(memory.scratch_bytes);
  message.set_region_bytes(memory.region_bytes);
  message.set_other_region_bytes(memory.other_region_bytes);
  message.set_sum_blocks(memory.sum_blocks);
  message.set_world_size(memory.world_size);
  message.set_pins_offset(plan_.pins_offset);
  for (const bool is_resident : memory.weight_resident) message.add_weight_resident(is_resident);
  for (const uint32_t extents : memory.state_resident) message.add_state_resident(extents);
  for (const proto::GradientPlacement& gradient : memory.gradients) {
    message.add_gradient_home(static_cast<uint32_t>(gradient.home));
    message.add_gradient_offset(gradient.offset_bytes);
  }
  return {message};
}

// ---- Scripts -----------------------------------------------------------------------------------

std::vector<uint32_t> Simulation::Some(uint64_t one_in, bool trainable_only) {
  std::vector<uint32_t> some;
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    if ((!trainable_only || tensors_[tensor].trainable) && random_.OneIn(one_in))
      some.push_back(tensor);
  }
  std::shuffle(some.begin(), some.end(), random_);
  return some;
}

std::shared_ptr<StepScript> Simulation::Script(size_t index) {
  OFFLOAD_CHECK(index <= scripts_.size());
  if (index < scripts_.size()) return scripts_[index];
  const bool after_refusal =
      !scripts_.empty() && scripts_.back()->refusal != StepScript::Refusal::kNone;
  if (!after_refusal) {
    if (steps_left_ == 0) return nullptr;
    --steps_left_;
  }
  const uint64_t step = after_refusal      ? scripts_.back()->step
                        : scripts_.empty() ? now_.epoch + 1
                                           : scripts_.back()->step + 1;
  scripts_.push_back(MakeScript(step, after_refusal));
  return scripts_.back();
}

std::shared_ptr<StepScript> Simulation::MakeScript(uint64_t step, bool after_refusal) {
  auto script = std::make_shared<StepScript>();
  script->id = ++scripts_made_;
  script->step = step;
  script->exchanges = random_.OneIn(4);
  if (random_.OneIn(plan_.elsewhere.empty() ? 4 : 2)) {
    script->puts = Some(2, /*trainable_only=*/false);
    // What partial steps have updated is put when they are whole.
    if (!scripts_.empty() && scripts_.back()->is_partial) {
      std::erase_if(script->puts,
                    [this](uint32_t tensor) { return !plan_.elsewhere.contains(tensor); });
    }
    for (const uint32_t tensor : script->puts) {
      if (!tensors_[tensor].trainable) continue;
      if (random_.OneIn(3)) script->puts_states.insert(tensor);
      if (tensors_[tensor].dtype == proto::Dtype::kBFloat16 && random_.OneIn(3))
        script->puts_masters.insert(tensor);
    }
    script->ends_load = random_.OneIn(2);
    script->followed_by_exchange = random_.OneIn(3);
    for (const uint32_t tensor : script->puts) {
      if (plan_.world_size > 1 && random_.OneIn(2)) script->changes.insert(tensor);
    }
    if (plan_.world_size > 1 && random_.OneIn(3))
      script->differing = Some(4, /*trainable_only=*/false);
  }
  script->is_partial = !plan_.elsewhere.empty() && !random_.OneIn(3);
  if (options_.mistake == PlantedMistake::kHidesPartial && script->is_partial && steps_left_ == 0) {
    script->hides_partial = true;
    ++result_.mistakes;
  }
  AddRounds(*script);
  ChooseStarts(*script, after_refusal);
  ChooseStep(*script);
  return script;
}

// One rank adds up itself: one round of one pass.
void Simulation::AddRounds(StepScript& script) {
  const uint32_t world_size = plan_.world_size;
  const uint64_t count = world_size == 1 || !random_.OneIn(3) ? 1 : 1 + random_.Below(3);
  for (uint64_t i = 0; i < count; ++i) {
    StepScript::Round round;
    if (i > 0) {
      const StepScript::Round& before = script.rounds.back();
      round.begins_anew = !before.goes_on;
      round.beginning = before.beginning + (round.begins_anew ? 1 : 0);
      if (!round.begins_anew)
        round.first_pass = before.first_pass + static_cast<uint32_t>(before.given[0].size());
    }
    round.goes_on = i + 1 < count && random_.OneIn(2);
    const uint64_t common_passes = 1 + random_.Below(2);
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      const bool differs = world_size > 1 && !round.goes_on && random_.OneIn(4);
      // After a look nobody may leave out a round that others make, unless a step follows.
      const uint64_t least = i > 0 && !round.begins_anew && i + 1 < count ? 1 : 0;
      const uint64_t passes = world_size == 1 ? 1
                              : differs       ? least + random_.Below(3 - least)
                                              : common_passes;
      auto& given = round.given.emplace_back(passes);
      for (std::vector<uint32_t>& tensors : given) {
        tensors = Some(1, /*trainable_only=*/true);
        while (!tensors.empty() && random_.OneIn(4)) tensors.pop_back();  // skipped
        std::erase_if(tensors,
                      [this](uint32_t tensor) { return plan_.elsewhere.contains(tensor); });
      }
      std::vector<uint32_t>& looks = round.looks.emplace_back();
      if (world_size > 1 && (round.goes_on || random_.OneIn(2))) looks = Some(2, true);
      if (round.goes_on && looks.empty()) looks = {0};
      // Who has looked and makes no further pass still sees what it has looked at.
      if (i > 0 && !round.begins_anew && passes == 0) looks.clear();
    }
    script.rounds.push_back(std::move(round));
  }
}

void Simulation::ChooseStarts(StepScript& script, bool after_refusal) {
  script.starts.resize(script.rounds.back().beginning + 1);
  const auto is_finite = [this](uint32_t tensor) {
    return kernels::AllFinite(tensors_[tensor].dtype, sums_[tensor].data(),
                              sums_[tensor].size() / proto::DtypeBytes(tensors_[tensor].dtype));
  };
  for (size_t beginning = 0; beginning < script.starts.size(); ++beginning) {
    for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      GradientStart start = random_.OneIn(3) ? GradientStart::kZeros : GradientStart::kNothing;
      const bool may_go_on = beginning == 0 && !after_refusal && !scripts_.empty();
      if (may_go_on && random_.OneIn(6) && is_finite(tensor)) start = GradientStart::kPrevious;
      if (plan_.world_size == 1) start = GradientStart::kNothing;  // it adds up itself
      script.starts[beginning][tensor] = start;
    }
  }
}

void Simulation::ChooseStep(StepScript& script) {
  const uint32_t last = script.rounds.back().beginning;
  script.named.resize(plan_.world_size);
  for (const StepScript::Round& round : script.rounds) {
    if (round.beginning != last) continue;
    for (uint32_t rank = 0; rank < plan_.world_size; ++rank) {
      for (const std::vector<uint32_t>& tensors : round.given[rank])
        script.named[rank].insert(tensors.begin(), tensors.end());
    }
  }
  for (const std::set<uint32_t>& named : script.named)
    script.given.insert(named.begin(), named.end());
  for (const uint32_t tensor : script.given) {
    const bool is_own = plan_.world_size > 1 && random_.OneIn(6);
    if (is_own) script.own.insert(tensor);
    for (std::set<uint32_t>& named : script.named) {
      if (is_own || random_.OneIn(2)) named.insert(tensor);
    }
  }
  if (random_.OneIn(2)) script.gradient_scale = 0.5f + static_cast<float>(random_.Unit());
  for (uint32_t rank = 0; rank < plan_.world_size; ++rank) {
    script.trainer_states.emplace_back();
    if (random_.OneIn(2)) {
      script.trainer_states.back() =
          absl::StrCat("rank ", rank, " after script ", script.id, " of launch ", run_id_);
    }
  }
  if (plan_.world_size == 1 || !random_.OneIn(10)) return;
  const bool has_bad_gradient = !script.given.empty() && script.own.empty();
  script.refusal = has_bad_gradient && random_.OneIn(2) ? StepScript::Refusal::kNotFinite
                                                        : StepScript::Refusal::kRanksDiffer;
}

}  // namespace offload::daemon

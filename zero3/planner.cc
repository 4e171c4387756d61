#include "zero3/planner.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/planned_traffic.h"
#include "proto/shm_abi.h"
#include "proto/step_words.h"
#include "zero3/keep_order.h"

namespace offload::zero3 {
namespace {

using proto::GradientHome;
using proto::PaddedBytes;

constexpr uint32_t kMinimalBlocks = 2;
constexpr uint64_t kWindowSlots = 3;  // at least so many of the largest tensor
constexpr uint64_t kGradientWindowSlots = 2, kGoodGradientWindowSlots = 8;
// Of a delivery ring, in extents; and sums that are spilled, being added to at a time.
constexpr uint64_t kMinimalRingExtents = 4, kGoodRingExtents = 16;
constexpr uint32_t kMinimalSumBlocks = 2, kGoodSumBlocks = 8;
// The window is meant to be this part of ram before weights become resident for good.
constexpr uint64_t kWindowShareOfRam = 8;
constexpr uint64_t kPrefetchShareOfRam = 4;  // at most, where more is asked for

// Things of different sizes of which the first k, largest first, stay in memory for good, and the
// others pass through a window of `slots` times the largest of them. Keeping a large thing may cost
// less than a window that is made for it. Those of at most `first_bytes` stay before all others;
// equal ones stay evenly spread over the model.
class Ladder {
 public:
  Ladder(std::vector<uint32_t> ids, const std::vector<uint64_t>& bytes, uint64_t slots,
         uint64_t first_bytes = 0)
      : ids_(std::move(ids)), slots_(slots), slot_bytes_(ids_.size() + 1, 0) {
    std::stable_sort(ids_.begin(), ids_.end(),
                     [&](uint32_t a, uint32_t b) { return bytes[a] > bytes[b]; });
    for (auto begin = ids_.begin(); begin != ids_.end();) {
      const auto end =
          std::find_if(begin, ids_.end(), [&](uint32_t id) { return bytes[id] != bytes[*begin]; });
      Spread({begin, end});
      begin = end;
    }
    const auto is_first = [&](uint32_t id) { return bytes[id] <= first_bytes; };
    std::stable_partition(ids_.begin(), ids_.end(), is_first);
    first_count_ = static_cast<size_t>(std::count_if(ids_.begin(), ids_.end(), is_first));
    kept_bytes_.reserve(ids_.size() + 1);
    kept_bytes_.push_back(0);
    for (const uint32_t id : ids_) kept_bytes_.push_back(kept_bytes_.back() + bytes[id]);
    for (size_t k = ids_.size(); k-- > 0;)
      slot_bytes_[k] = std::max(slot_bytes_[k + 1], bytes[ids_[k]]);
  }

  size_t size() const { return ids_.size(); }
  uint32_t id(size_t i) const { return ids_[i]; }
  uint64_t kept_bytes(size_t k) const { return kept_bytes_[k]; }
  uint64_t total_bytes() const { return kept_bytes_.back(); }
  // Of those that stay before all others.
  size_t first_count() const { return first_count_; }
  // The most that are kept within a share of all bytes.
  size_t WithinShare(double share) const {
    const auto bytes = static_cast<uint64_t>(share * static_cast<double>(total_bytes()));
    const auto above = std::upper_bound(kept_bytes_.begin(), kept_bytes_.end(), bytes);
    return static_cast<size_t>(above - kept_bytes_.begin()) - 1;
  }
  // Of the largest that is not kept.
  uint64_t slot_bytes(size_t k) const { return slot_bytes_[k]; }
  uint64_t minimal_window(size_t k) const { return slots_ * slot_bytes(k); }
  uint64_t window(size_t k, uint64_t wanted_bytes) const {
    return std::max(minimal_window(k), std::min(wanted_bytes, total_bytes() - kept_bytes_[k]));
  }
  // The cheapest choice in [first, limit]; of equal ones that which keeps most.
  size_t Cheapest(size_t first, size_t limit) const {
    size_t best = first;
    for (size_t k = first + 1; k <= limit; ++k) {
      if (Cost(k, 0) <= Cost(best, 0)) best = k;
    }
    return best;
  }
  uint64_t Cost(size_t k, uint64_t wanted_bytes) const {
    return kept_bytes_[k] + window(k, wanted_bytes);
  }
  // The largest k in [first, limit] whose cost is within `available_bytes`.
  std::optional<size_t> Largest(size_t first, size_t limit, uint64_t wanted_bytes,
                                uint64_t available_bytes) const {
    for (size_t k = limit + 1; k-- > first;) {
      if (Cost(k, wanted_bytes) <= available_bytes) return k;
    }
    return std::nullopt;
  }

 private:
  std::vector<uint32_t> ids_;
  const uint64_t slots_;
  size_t first_count_ = 0;
  std::vector<uint64_t> kept_bytes_;  // of the first k
  std::vector<uint64_t> slot_bytes_;  // the largest behind the first k
};

// What a byte that stays saves in a step, in bytes read: state is read and written once, a weight
// read twice. Writes are saved in intervals only.
struct SavedPerByte {
  explicit SavedPerByte(const PlanInput& input) {
    const uint64_t steps = input.durability.steps;
    const double unwritten = !input.durability.has_intervals() ? 0
                             : steps > 0 ? 1 - 1.0 / static_cast<double>(steps)
                                         : 1;
    state = 1 + unwritten * input.write_cost;
    trained_weight = 2 + unwritten * input.write_cost;
  }
  double state = 1, trained_weight = 2, frozen_weight = 2;
};

// What does not depend on the budget.
struct Needs {
  explicit Needs(const PlanInput& input);

  std::vector<uint64_t> slot_bytes;      // per store tensor: its weights
  std::vector<uint64_t> gradient_bytes;  // per tensor, padded; 0 when frozen
  Ladder weights, gradients;             // of tensors that are not bundled
  StateOrder state;
  SavedPerByte saved;
  uint64_t block_bytes = 0, block_gradient_bytes = 0;
  uint64_t bundle_bytes = 0, bundle_gradient_bytes = 0;
  uint64_t slab_fixed_bytes = 0, pins_bytes = 0, staging_bytes = 0, overhead_bytes = 0;
  // What the policy lets stay for good: so many weights, and bytes of state in whole extents.
  size_t weights_low = 0, weights_high = 0;
  uint64_t state_low_bytes = 0, state_high_bytes = 0;
  uint64_t live_bytes = UINT64_MAX;  // of weights, if that can be
  // Of several ranks; 1 and 0 otherwise.
  uint64_t ranks = 1;
  uint64_t first_staging_bytes = 0, minimal_ring_bytes = 0;
  uint64_t gradient_copies = 1;  // of each gradient that is not spilled

  // Everything but weights and gradients of big tensors and the pipeline.
  uint64_t fixed_bytes() const {
    return slab_fixed_bytes + bundle_bytes + gradient_copies * bundle_gradient_bytes +
           state_low_bytes +
           ranks * (proto::kRegionFixedBytes + pins_bytes + staging_bytes + minimal_ring_bytes) +
           first_staging_bytes + overhead_bytes;
  }
  uint64_t whole_gradient_bytes() const { return gradients.total_bytes() + bundle_gradient_bytes; }
  // In whole extents as far as there are so many.
  uint64_t RingBytes(uint64_t extents) const {
    return ranks == 1 ? 0 : std::min(extents * block_gradient_bytes, whole_gradient_bytes());
  }
  uint64_t Floor(bool spill) const {
    const uint64_t common = fixed_bytes() + weights.Cost(LeastWeights(), 0);
    if (!spill)
      return common + gradient_copies * gradients.total_bytes() + kMinimalBlocks * block_bytes;
    return common + gradients.Cost(MinimalKeptGradients(), 0) +
           kMinimalBlocks * (block_bytes + block_gradient_bytes) + SumBlocksBytes();
  }
  uint64_t SumBlocksBytes() const {
    return ranks == 1 ? 0 : kMinimalSumBlocks * block_gradient_bytes;
  }
  // Spilling means that at least one gradient is not kept.
  size_t MinimalKeptGradients() const { return gradients.Cheapest(0, gradients.size() - 1); }
  size_t LeastWeights() const { return weights.Cheapest(weights_low, weights_high); }

 private:
  void ReadPolicy(const PlanInput& input);
};

std::vector<uint64_t> SlotBytes(const proto::Catalogue& catalogue) {
  std::vector<uint64_t> bytes;
  for (const proto::StoreTensor& tensor : catalogue.store_tensors)
    bytes.push_back(proto::WeightSlotBytes(tensor));
  return bytes;
}
std::vector<uint64_t> GradientBytes(const proto::Catalogue& catalogue) {
  std::vector<uint64_t> bytes;
  for (const proto::Tensor& tensor : catalogue.tensors) {
    bytes.push_back(
        tensor.trainable ? PaddedBytes(tensor.element_count * proto::DtypeBytes(tensor.dtype)) : 0);
  }
  return bytes;
}
std::vector<uint32_t> PagedWeights(const proto::Catalogue& catalogue) {
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < catalogue.store_tensors.size(); ++i) {
    if (!catalogue.store_tensors[i].bundle) ids.push_back(i);
  }
  return ids;
}
bool IsBundled(const proto::Catalogue& catalogue, uint32_t tensor) {
  return catalogue.store_tensors[catalogue.placements[tensor].store_tensor].bundle;
}
std::vector<uint32_t> SpillableGradients(const proto::Catalogue& catalogue) {
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < catalogue.tensors.size(); ++i) {
    if (catalogue.tensors[i].trainable && !IsBundled(catalogue, i)) ids.push_back(i);
  }
  return ids;
}

// Bytes of so many elements of weights that are no bundles, in the widest of their dtypes.
uint64_t WeightBytes(const proto::Catalogue& catalogue, uint64_t elements) {
  uint64_t element_bytes = 0;
  for (const uint32_t id : PagedWeights(catalogue)) {
    element_bytes =
        std::max<uint64_t>(element_bytes, proto::DtypeBytes(catalogue.store_tensors[id].dtype));
  }
  return std::min(elements, proto::kElementsMax) * element_bytes;
}

Needs::Needs(const PlanInput& input)
    : slot_bytes(SlotBytes(input.catalogue)),
      gradient_bytes(GradientBytes(input.catalogue)),
      weights(PagedWeights(input.catalogue), slot_bytes, kWindowSlots,
              PaddedBytes(WeightBytes(input.catalogue, input.policy.persistence))),
      // A sum stands once, a window once per rank.
      gradients(SpillableGradients(input.catalogue), gradient_bytes,
                kGradientWindowSlots * input.world_size),
      state(input.catalogue),
      saved(input),
      ranks(input.world_size),
      gradient_copies(input.gradients_reduced ? input.world_size : 1) {
  const proto::Catalogue& catalogue = input.catalogue;
  ReadPolicy(input);
  block_bytes = proto::FullStateBytes(catalogue);
  slab_fixed_bytes = PaddedBytes(sizeof(proto::SlabHeader)) +
                     PaddedBytes(catalogue.tensors.size() * sizeof(proto::TensorWord));
  pins_bytes = PaddedBytes(proto::PinTableBytes(catalogue.tensors.size()));
  staging_bytes = proto::kLoadingStagingBytes;
  // The daemon counts in whole pages.
  overhead_bytes = PaddedBytes(proto::OverheadBytes(catalogue));
  for (size_t i = 0; i < catalogue.store_tensors.size(); ++i) {
    const proto::StoreTensor& tensor = catalogue.store_tensors[i];
    if (tensor.bundle) bundle_bytes += slot_bytes[i];
    if (!tensor.trainable) continue;
    const uint64_t elements = proto::ExtentElements(tensor.element_count, 0);
    block_gradient_bytes =
        std::max(block_gradient_bytes, PaddedBytes(elements * proto::DtypeBytes(tensor.dtype)));
  }
  for (uint32_t i = 0; i < catalogue.tensors.size(); ++i) {
    const proto::Tensor& tensor = catalogue.tensors[i];
    staging_bytes = std::max(staging_bytes,
                             PaddedBytes(tensor.element_count * proto::DtypeBytes(tensor.dtype)));
    if (IsBundled(catalogue, i)) bundle_gradient_bytes += gradient_bytes[i];
  }
  if (ranks == 1) return;
  slab_fixed_bytes += PaddedBytes(catalogue.tensors.size() * sizeof(proto::GradientWord));
  if (input.AddsGradients()) minimal_ring_bytes = RingBytes(kMinimalRingExtents);
  // Only the first rank changes weights of its own accord.
  if (staging_bytes > proto::kLoadingStagingBytes)
    first_staging_bytes = std::exchange(staging_bytes, proto::kLoadingStagingBytes);
}

void Needs::ReadPolicy(const PlanInput& input) {
  const ZeroPolicy& policy = input.policy;
  weights_high = weights.size();
  state_high_bytes = state.Within(
      static_cast<uint64_t>(policy.state.value_or(1) * static_cast<double>(state.total_bytes())));
  if (policy.state.has_value()) state_low_bytes = state_high_bytes;
  if (policy.weights.has_value()) {
    weights_low = weights.WithinShare(*policy.weights);
    weights_high = std::max(weights_low, weights.first_count());
    // Nothing has to stay; but a window that is larger than what it saves is not made.
    if (weights_low == 0)
      weights_high = std::max(weights_high, weights.Cheapest(0, weights.size()));
  }
  if (policy.max_live > 0) {
    live_bytes =
        std::max(WeightBytes(input.catalogue, policy.max_live), weights.Cost(LeastWeights(), 0));
  }
}

// What the budget buys, in numbers; MakePlan turns it into places.
struct Choice {
  bool spill = false;
  uint32_t blocks = kMinimalBlocks;
  size_t kept_gradients = 0;
  uint64_t gradient_window_bytes = 0;  // of each rank
  uint32_t sum_blocks = 0;
  uint64_t ring_bytes = 0;  // of each rank
  size_t kept_weights = 0;
  uint64_t window_bytes = 0;
  uint64_t left_bytes = 0;  // for state, with what must stay of it
};

uint64_t DownToSector(uint64_t bytes) { return bytes / proto::kSectorBytes * proto::kSectorBytes; }

// Spends up to `rest` on raising `value` to `wanted`, in units.
uint64_t Raise(uint64_t wanted, uint64_t value, uint64_t unit_bytes, uint64_t& rest) {
  if (unit_bytes == 0 || value >= wanted) return std::max(value, wanted);
  const uint64_t units = std::min((wanted - value), rest / unit_bytes);
  rest -= units * unit_bytes;
  return value + units;
}

// Gradients that the trainer reduces are whole in every rank's memory.
bool CanSpill(const PlanInput& input, const Needs& needs) {
  return needs.gradients.size() > 0 && !input.gradients_reduced;
}

// ZeRO stages 0 and 1: every rank's whole gradients come before weights.
bool WantsWholeRings(const ZeroPolicy& policy) { return policy.stage.value_or(2) < 2; }

// Spends up to `rest` on rings and blocks of sums. True when they are good.
bool ChooseRings(const PlanInput& input, const Needs& needs, uint64_t& rest, Choice& choice) {
  if (choice.spill) {
    choice.sum_blocks = static_cast<uint32_t>(
        Raise(kGoodSumBlocks, kMinimalSumBlocks, needs.block_gradient_bytes, rest));
  }
  const uint64_t good_bytes = WantsWholeRings(input.policy) ? needs.whole_gradient_bytes()
                                                            : needs.RingBytes(kGoodRingExtents);
  const uint64_t more_bytes =
      std::min(good_bytes - needs.minimal_ring_bytes, DownToSector(rest / needs.ranks));
  rest -= needs.ranks * more_bytes;
  choice.ring_bytes = needs.minimal_ring_bytes + more_bytes;
  return choice.ring_bytes == good_bytes && (!choice.spill || choice.sum_blocks == kGoodSumBlocks);
}

// Of the window, once weights need not stay for want of room.
uint64_t WantedWindow(const PlanInput& input) {
  if (input.policy.prefetch > 0) {
    return std::min(PaddedBytes(WeightBytes(input.catalogue, input.policy.prefetch)),
                    DownToSector(input.ram_bytes / kPrefetchShareOfRam));
  }
  // One that grew with ram would push weights out under a bound that does not.
  return input.policy.max_live > 0 ? 0 : DownToSector(input.ram_bytes / kWindowShareOfRam);
}

// How many weights stay, `least` or more, so that they and the state that the rest of `bytes` holds
// save most; of equal choices that with most weights. Weights and their window may take
// `weights_bytes` of them. None when there is no room for the window that is wanted.
std::optional<size_t> MostSaving(const PlanInput& input, const Needs& needs, size_t least,
                                 uint64_t wanted_bytes, uint64_t weights_bytes, uint64_t bytes) {
  std::optional<size_t> best;
  double best_saved = 0, weights_saved = 0;
  for (size_t k = 0; k <= needs.weights_high; ++k) {
    if (k > 0) {
      const uint32_t id = needs.weights.id(k - 1);
      weights_saved += static_cast<double>(needs.slot_bytes[id]) *
                       (input.catalogue.store_tensors[id].trainable ? needs.saved.trained_weight
                                                                    : needs.saved.frozen_weight);
    }
    const uint64_t cost = needs.weights.Cost(k, wanted_bytes);
    if (k < least || cost > weights_bytes) continue;
    const uint64_t state_bytes =
        needs.state.Within(std::min(needs.state_low_bytes + bytes - cost, needs.state_high_bytes));
    const double saved = weights_saved + needs.saved.state * static_cast<double>(state_bytes);
    if (best.has_value() && saved < best_saved) continue;
    best = k;
    best_saved = saved;
  }
  return best;
}

// Spends `rest` on weights and their window, and on state. `complete`: what comes before them has
// all that is good for it.
void ChooseWeights(const PlanInput& input, const Needs& needs, bool complete, uint64_t rest,
                   Choice& choice) {
  const Ladder& weights = needs.weights;
  const size_t least = needs.LeastWeights();
  const uint64_t wanted = WantedWindow(input);
  const uint64_t more_state = needs.state_high_bytes - needs.state_low_bytes;
  const bool state_first = input.policy.stage == 3;
  const bool state_fits = rest >= weights.Cost(least, wanted) + more_state;
  const uint64_t kept_for_state = complete && state_first && state_fits ? more_state : 0;
  const uint64_t spent = std::min(rest - kept_for_state, needs.live_bytes);
  const size_t most = complete && state_fits ? needs.weights_high : least;
  const std::optional<size_t> kept = complete && !state_first
                                         ? MostSaving(input, needs, least, wanted, spent, rest)
                                         : weights.Largest(least, most, wanted, spent);
  choice.kept_weights = kept.value_or(least);
  choice.window_bytes =
      weights.window(choice.kept_weights,
                     kept.has_value() ? wanted : DownToSector(spent - weights.kept_bytes(least)));
  choice.left_bytes = needs.state_low_bytes;
  if (complete)
    choice.left_bytes += rest - weights.kept_bytes(choice.kept_weights) - choice.window_bytes;
}

// More ram never saves less: what comes before weights is bought in a fixed order, and nothing
// before what comes ahead of it is complete; weights and state are what saves most; and only the
// wished window grows with ram, by less than ram does.
Choice Choose(const PlanInput& input, const Needs& needs) {
  Choice choice;
  choice.spill = CanSpill(input, needs) &&
                 (input.always_spill_gradients || input.ram_bytes < needs.Floor(false));
  const uint64_t block_bytes = needs.block_bytes + (choice.spill ? needs.block_gradient_bytes : 0);
  uint64_t rest = input.ram_bytes - needs.Floor(choice.spill);
  const uint32_t good_blocks = std::max(input.good_pipeline_blocks, kMinimalBlocks);
  choice.blocks = static_cast<uint32_t>(Raise(good_blocks, kMinimalBlocks, block_bytes, rest));
  // Less than a block is left: what it bought would be lost again with the next block.
  if (choice.blocks < good_blocks) rest = 0;

  // What comes before weights has all that is good for it.
  bool complete = true;

  const Ladder& gradients = needs.gradients;
  choice.kept_gradients = gradients.size();
  if (choice.spill) {
    const size_t least = needs.MinimalKeptGradients();
    rest += gradients.Cost(least, 0);
    const bool keep_more = !input.always_spill_gradients && choice.blocks == good_blocks;
    const size_t most = keep_more ? gradients.size() - 1 : least;
    const size_t kept = *gradients.Largest(least, most, 0, rest);
    rest -= gradients.Cost(kept, 0);
    choice.kept_gradients = kept;
    const uint64_t slot_bytes = gradients.slot_bytes(kept);
    const uint64_t slots =
        Raise(kGoodGradientWindowSlots, kGradientWindowSlots, needs.ranks * slot_bytes, rest);
    choice.gradient_window_bytes = slots * slot_bytes;
    complete = input.always_spill_gradients && slots == kGoodGradientWindowSlots;
  }
  if (input.AddsGradients()) complete = ChooseRings(input, needs, rest, choice) && complete;

  rest += needs.weights.Cost(needs.LeastWeights(), 0);
  ChooseWeights(input, needs, complete && choice.blocks == good_blocks, rest, choice);
  return choice;
}

// Returns what is left when all state is in memory that may stay there.
uint64_t PlaceWeightsAndState(const PlanInput& input, const Needs& needs, const Choice& choice,
                              Plan& plan) {
  const proto::Catalogue& catalogue = input.catalogue;
  proto::MemoryPlan& memory = plan.memory;
  memory.weight_resident.assign(catalogue.store_tensors.size(), true);
  for (size_t i = choice.kept_weights; i < needs.weights.size(); ++i)
    memory.weight_resident[needs.weights.id(i)] = false;
  plan.resident_state_bytes =
      needs.state.Within(std::min(choice.left_bytes, needs.state_high_bytes));
  memory.state_resident = needs.state.Leading(plan.resident_state_bytes);
  const bool is_all = plan.resident_state_bytes == needs.state_high_bytes;
  return is_all ? choice.left_bytes - plan.resident_state_bytes : 0;
}

// Those that the trainer reduces, side by side in every region, from `begin`. Returns their end.
uint64_t PlaceOwnGradients(const PlanInput& input, const Needs& needs, uint64_t begin,
                           proto::MemoryPlan& memory) {
  for (size_t i = 0; i < input.catalogue.tensors.size(); ++i) {
    if (!input.catalogue.tensors[i].trainable) continue;
    memory.gradients[i] = {GradientHome::kRegion, begin};
    begin += needs.gradient_bytes[i];
  }
  return begin;
}

// Those that the daemon adds: in the slab, or in the scratch file.
void PlaceSums(const PlanInput& input, const Needs& needs, const std::vector<bool>& spilled,
               proto::MemoryPlan& memory) {
  for (size_t i = 0; i < input.catalogue.tensors.size(); ++i) {
    if (!input.catalogue.tensors[i].trainable) continue;
    memory.gradients[i].home = spilled[i] ? GradientHome::kSlabScratch : GradientHome::kSlab;
    if (!spilled[i]) continue;
    memory.gradients[i].offset_bytes = memory.scratch_bytes;
    memory.scratch_bytes += needs.gradient_bytes[i];
  }
}

// The regions of several ranks, alike but for the end of the first.
void PlaceRegions(const PlanInput& input, const Needs& needs, const Choice& choice,
                  const std::vector<bool>& spilled, Plan& plan) {
  proto::MemoryPlan& memory = plan.memory;
  memory.world_size = input.world_size;
  memory.sum_blocks = choice.sum_blocks;
  plan.ring_offset = plan.pins_offset + needs.pins_bytes;
  plan.ring_bytes = choice.ring_bytes;
  plan.gradient_window_offset = plan.ring_offset + plan.ring_bytes;
  memory.other_region_bytes = plan.gradient_window_offset + plan.gradient_window_bytes;
  if (input.gradients_reduced) {
    memory.other_region_bytes = PlaceOwnGradients(input, needs, memory.other_region_bytes, memory);
  } else {
    PlaceSums(input, needs, spilled, memory);
  }
  plan.first_staging_offset = memory.other_region_bytes;
  plan.first_staging_bytes = needs.first_staging_bytes;
  memory.region_bytes = plan.first_staging_offset + plan.first_staging_bytes;
}

// The region: fixed part, staging (where it is before there is a plan), pins, gradients or their
// window.
void PlaceRegion(const PlanInput& input, const Needs& needs, const Choice& choice, Plan& plan) {
  proto::MemoryPlan& memory = plan.memory;
  plan.staging_offset = proto::kRegionFixedBytes;
  plan.staging_bytes = needs.staging_bytes;
  plan.pins_offset = plan.staging_offset + plan.staging_bytes;
  plan.use_times_offset = proto::UseTimesOffset(plan.pins_offset, input.catalogue.tensors.size());
  plan.gradient_window_offset = plan.pins_offset + needs.pins_bytes;
  plan.gradient_window_bytes = choice.gradient_window_bytes;
  uint64_t end = plan.gradient_window_offset + plan.gradient_window_bytes;
  std::vector<bool> spilled(input.catalogue.tensors.size(), false);
  for (size_t i = choice.kept_gradients; i < needs.gradients.size(); ++i)
    spilled[needs.gradients.id(i)] = true;
  memory.gradients.resize(input.catalogue.tensors.size());
  if (needs.ranks > 1) return PlaceRegions(input, needs, choice, spilled, plan);
  for (size_t i = 0; i < input.catalogue.tensors.size(); ++i) {
    if (!input.catalogue.tensors[i].trainable) continue;
    uint64_t& offset = spilled[i] ? memory.scratch_bytes : end;
    memory.gradients[i] = {spilled[i] ? GradientHome::kScratch : GradientHome::kRegion, offset};
    offset += needs.gradient_bytes[i];
  }
  memory.region_bytes = end;
}

// The order in which a step uses its tensors, as far as a plan can know: forwards go through the
// model as it is declared, backwards the other way.
std::vector<uint32_t> LikelyTouches(const proto::Catalogue& catalogue, uint32_t passes) {
  std::vector<uint32_t> touches;
  if (catalogue.tensors.size() * 2 * passes > proto::kPlannedTouchesMax) return touches;
  std::vector<uint32_t> forward(catalogue.tensors.size());
  std::iota(forward.begin(), forward.end(), 0);
  for (uint32_t pass = 0; pass < passes; ++pass) {
    touches.insert(touches.end(), forward.begin(), forward.end());
    touches.insert(touches.end(), forward.rbegin(), forward.rend());
  }
  return touches;
}

void Count(const PlanInput& input, Plan& plan) {
  const proto::Catalogue& catalogue = input.catalogue;
  for (const proto::Tensor& tensor : catalogue.tensors) {
    plan.parameter_count += tensor.element_count;
    if (!tensor.trainable) continue;
    plan.trainable_count += tensor.element_count;
    plan.gradient_bytes += tensor.element_count * proto::DtypeBytes(tensor.dtype);
  }
  for (size_t i = 0; i < catalogue.store_tensors.size(); ++i) {
    const proto::StoreTensor& tensor = catalogue.store_tensors[i];
    const uint64_t weight_bytes = proto::WeightSlotBytes(tensor);
    if (plan.memory.weight_resident[i]) plan.resident_weight_bytes += weight_bytes;
    uint64_t state_bytes = 0, tie_bytes = 0;
    for (uint32_t extent = 0; extent < proto::ExtentCount(tensor.element_count); ++extent) {
      state_bytes += proto::StateBytes(tensor, extent);
      tie_bytes += PaddedBytes(tensor.planes.Bytes(
          proto::Plane::kTies, proto::ExtentElements(tensor.element_count, extent)));
    }
    plan.state_bytes += weight_bytes + state_bytes;
    plan.store_bytes += 2 * (weight_bytes + state_bytes + tie_bytes);
  }
  const proto::StepTraffic step =
      proto::PlanTraffic(catalogue, plan.memory, LikelyTouches(catalogue, 1));
  const proto::StepTraffic two_passes =
      proto::PlanTraffic(catalogue, plan.memory, LikelyTouches(catalogue, 2));
  const uint64_t read = step.ReadBytes(), written = step.WrittenBytes();
  const uint64_t left = step.checkpoint_bytes;
  const uint64_t further_weights = two_passes.order_known
                                       ? two_passes.weight_read_bytes - step.weight_read_bytes
                                       : step.weight_read_bytes;
  const uint64_t further = further_weights + step.gradient_read_bytes + step.gradient_written_bytes;
  const double parameters = static_cast<double>(std::max<uint64_t>(plan.parameter_count, 1));
  plan.read_bytes_per_parameter = read / parameters;
  const uint64_t steps = input.durability.steps;
  plan.write_bytes_per_parameter =
      (static_cast<double>(written) + (steps == 0 ? 0 : static_cast<double>(left) / steps)) /
      parameters;
  if (input.durability.has_intervals()) plan.checkpoint_bytes = left;
  plan.bytes_per_further_micro_batch = further / parameters;
}

std::string Line(std::string_view item, uint64_t bytes, std::string_view note = "") {
  char text[160];
  std::snprintf(text, sizeof(text), "  %-34.*s %12s", static_cast<int>(item.size()), item.data(),
                FormatBytes(bytes).c_str());
  return absl::StrCat(text, note.empty() ? "" : "  ", std::string(note), "\n");
}

std::string RingsOf(const Needs& needs) {
  if (needs.minimal_ring_bytes == 0) return "";
  return absl::StrCat(" + delivery rings ", needs.ranks, " x ",
                      FormatBytes(needs.minimal_ring_bytes));
}

std::string StateOf(const Needs& needs) {
  if (needs.state_low_bytes == 0) return "";
  return absl::StrCat(" + optimizer state ", FormatBytes(needs.state_low_bytes));
}

// Two sums of which one is too small look alike where they are rounded to the same.
std::string ToldFrom(uint64_t other, uint64_t bytes) {
  const std::string text = FormatBytes(bytes);
  return text == FormatBytes(other) ? absl::StrCat(bytes, " bytes") : text;
}

absl::Status TooSmall(const PlanInput& input, const Needs& needs, uint64_t floor,
                      uint64_t floor_without_spilling) {
  const bool spill = needs.gradients.size() > 0 && floor != floor_without_spilling;
  const uint64_t weights = needs.weights.Cost(needs.LeastWeights(), 0);
  const uint64_t gradients = spill ? needs.gradients.Cost(needs.MinimalKeptGradients(), 0)
                                   : needs.gradient_copies * needs.gradients.total_bytes();
  const uint64_t pipeline =
      kMinimalBlocks * (needs.block_bytes + (spill ? needs.block_gradient_bytes : 0));
  return MakeError(
      ErrorId::kBudgetTooSmall,
      absl::StrCat(
          "ram is ", ToldFrom(floor, input.ram_bytes), ", the least that trains this model is ",
          ToldFrom(input.ram_bytes, floor), " = weight window ", FormatBytes(weights),
          " + small tensors ", FormatBytes(needs.bundle_bytes), StateOf(needs), " + gradients ",
          FormatBytes(gradients + needs.gradient_copies * needs.bundle_gradient_bytes +
                      (spill ? needs.SumBlocksBytes() : 0)),
          spill ? " (spilled)" : "", RingsOf(needs), " + update pipeline ", FormatBytes(pipeline),
          " + staging ", FormatBytes(needs.ranks * needs.staging_bytes + needs.first_staging_bytes),
          " + rings and tables ",
          FormatBytes(needs.slab_fixed_bytes +
                      needs.ranks * (proto::kRegionFixedBytes + needs.pins_bytes)),
          " + overhead ", FormatBytes(needs.overhead_bytes),
          spill ? absl::StrCat("; without spilling gradients it is ",
                               FormatBytes(floor_without_spilling))
                : ""),
      absl::StrCat("Set ram to at least ", floor, " bytes",
                   spill ? absl::StrCat(", or ", floor_without_spilling,
                                        " bytes to keep gradients in memory")
                         : "",
                   input.more_may_come ? "; what is attached after this needs more" : ""));
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const PlanInput& input) {
  if (input.gradients_reduced && input.always_spill_gradients) {
    return MakeError(ErrorId::kBadValue,
                     "gradients that the trainer reduces (gradients = reduced_by_trainer) stay in "
                     "memory, and are to be spilled",
                     "Leave one of the two out");
  }
  const Needs needs(input);
  const uint64_t floor_without_spilling = needs.Floor(false);
  uint64_t floor = floor_without_spilling;
  if (CanSpill(input, needs)) {
    floor = input.always_spill_gradients ? needs.Floor(true) : std::min(floor, needs.Floor(true));
  }
  if (input.ram_bytes < floor) return TooSmall(input, needs, floor, floor_without_spilling);

  Choice choice = Choose(input, needs);
  Plan plan;
  plan.floor_bytes = floor;
  plan.floor_without_spilling_bytes = floor_without_spilling;
  plan.gradients_spilled = choice.spill;
  plan.overhead_bytes = needs.overhead_bytes;
  plan.memory.window_bytes = choice.window_bytes;
  plan.memory.pipeline_blocks = choice.blocks;
  plan.memory.pipeline_gradients = choice.spill;
  const uint64_t left_bytes = PlaceWeightsAndState(input, needs, choice, plan);
  // Stages 2 and 3 want buckets.
  if (input.AddsGradients() && input.policy.stage.value_or(0) < 2) {
    choice.ring_bytes = std::min(choice.ring_bytes + DownToSector(left_bytes / needs.ranks),
                                 needs.whole_gradient_bytes());
  }
  PlaceRegion(input, needs, choice, plan);
  OFFLOAD_ASSIGN_OR_RETURN(plan.slab, proto::ComputeSlabLayout(input.catalogue, plan.memory));
  plan.total_bytes = plan.slab.total_bytes + plan.memory.region_bytes +
                     (needs.ranks - 1) * plan.memory.other_region_bytes + plan.overhead_bytes;
  OFFLOAD_CHECK(plan.total_bytes <= input.ram_bytes)
      << plan.total_bytes << " of " << input.ram_bytes;
  Count(input, plan);
  return plan;
}

namespace {

// The lines of gradients in a plan.
std::string DescribeGradients(const PlanInput& input, const Plan& plan) {
  const proto::MemoryPlan& memory = plan.memory;
  const uint32_t ranks = memory.world_size;
  const std::string spill = absl::StrCat(FormatBytes(memory.scratch_bytes), " spill");
  if (ranks == 1) {
    const std::string text =
        Line("gradients in memory",
             memory.region_bytes - plan.gradient_window_offset - plan.gradient_window_bytes);
    if (!plan.gradients_spilled) return text;
    return text + Line("window of spilled gradients", plan.gradient_window_bytes, spill);
  }
  if (input.gradients_reduced) {
    const uint64_t own_bytes = memory.other_region_bytes - plan.gradient_window_offset;
    return Line(absl::StrCat("gradients of ", ranks, " ranks"), ranks * own_bytes,
                absl::StrCat(ranks, " x ", FormatBytes(own_bytes), ", reduced by the trainer"));
  }
  uint64_t sum_bytes = 0;
  for (size_t i = 0; i < memory.gradients.size(); ++i) {
    const proto::Tensor& tensor = input.catalogue.tensors[i];
    if (memory.gradients[i].home == GradientHome::kSlab)
      sum_bytes += PaddedBytes(tensor.element_count * proto::DtypeBytes(tensor.dtype));
  }
  std::string text = Line(absl::StrCat("gradients of ", ranks, " ranks: sum"), sum_bytes);
  absl::StrAppend(&text, Line("delivery rings", ranks * plan.ring_bytes,
                              absl::StrCat(ranks, " x ", FormatBytes(plan.ring_bytes))));
  if (!plan.gradients_spilled) return text;
  absl::StrAppend(&text,
                  Line("blocks of spilled sums", memory.sum_blocks * plan.slab.sum_block_bytes,
                       absl::StrCat(memory.sum_blocks, " blocks, ", spill)),
                  Line("windows of spilled sums", ranks * plan.gradient_window_bytes,
                       absl::StrCat(ranks, " x ", FormatBytes(plan.gradient_window_bytes))));
  return text;
}

}  // namespace

std::string DescribePlan(const PlanInput& input, const Plan& plan) {
  const proto::MemoryPlan& memory = plan.memory;
  const uint64_t ranks = memory.world_size;
  const uint64_t words =
      PaddedBytes(input.catalogue.tensors.size() * sizeof(proto::TensorWord));  // of either kind
  const uint64_t pins = PaddedBytes(proto::PinTableBytes(input.catalogue.tensors.size()));
  const uint64_t tables = plan.slab.tensor_words_offset + (ranks > 1 ? 2 : 1) * words +
                          ranks * (proto::kRegionFixedBytes + pins);
  std::string text =
      absl::StrCat(FormatCount(plan.parameter_count), " parameters, ",
                   FormatCount(plan.trainable_count), " of them trained; state ",
                   FormatBytes(plan.state_bytes), ", gradients ", FormatBytes(plan.gradient_bytes),
                   ", on the drive ", FormatDecimalBytes(plan.store_bytes), "\n");
  absl::StrAppend(&text, "memory:\n");
  absl::StrAppend(&text, Line("weights in memory for good", plan.resident_weight_bytes),
                  Line("weight window", memory.window_bytes),
                  Line("optimizer state in memory", plan.resident_state_bytes),
                  Line("update pipeline", plan.slab.pipeline_block_bytes * memory.pipeline_blocks,
                       absl::StrCat(memory.pipeline_blocks, " blocks")),
                  DescribeGradients(input, plan),
                  Line("staging", ranks * plan.staging_bytes + plan.first_staging_bytes),
                  Line("rings and tables", tables), Line("overhead", plan.overhead_bytes),
                  Line("sum", plan.total_bytes, absl::StrCat("of ", FormatBytes(input.ram_bytes))));
  if (const std::string policy = DescribePolicy(input.policy); !policy.empty())
    absl::StrAppend(&text, "asked for: ", policy, "\n");
  // Whatever the trainer's locale is.
  absl::StrAppendFormat(&text,
                        "traffic per parameter and step: %.2f B read, %.2f B written, %.2f B for "
                        "each further micro-batch\n",
                        plan.read_bytes_per_parameter, plan.write_bytes_per_parameter,
                        plan.bytes_per_further_micro_batch);
  if (input.durability.has_intervals()) {
    absl::StrAppend(&text, "checkpoint ",
                    input.durability.steps > 0
                        ? absl::StrCat("after every ", input.durability.steps, " steps")
                        : absl::StrCat("every ", input.durability.seconds, " s"),
                    ": ", FormatDecimalBytes(plan.checkpoint_bytes),
                    input.durability.steps > 0 ? ", counted above by its share of a step\n"
                                               : ", not counted above\n");
  }
  absl::StrAppend(&text, "least ram that trains: ", FormatBytes(plan.floor_bytes),
                  "; without spilling gradients: ", FormatBytes(plan.floor_without_spilling_bytes),
                  "\n");
  return text;
}

}  // namespace offload::zero3

#include "zero3/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "proto/shm_abi.h"
#include "proto/step_words.h"

namespace offload::zero3 {
namespace {

using kernels::OptimizerSpec;
using proto::Dtype;
using proto::GradientHome;

constexpr uint64_t kMiB = 1 << 20;

proto::Tensor MakeTensor(size_t number, int64_t elements, Dtype dtype, bool trainable = true) {
  return {.name = absl::StrCat("t", number),
          .shape = {elements},
          .dtype = dtype,
          .trainable = trainable};
}

PlanInput Input(std::vector<proto::Tensor> tensors,
                const OptimizerSpec& optimizer = OptimizerSpec()) {
  auto catalogue = proto::BuildCatalogue(std::move(tensors), optimizer);
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  return {.catalogue = *catalogue};
}

// `count` equal tensors of `elements`.
PlanInput Equal(size_t count, int64_t elements, Dtype dtype) {
  std::vector<proto::Tensor> tensors;
  for (size_t i = 0; i < count; ++i) tensors.push_back(MakeTensor(i, elements, dtype));
  return Input(std::move(tensors));
}

Plan PlanFor(PlanInput& input, uint64_t ram_bytes) {
  input.ram_bytes = ram_bytes;
  auto plan = MakePlan(input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : Plan();
}

absl::Status Refusal(PlanInput& input, uint64_t ram_bytes) {
  input.ram_bytes = ram_bytes;
  return MakePlan(input).status();
}

double BytesPerStep(const Plan& plan) {
  return plan.read_bytes_per_parameter + plan.write_bytes_per_parameter;
}

// Of the largest extent of a gradient.
uint64_t ExtentBytes(const PlanInput& input) {
  uint64_t largest = 0;
  for (const proto::StoreTensor& tensor : input.catalogue.store_tensors) {
    if (!tensor.trainable) continue;
    const uint64_t elements = proto::ExtentElements(tensor.element_count, 0);
    largest = std::max(largest, proto::PaddedBytes(elements * proto::DtypeBytes(tensor.dtype)));
  }
  return largest;
}

// What a plan promises, for any model and budget.
void ExpectSound(const PlanInput& input, const Plan& plan) {
  EXPECT_LE(plan.total_bytes, input.ram_bytes);
  EXPECT_EQ(plan.total_bytes, plan.slab.total_bytes + plan.memory.region_bytes +
                                  (input.world_size - 1) * plan.memory.other_region_bytes +
                                  plan.overhead_bytes);
  EXPECT_LE(plan.floor_bytes, input.ram_bytes);
  EXPECT_GE(plan.memory.pipeline_blocks, 2u);
  EXPECT_LE(plan.memory.pipeline_blocks, proto::Depths().pipeline_blocks);
  EXPECT_GE(plan.staging_bytes, proto::kLoadingStagingBytes);
  EXPECT_EQ(plan.staging_offset, proto::kRegionFixedBytes);
  uint64_t largest_slot = 0, largest_spilled = 0;
  for (size_t i = 0; i < input.catalogue.store_tensors.size(); ++i) {
    if (!plan.memory.weight_resident[i]) {
      largest_slot =
          std::max(largest_slot, proto::WeightSlotBytes(input.catalogue.store_tensors[i]));
    }
  }
  EXPECT_GE(plan.memory.window_bytes, 3 * largest_slot);
  // Gradients in the region stand side by side behind the window for the spilled ones.
  uint64_t region_end = plan.gradient_window_offset + plan.gradient_window_bytes, scratch_end = 0;
  uint64_t gradient_bytes = 0;
  const bool several = input.world_size > 1;
  for (size_t i = 0; i < input.catalogue.tensors.size(); ++i) {
    const proto::Tensor& tensor = input.catalogue.tensors[i];
    const uint64_t bytes =
        proto::PaddedBytes(tensor.element_count * proto::DtypeBytes(tensor.dtype));
    EXPECT_GE(std::max(plan.staging_bytes, plan.first_staging_bytes), bytes);
    const proto::GradientPlacement& gradient = plan.memory.gradients[i];
    ASSERT_EQ(gradient.home == GradientHome::kNone, !tensor.trainable);
    if (gradient.home == GradientHome::kNone) continue;
    gradient_bytes += bytes;
    if (gradient.home == GradientHome::kSlab) {
      EXPECT_TRUE(several);
      continue;
    }
    uint64_t& end = gradient.home == GradientHome::kRegion ? region_end : scratch_end;
    ASSERT_EQ(gradient.offset_bytes, end);
    end += bytes;
    if (gradient.home != GradientHome::kRegion) {
      EXPECT_EQ(gradient.home == GradientHome::kSlabScratch, several);
      EXPECT_GT(tensor.element_count, proto::kBundledElementsMax);
      largest_spilled = std::max(largest_spilled, bytes);
    }
  }
  EXPECT_EQ(region_end + plan.first_staging_bytes, plan.memory.region_bytes);
  EXPECT_EQ(plan.memory.world_size, input.world_size);
  EXPECT_EQ(plan.memory.other_region_bytes, several ? region_end : 0);
  EXPECT_EQ(plan.first_staging_offset, several ? region_end : 0);
  // A ring has room for a few extents, or for all that is delivered.
  EXPECT_GE(plan.ring_bytes,
            several ? std::min<uint64_t>(gradient_bytes, 4 * ExtentBytes(input)) : 0);
  EXPECT_LE(plan.ring_bytes, gradient_bytes);
  EXPECT_EQ(plan.memory.sum_blocks > 0, several && plan.gradients_spilled);
  EXPECT_EQ(scratch_end, plan.memory.scratch_bytes);
  EXPECT_EQ(plan.gradients_spilled, scratch_end > 0);
  EXPECT_GE(plan.gradient_window_bytes, 2 * largest_spilled);
  EXPECT_GE(plan.gradient_window_offset,
            plan.use_times_offset + input.catalogue.tensors.size() * sizeof(proto::UseTimes));
  EXPECT_GE(plan.use_times_offset,
            plan.pins_offset + input.catalogue.tensors.size() * sizeof(proto::PinWord));
  EXPECT_EQ(plan.pins_offset, plan.staging_offset + plan.staging_bytes);
}

PlanInput RandomInput(Random& random) {
  std::vector<proto::Tensor> tensors;
  const size_t count = 1 + random.Below(30);
  const int64_t sizes[] = {1, 7, 1000, 32768, 32769, 300000, 1 << 20, 3 << 20, 10000019};
  for (size_t i = 0; i < count; ++i) {
    tensors.push_back(MakeTensor(i, sizes[random.Below(9)],
                                 random.OneIn(2) ? Dtype::kBFloat16 : Dtype::kFloat32,
                                 !random.OneIn(5)));
  }
  const OptimizerSpec optimizers[] = {OptimizerSpec("sgd"),
                                      OptimizerSpec("sgd", {{"momentum", 0.9}}), OptimizerSpec()};
  PlanInput input = Input(std::move(tensors), optimizers[random.Below(3)]);
  input.always_spill_gradients = random.OneIn(4);
  const uint32_t worlds[] = {1, 1, 2, 3, 4, 8};
  input.world_size = worlds[random.Below(6)];
  return input;
}

TEST(PlannerTest, SumIsWithinTheBudgetAndMoreRamNeverMeansMoreTraffic) {
  Random random(7);
  for (int model = 0; model < 60; ++model) {
    PlanInput input = RandomInput(random);
    const absl::Status refused = Refusal(input, 0);
    ASSERT_EQ(ErrorIdOf(refused), ErrorId::kBudgetTooSmall) << refused;
    const Plan rich = PlanFor(input, uint64_t{1} << 40);
    ExpectSound(input, rich);
    double last = 1e9;
    for (int step = 0; step <= 40; ++step) {
      const uint64_t span = rich.total_bytes + rich.total_bytes / 4 - rich.floor_bytes;
      const Plan plan = PlanFor(input, rich.floor_bytes + span * step / 40);
      ExpectSound(input, plan);
      // What the window saves at the turns is not planned for, and little; a window of spilled
      // gradients that gets another slot may take it from that of weights.
      const double most = input.always_spill_gradients ? 1.04 : 1.002;
      EXPECT_LE(BytesPerStep(plan), most * last) << "model " << model << " step " << step;
      last = BytesPerStep(plan);
      if (HasFailure()) return;
    }
  }
}

// Bytes read, written ones counted by what they cost.
double Cost(const PlanInput& input, const Plan& plan) {
  return plan.read_bytes_per_parameter + input.write_cost * plan.write_bytes_per_parameter;
}

TEST(PlannerTest, MoreRamNeverCostsMoreWhateverADriveMakesOfAWrite) {
  Random random(11);
  for (int model = 0; model < 60; ++model) {
    PlanInput input = RandomInput(random);
    const Durability durabilities[] = {{}, {.steps = 2}, {.steps = 100}};
    input.durability = durabilities[random.Below(3)];
    input.write_cost = 1 + random.Below(8) * 0.5;
    const Plan rich = PlanFor(input, uint64_t{1} << 40);
    double last = 1e9;
    for (int step = 0; step <= 40; ++step) {
      const uint64_t span = rich.total_bytes + rich.total_bytes / 4 - rich.floor_bytes;
      const Plan plan = PlanFor(input, rich.floor_bytes + span * step / 40);
      ExpectSound(input, plan);
      EXPECT_LE(Cost(input, plan), 1.002 * last) << "model " << model << " step " << step;
      last = Cost(input, plan);
      if (HasFailure()) return;
    }
  }
}

// True when the other one has less of what comes before weights and state.
bool HasLess(const Plan& other, const Plan& plan) {
  return other.memory.pipeline_blocks < plan.memory.pipeline_blocks ||
         other.memory.scratch_bytes > plan.memory.scratch_bytes ||
         other.memory.sum_blocks < plan.memory.sum_blocks || other.ring_bytes < plan.ring_bytes ||
         other.gradient_window_bytes < plan.gradient_window_bytes ||
         other.memory.window_bytes < plan.memory.window_bytes;
}

// Among them what whole weights, largest first, and then state would make of it.
TEST(PlannerTest, NoHomesThatOneCouldAskForCostLess) {
  Random random(12);
  int compared = 0, cheaper = 0;
  for (int model = 0; model < 80; ++model) {
    PlanInput input = RandomInput(random);
    input.durability.steps = random.OneIn(2) ? 1 : 50;
    input.world_size = 1;
    input.always_spill_gradients = false;
    const Plan rich = PlanFor(input, uint64_t{1} << 40);
    const uint64_t span = rich.total_bytes - rich.floor_bytes;
    const Plan plan = PlanFor(input, rich.floor_bytes + span * random.Below(101) / 100);
    // What comes first is there, with the window that is wanted.
    const uint64_t paged_bytes = rich.resident_weight_bytes - plan.resident_weight_bytes;
    if (plan.gradients_spilled || plan.memory.pipeline_blocks < rich.memory.pipeline_blocks ||
        plan.memory.window_bytes < std::min(paged_bytes, input.ram_bytes / 8 - 4096))
      continue;
    ++compared;
    for (const double weights : {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}) {
      for (const double state : {0.0, 0.25, 0.5, 0.75, 1.0}) {
        PlanInput forced = input;
        forced.policy.weights = weights;
        forced.policy.state = state;
        const auto other = MakePlan(forced);
        if (!other.ok() || HasLess(*other, plan)) continue;
        EXPECT_LE(Cost(input, plan), Cost(input, *other) + 1e-9)
            << "model " << model << " weights " << weights << " state " << state;
        cheaper += Cost(input, plan) < Cost(input, *other);
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(compared, 20);
  EXPECT_GT(cheaper, 100) << "they differ";
}

// A weight of 64 MiB that does not fit leaves room that state takes.
TEST(PlannerTest, WhatALargeWeightLeavesIsTakenByState) {
  std::vector<proto::Tensor> tensors = {MakeTensor(0, 32 << 20, Dtype::kBFloat16),
                                        MakeTensor(1, 32 << 20, Dtype::kBFloat16)};
  for (size_t i = 2; i < 30; ++i) tensors.push_back(MakeTensor(i, 1 << 20, Dtype::kBFloat16));
  PlanInput input = Input(std::move(tensors));
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  for (uint64_t ram = rich.floor_without_spilling_bytes + 128 * kMiB; ram < rich.total_bytes;
       ram += 32 * kMiB) {
    const Plan plan = PlanFor(input, ram);
    if (plan.resident_state_bytes == rich.resident_state_bytes) continue;
    EXPECT_GE(plan.total_bytes + 3 * kMiB, ram) << ram;
  }
}

TEST(PlannerTest, WhatStaysLiesEvenlyOverTheModel) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  const Plan some = PlanFor(input, rich.floor_without_spilling_bytes + 90 * kMiB);
  uint64_t kept_in_first_half = 0, kept = 0;
  for (size_t i = 0; i < 64; ++i) {
    kept += some.memory.weight_resident[i];
    kept_in_first_half += i < 32 && some.memory.weight_resident[i];
  }
  ASSERT_GT(kept, 8u);
  ASSERT_LT(kept, 64u);
  EXPECT_NEAR(static_cast<double>(kept_in_first_half), kept / 2.0, 1);
  const Plan more = PlanFor(input, rich.total_bytes - rich.resident_state_bytes / 2);
  const auto [least, most] =
      std::minmax_element(more.memory.state_resident.begin(), more.memory.state_resident.end());
  EXPECT_GT(*least, 0u);
  EXPECT_LE(*most - *least, 1u);
}

// A byte of state saves a read and a write, one of a frozen weight two reads.
TEST(PlannerTest, StateComesBeforeFrozenWeightsWhereWritesAreDear) {
  std::vector<proto::Tensor> tensors;
  for (size_t i = 0; i < 16; ++i)
    tensors.push_back(MakeTensor(i, 4 << 20, Dtype::kBFloat16, /*trainable=*/i % 2 == 0));
  PlanInput input = Input(std::move(tensors));
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  const uint64_t ram = rich.floor_without_spilling_bytes + 100 * kMiB;
  const Plan every_step = PlanFor(input, ram);
  input.durability.steps = 100;
  input.write_cost = 4;
  const Plan seldom = PlanFor(input, ram);
  EXPECT_GT(seldom.resident_state_bytes, every_step.resident_state_bytes);
  EXPECT_LT(seldom.resident_weight_bytes, every_step.resident_weight_bytes);
}

// So that a job goes on with what it keeps when its drive turns out to be another one.
TEST(PlannerTest, OfATrainedModelAnotherCostOfWritesWouldBuyLittleElse) {
  std::vector<proto::Tensor> tensors = {MakeTensor(0, 8 << 20, Dtype::kBFloat16)};
  for (size_t i = 1; i < 60; ++i)
    tensors.push_back(MakeTensor(i, i % 3 == 0 ? 1'900'000 : 700'000, Dtype::kBFloat16));
  PlanInput input = Input(std::move(tensors));
  input.durability.steps = 20;
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  size_t differing = 0;
  for (uint64_t ram = rich.floor_without_spilling_bytes; ram < rich.total_bytes; ram += 9 * kMiB) {
    std::vector<Plan> plans;
    const double costs[] = {1, 4, 16};
    for (const double cost : costs) {
      input.write_cost = cost;
      plans.push_back(PlanFor(input, ram));
    }
    differing += plans.front().resident_weight_bytes != plans.back().resident_weight_bytes;
    for (size_t i = 0; i < plans.size(); ++i) {
      input.write_cost = costs[i];
      for (const Plan& other : plans)
        EXPECT_LE(Cost(input, other), 1.01 * Cost(input, plans[i])) << "ram " << ram;
    }
  }
  EXPECT_GT(differing, 0u);
}

TEST(PlannerTest, FloorsAreExact) {
  Random random(8);
  for (int model = 0; model < 60; ++model) {
    PlanInput input = RandomInput(random);
    const Plan rich = PlanFor(input, uint64_t{1} << 40);
    ExpectSound(input, PlanFor(input, rich.floor_bytes));
    EXPECT_EQ(ErrorIdOf(Refusal(input, rich.floor_bytes - 1)), ErrorId::kBudgetTooSmall);
    if (input.always_spill_gradients) continue;
    EXPECT_FALSE(PlanFor(input, rich.floor_without_spilling_bytes).gradients_spilled);
    if (rich.floor_without_spilling_bytes > rich.floor_bytes) {
      EXPECT_TRUE(PlanFor(input, rich.floor_without_spilling_bytes - 1).gradients_spilled);
    }
  }
}

TEST(PlannerTest, EnoughRamKeepsEverythingInMemory) {
  PlanInput input = Equal(20, 1 << 20, Dtype::kBFloat16);
  const Plan plan = PlanFor(input, uint64_t{1} << 40);
  EXPECT_EQ(plan.memory.window_bytes, 0u);
  EXPECT_EQ(plan.read_bytes_per_parameter, 0);
  EXPECT_DOUBLE_EQ(plan.write_bytes_per_parameter, 12);
  EXPECT_EQ(plan.resident_weight_bytes + plan.resident_state_bytes, plan.state_bytes);
  EXPECT_EQ(plan.state_bytes, 20 * 12 * kMiB);
}

TEST(PlannerTest, PagedBf16ModelMovesTwentySixBytesPerParameter) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  const Plan plan = PlanFor(input, rich.floor_without_spilling_bytes);
  EXPECT_FALSE(plan.gradients_spilled);
  EXPECT_EQ(plan.memory.window_bytes, 3 * 2 * kMiB);
  // Three of 64 are still there where a forward turns into a backward, and where that ends.
  const double turn_bytes = 3 * 2.0 / 64;
  EXPECT_DOUBLE_EQ(plan.read_bytes_per_parameter, 14 - 2 * turn_bytes);
  EXPECT_DOUBLE_EQ(plan.write_bytes_per_parameter, 12);
  EXPECT_DOUBLE_EQ(plan.bytes_per_further_micro_batch, 4 - 2 * turn_bytes);
}

TEST(PlannerTest, SpilledGradientsCostTheirBytesTwice) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  const Plan plan = PlanFor(input, PlanFor(input, uint64_t{1} << 40).floor_bytes);
  EXPECT_TRUE(plan.gradients_spilled);
  EXPECT_EQ(plan.memory.scratch_bytes, 64 * 2 * kMiB);
  EXPECT_EQ(plan.gradient_window_bytes, 2 * 2 * kMiB);
  EXPECT_DOUBLE_EQ(plan.read_bytes_per_parameter, 16 - 2 * 3 * 2.0 / 64);
  EXPECT_DOUBLE_EQ(plan.write_bytes_per_parameter, 14);
}

TEST(PlannerTest, OneHugeTensorIsKeptInsteadOfThreeTimesItsWindow) {
  std::vector<proto::Tensor> tensors = {MakeTensor(0, 64 << 20, Dtype::kBFloat16)};
  for (size_t i = 1; i < 30; ++i) tensors.push_back(MakeTensor(i, 1 << 20, Dtype::kBFloat16));
  PlanInput input = Input(std::move(tensors));
  const Plan plan = PlanFor(input, PlanFor(input, uint64_t{1} << 40).floor_bytes);
  EXPECT_TRUE(plan.memory.weight_resident[0]);
  EXPECT_EQ(plan.memory.window_bytes, 3 * 2 * kMiB);
}

TEST(PlannerTest, ForcedSpillingUsesTheRestForWeights) {
  PlanInput input = Equal(16, 1 << 20, Dtype::kFloat32);
  input.always_spill_gradients = true;
  const Plan plan = PlanFor(input, 4096 * kMiB);
  EXPECT_TRUE(plan.gradients_spilled);
  EXPECT_EQ(plan.gradient_window_bytes, 8 * 4 * kMiB);
  EXPECT_EQ(plan.resident_weight_bytes, 64 * kMiB);
}

TEST(PlannerTest, FrozenModelNeedsNoGradients) {
  PlanInput input = Input(
      {MakeTensor(0, 1 << 20, Dtype::kBFloat16, false), MakeTensor(1, 5, Dtype::kFloat32, false)});
  const Plan plan = PlanFor(input, uint64_t{1} << 40);
  EXPECT_EQ(plan.gradient_bytes, 0u);
  EXPECT_EQ(plan.write_bytes_per_parameter, 0);
  EXPECT_EQ(plan.trainable_count, 0u);
}

TEST(PlannerTest, RefusalShowsTheSumAndBothFloors) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  const std::string text(Refusal(input, 8 * kMiB).message());
  EXPECT_TRUE(absl::StrContains(text, "OFD-1301")) << text;
  EXPECT_TRUE(absl::StrContains(text, absl::StrCat(rich.floor_bytes))) << text;
  EXPECT_TRUE(absl::StrContains(text, absl::StrCat(rich.floor_without_spilling_bytes))) << text;
  EXPECT_TRUE(absl::StrContains(text, "weight window 6.0 MiB")) << text;
}

TEST(PlannerTest, RefusalNamesOneFloorWhereSpillingSavesNothing) {
  PlanInput input = Equal(1, 64, Dtype::kFloat32);
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  ASSERT_EQ(rich.floor_bytes, rich.floor_without_spilling_bytes);
  const std::string text(Refusal(input, 8 * kMiB).message());
  EXPECT_TRUE(absl::StrContains(text, absl::StrCat(rich.floor_bytes, " bytes"))) << text;
  EXPECT_FALSE(absl::StrContains(text, "spilling")) << text;
  EXPECT_FALSE(absl::StrContains(text, "to keep gradients in memory")) << text;
}

TEST(PlannerTest, WhatStaysInMemoryIsWrittenAtCheckpointsOnly) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  const uint64_t least = PlanFor(input, uint64_t{1} << 40).floor_without_spilling_bytes;
  double last = 12;
  for (const uint64_t ram : {least, least + 200 * kMiB, least + 500 * kMiB, least + 2048 * kMiB}) {
    input.durability = {};
    const Plan every = PlanFor(input, ram);
    EXPECT_DOUBLE_EQ(every.write_bytes_per_parameter, 12);
    EXPECT_EQ(every.checkpoint_bytes, 0u);
    input.durability = {.steps = 10};
    const Plan tenth = PlanFor(input, ram);
    const uint64_t stays = every.resident_weight_bytes + every.resident_state_bytes;
    EXPECT_EQ(tenth.checkpoint_bytes, stays);
    EXPECT_EQ(tenth.read_bytes_per_parameter, every.read_bytes_per_parameter);
    const double part = static_cast<double>(stays) / static_cast<double>(every.state_bytes);
    EXPECT_DOUBLE_EQ(tenth.write_bytes_per_parameter, 12 * (1 - part) + 12 * part / 10);
    EXPECT_LE(tenth.write_bytes_per_parameter, last);
    last = tenth.write_bytes_per_parameter;
  }
  EXPECT_DOUBLE_EQ(last, 1.2) << "everything stays";
  input.durability = {.steps = 0, .seconds = 600};
  const Plan plan = PlanFor(input, 4096 * kMiB);
  EXPECT_EQ(plan.write_bytes_per_parameter, 0);
  EXPECT_EQ(plan.checkpoint_bytes, plan.state_bytes);
  const std::string text = DescribePlan(input, plan);
  EXPECT_TRUE(absl::StrContains(text, "checkpoint every 600 s: 805 MB, not counted above")) << text;
}

TEST(PlannerTest, DescriptionHasTheSum) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  const Plan plan = PlanFor(input, 256 * kMiB);
  const std::string text = DescribePlan(input, plan);
  EXPECT_TRUE(absl::StrContains(text, "of 256.0 MiB")) << text;
  EXPECT_TRUE(absl::StrContains(text, "16 blocks")) << text;
}

PlanInput OfRanks(uint32_t world_size) {
  PlanInput input = Equal(64, 1 << 20, Dtype::kBFloat16);
  input.world_size = world_size;
  return input;
}

TEST(PlannerTest, OneMoreRankCostsItsRegionAndNothingElse) {
  PlanInput two = OfRanks(2), four = OfRanks(4);
  const uint64_t floor_of_two = PlanFor(two, uint64_t{1} << 40).floor_without_spilling_bytes;
  const Plan plan = PlanFor(two, floor_of_two);
  EXPECT_FALSE(plan.gradients_spilled);
  EXPECT_EQ(plan.ring_bytes, 4 * kMiB / 2);
  EXPECT_EQ(plan.memory.other_region_bytes,
            proto::kRegionFixedBytes + proto::kLoadingStagingBytes + 4096 + plan.ring_bytes);
  EXPECT_EQ(PlanFor(four, uint64_t{1} << 40).floor_without_spilling_bytes,
            floor_of_two + 2 * plan.memory.other_region_bytes);
}

TEST(PlannerTest, RamBuysGoodRingsBeforeWeightsAndWholeGradientsAtTheEnd) {
  PlanInput input = OfRanks(4);
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  EXPECT_EQ(rich.ring_bytes, 128 * kMiB);  // ZeRO stage 1
  EXPECT_EQ(rich.resident_weight_bytes + rich.resident_state_bytes, rich.state_bytes);
  uint64_t last = 0;
  for (int step = 0; step <= 40; ++step) {
    const uint64_t least = rich.floor_without_spilling_bytes;
    const uint64_t ram = least + (rich.total_bytes - least) * step / 40;
    const Plan plan = PlanFor(input, ram);
    EXPECT_GE(plan.ring_bytes, last);
    last = plan.ring_bytes;
    if (plan.resident_weight_bytes > 0) {
      EXPECT_GE(plan.ring_bytes, 8 * kMiB);
    }
    if (plan.ring_bytes > 8 * kMiB) {
      EXPECT_EQ(plan.resident_state_bytes, rich.resident_state_bytes);
    }
  }
  EXPECT_EQ(last, 128 * kMiB);
}

TEST(PlannerTest, OnlyTheFirstRankCanCopyTheLargestTensor) {
  PlanInput input = Input({MakeTensor(0, 20 << 20, Dtype::kBFloat16)});
  input.world_size = 3;
  const Plan plan = PlanFor(input, uint64_t{1} << 40);
  EXPECT_EQ(plan.staging_bytes, proto::kLoadingStagingBytes);
  EXPECT_EQ(plan.first_staging_bytes, 40 * kMiB);
  EXPECT_EQ(plan.memory.region_bytes, plan.memory.other_region_bytes + 40 * kMiB);
}

TEST(PlannerTest, SumsOfRanksAreDescribed) {
  PlanInput input = OfRanks(2);
  const Plan rich = PlanFor(input, uint64_t{1} << 40);
  const std::string text = DescribePlan(input, PlanFor(input, rich.floor_without_spilling_bytes));
  EXPECT_TRUE(absl::StrContains(text, "gradients of 2 ranks: sum")) << text;
  EXPECT_TRUE(absl::StrContains(text, "2 x 2.0 MiB")) << text;
  const Plan spilled = PlanFor(input, rich.floor_bytes);
  EXPECT_TRUE(absl::StrContains(DescribePlan(input, spilled), "2 blocks, 128.0 MiB spill"))
      << DescribePlan(input, spilled);
  EXPECT_TRUE(absl::StrContains(Refusal(input, 8 * kMiB).message(), "delivery rings 2 x 2.0 MiB"));
}

TEST(PlannerTest, ARefusalTellsTheBudgetFromTheFloor) {
  PlanInput input = Equal(4, 1 << 20, Dtype::kFloat32);
  const uint64_t floor = PlanFor(input, uint64_t{1} << 40).floor_bytes;
  const std::string close = absl::StrCat(
      "ram is ", floor - 1, " bytes, the least that trains this ", "model is ", floor, " bytes = ");
  EXPECT_TRUE(absl::StrContains(Refusal(input, floor - 1).message(), close))
      << Refusal(input, floor - 1);
  EXPECT_TRUE(absl::StrContains(Refusal(input, kMiB).message(), "ram is 1.0 MiB, the least"))
      << Refusal(input, kMiB);
}

TEST(PlannerTest, GradientsThatTheTrainerReducesAreWholeInEveryRegion) {
  PlanInput input = OfRanks(3);
  input.gradients_reduced = true;
  const uint64_t floor = PlanFor(input, uint64_t{1} << 40).floor_bytes;
  const Plan plan = PlanFor(input, floor);
  EXPECT_EQ(plan.floor_bytes, plan.floor_without_spilling_bytes);
  EXPECT_EQ(ErrorIdOf(Refusal(input, floor - 1)), ErrorId::kBudgetTooSmall);
  EXPECT_EQ(plan.total_bytes, plan.slab.total_bytes + plan.memory.region_bytes +
                                  2 * plan.memory.other_region_bytes + plan.overhead_bytes);
  EXPECT_EQ(plan.ring_bytes, 0u);
  EXPECT_FALSE(plan.gradients_spilled);
  uint64_t end = plan.gradient_window_offset;
  for (const proto::GradientPlacement& gradient : plan.memory.gradients) {
    EXPECT_EQ(gradient.home, GradientHome::kRegion);
    EXPECT_EQ(gradient.offset_bytes, end);
    end += 2 * kMiB;
  }
  EXPECT_EQ(plan.memory.other_region_bytes, end);
  EXPECT_EQ(plan.memory.region_bytes, end + plan.first_staging_bytes);
  const std::string text = DescribePlan(input, plan);
  EXPECT_TRUE(absl::StrContains(text, "3 x 128.0 MiB, reduced by the trainer")) << text;
  PlanInput four = OfRanks(4);
  four.gradients_reduced = true;
  EXPECT_EQ(PlanFor(four, uint64_t{1} << 40).floor_bytes, floor + plan.memory.other_region_bytes)
      << "one more rank costs its region";
}

TEST(PlannerTest, GradientsThatTheTrainerReducesAreNotSpilled) {
  PlanInput input = OfRanks(2);
  input.gradients_reduced = input.always_spill_gradients = true;
  EXPECT_EQ(ErrorIdOf(Refusal(input, uint64_t{1} << 40)), ErrorId::kBadValue);
}

TEST(PlannerTest, HundredThousandTensorsArePlanned) {
  PlanInput input = Equal(100000, 40000, Dtype::kBFloat16);
  ExpectSound(input, PlanFor(input, 12000 * kMiB));
}

}  // namespace
}  // namespace offload::zero3

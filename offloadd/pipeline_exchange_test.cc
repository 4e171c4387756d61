#include "offloadd/pipeline_exchange.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "offloadd/parts_fixture.h"

namespace offload::daemon {
namespace {

constexpr uint64_t kElements = 40960;
constexpr uint32_t kTensors = 8;

std::vector<uint32_t> All() {
  std::vector<uint32_t> all(kTensors);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Equal ones, of which the first keep their state.
PartsOptions Keeping(uint32_t kept, uint32_t blocks) {
  PartsOptions options{
      .window_bytes = 3 * kElements * 4, .keeps_state_of = kept, .pipeline_blocks = blocks};
  for (uint32_t i = 0; i < kTensors; ++i)
    options.tensors.push_back(TestTensor(absl::StrCat("tensor.", i), kElements));
  return options;
}

void Ask(Parts& parts, uint32_t blocks) {
  parts.context.depths.pipeline_blocks = blocks;
  parts.executor().TakeDepths();
}

void Step(Parts& parts, uint64_t step) {
  parts.Begin(step, All());
  parts.Run();
  EXPECT_EQ(parts.executor().AuditPlaces(), "") << "step " << step;
}

void StepDurably(Parts& parts, uint64_t step) {
  Step(parts, step);
  EXPECT_EQ(parts.CompareDurable(parts.now), "") << "step " << step;
}

uint32_t KeptOf(const Parts& parts) {
  const std::vector<uint32_t>& kept = parts.context.plan.state_resident;
  return std::accumulate(kept.begin(), kept.end(), 0u);
}

TEST(PipelineExchangeTest, ADeeperPipelineTakesThePlacesOfWhatStayed) {
  Parts parts(Keeping(/*kept=*/3, /*blocks=*/2));
  StepDurably(parts, 1);
  const uint64_t kept_bytes = parts.state().loaded_bytes();
  Ask(parts, 4);
  EXPECT_EQ(parts.executor().blocks().count(), 2u) << "until a step has ended";
  StepDurably(parts, 2);
  EXPECT_EQ(parts.executor().blocks().count(), 4u);
  EXPECT_EQ(parts.context.plan.pipeline_blocks, 4u);
  EXPECT_EQ(KeptOf(parts), 1u);
  EXPECT_EQ(parts.state().loaded_bytes(), kept_bytes / 3);
  EXPECT_TRUE(parts.executor().TakeExchanged());
  EXPECT_FALSE(parts.executor().TakeExchanged());
  for (uint64_t step = 3; step <= 4; ++step) StepDurably(parts, step);
}

TEST(PipelineExchangeTest, AShallowerOneGivesBlocksToStateThatStaysFromThenOn) {
  Parts parts(Keeping(/*kept=*/1, /*blocks=*/6));
  StepDurably(parts, 1);
  Ask(parts, 4);
  const uint64_t block_bytes = parts.executor().blocks().block_bytes();
  StepDurably(parts, 2);
  EXPECT_EQ(parts.executor().blocks().count(), 4u);
  EXPECT_EQ(parts.context.plan.state_resident, std::vector<uint32_t>({1, 1, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(parts.state().loaded_bytes(), block_bytes) << "nothing is read for it";
  StepDurably(parts, 3);
  EXPECT_EQ(parts.state().loaded_bytes(), 3 * block_bytes);
  StepDurably(parts, 4);
  Ask(parts, 6);
  for (uint64_t step = 5; step <= 7; ++step) StepDurably(parts, step);
  EXPECT_EQ(parts.executor().exchange().given(), 2u);
  EXPECT_EQ(parts.executor().exchange().taken(), 2u);
}

TEST(PipelineExchangeTest, WhatReadsAndUpdatesAheadOfAStepIsNotDisturbed) {
  PartsOptions options = Keeping(/*kept=*/2, /*blocks=*/2);
  options.reads_ahead = options.updates_ahead = true;
  Parts parts(options);
  for (uint64_t step = 1; step <= 12; ++step) {
    parts.Announce(step, All());
    parts.Run();
    Ask(parts, step % 3 == 0 ? 2 : 4);
    StepDurably(parts, step);
  }
  EXPECT_GT(parts.executor().exchange().given(), 0u);
  EXPECT_GT(parts.executor().exchange().taken(), 2u);
}

// It was perhaps demanded so (state_home = nvme).
TEST(PipelineExchangeTest, APlanThatKeepsNothingStaysLikeThat) {
  Parts parts(Keeping(/*kept=*/0, /*blocks=*/6));
  Ask(parts, 4);
  StepDurably(parts, 1);
  EXPECT_EQ(parts.executor().blocks().count(), 6u);
}

TEST(PipelineExchangeTest, MoreBlocksThanExtentsThatPassAreNotTaken) {
  Parts parts(Keeping(/*kept=*/kTensors - 2, /*blocks=*/2));
  Ask(parts, 20);
  StepDurably(parts, 1);
  EXPECT_EQ(KeptOf(parts), kTensors - 2);
}

// Inside an interval it is only in memory.
TEST(PipelineExchangeTest, WhatTheStoreDoesNotHaveKeepsItsPlaceUntilItIsWritten) {
  PartsOptions options = Keeping(/*kept=*/3, /*blocks=*/2);
  options.durability.steps = 100;
  Parts parts(options);
  Step(parts, 1);
  Ask(parts, 4);
  for (uint64_t step = 2; step <= 3; ++step) Step(parts, step);
  EXPECT_EQ(KeptOf(parts), 3u);
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  EXPECT_EQ(KeptOf(parts), 1u);
  for (uint64_t step = 4; step <= 5; ++step) Step(parts, step);
  Ask(parts, 2);
  for (uint64_t step = 6; step <= 7; ++step) Step(parts, step);
  EXPECT_EQ(KeptOf(parts), 3u);
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

// Of one that is read, nobody knows when that ends.
TEST(PipelineExchangeTest, StateThatIsBeingReadKeepsItsPlace) {
  Parts parts(Keeping(/*kept=*/1, /*blocks=*/2));
  StepDurably(parts, 1);
  Ask(parts, 3);
  parts.cache().Hold(0);  // as a transfer does
  parts.Begin(2, {1, 2, 3, 4, 5, 6, 7});
  parts.Run();
  EXPECT_EQ(KeptOf(parts), 1u);
  parts.cache().Unhold(0);
  StepDurably(parts, 3);
  EXPECT_EQ(KeptOf(parts), 0u);
}

}  // namespace
}  // namespace offload::daemon

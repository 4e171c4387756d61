#include "offloadd/update_executor.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "offloadd/parts_fixture.h"

namespace offload::daemon {
namespace {

using proto::Dtype;

constexpr uint64_t kElements = 40960;           // of a tensor that is no bundle
constexpr uint64_t kSlotBytes = kElements * 4;  // whole sectors
constexpr uint64_t kLarge = proto::kExtentElements + 20000;

// Equal ones, of which the window holds `slots`.
PartsOptions Equal(uint32_t count, uint32_t slots) {
  PartsOptions options{.window_bytes = slots * kSlotBytes};
  for (uint32_t i = 0; i < count; ++i)
    options.tensors.push_back(TestTensor(absl::StrCat("tensor.", i), kElements));
  return options;
}

// One of everything: both dtypes, a bundle of each, a tensor of two extents.
PartsOptions Mixed(kernels::OptimizerSpec optimizer = kernels::OptimizerSpec()) {
  PartsOptions options{.optimizer = std::move(optimizer), .window_bytes = 4ull << 20};
  options.tensors = {TestTensor("a", kElements),
                     TestTensor("b", kLarge, Dtype::kBFloat16),
                     TestTensor("small.a", 1000),
                     TestTensor("small.b", 2000, Dtype::kBFloat16),
                     TestTensor("small.c", 70, Dtype::kBFloat16),
                     TestTensor("c", kLarge)};
  return options;
}
const std::vector<uint32_t> kAll = {0, 1, 2, 3, 4, 5};

void Schedule(Parts& parts, const std::vector<uint32_t>& tensors) {
  parts.cache().SetSchedule(tensors);
  const WeightCache::Position position;
  parts.cache().SetPositions({&position, 1});
}

class UpdateExecutorTest : public ::testing::TestWithParam<const char*> {};

TEST_P(UpdateExecutorTest, StepsAreTheModelsBitForBitAndDurable) {
  Parts parts(Mixed(kernels::OptimizerSpec(GetParam())));
  for (uint64_t step = 1; step <= 3; ++step) {
    parts.Begin(step, kAll);
    EXPECT_TRUE(parts.executor().busy());
    parts.Run();
    EXPECT_FALSE(parts.executor().busy());
    EXPECT_EQ(parts.committed.size(), step);
    EXPECT_EQ(parts.CompareDurable(parts.now), "") << "step " << step;
    for (const uint32_t tensor : kAll) {
      ASSERT_EQ(parts.StateOf(tensor), proto::kResident) << tensor;
      EXPECT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights) << tensor;
    }
  }
  EXPECT_EQ(parts.executor().buffer_bytes(), 0u) << "all blocks are back";
}

// LAMB sweeps twice: its ratio is that of a whole tensor, also of one of two extents.
INSTANTIATE_TEST_SUITE_P(Optimizers, UpdateExecutorTest,
                         ::testing::Values("adamw", "sgd", "rmsprop", "lamb"),
                         [](const auto& info) { return std::string(info.param); });

TEST(UpdateExecutorTest, TensorsWithoutAGradientStayAsTheyAre) {
  Parts parts(Mixed());
  parts.Begin(1, {1, 3});
  parts.Run();
  parts.Begin(2, {0, 4});
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, AStepOfNothingIsCommittedAllTheSame) {
  Parts parts(Equal(1, 3));
  parts.Begin(1, {});
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, APowerCutLeavesTheStepOrTheOneBefore) {
  PartsOptions options = Equal(2, 2);
  options.tensors.push_back(TestTensor("small", 1000, Dtype::kBFloat16));
  int cuts_before = 0, cuts_after = 0;
  for (int turns = 0; cuts_after < 3; ++turns) {
    Parts parts(options);
    parts.Begin(1, {0, 1, 2});
    parts.Run();
    const JobState before = parts.now;
    parts.Begin(2, {0, 1, 2});
    for (int i = 0; i < turns; ++i) parts.Turn();
    const bool was_committed = parts.committed.size() == 2;
    parts.drive().PowerCut();
    parts.Run();
    parts.drive().RestorePower();
    const bool is_before = parts.CompareDurable(before).empty();
    EXPECT_TRUE(is_before || parts.CompareDurable(parts.now).empty()) << "after turn " << turns;
    EXPECT_FALSE(is_before && was_committed) << "after turn " << turns;
    (was_committed ? cuts_after : cuts_before) += 1;
    ASSERT_LT(turns, 1000);
  }
  EXPECT_GT(cuts_before, 10);
}

TEST(UpdateExecutorTest, APinnedTensorIsWaitedForAndTheOthersAreNot) {
  Parts parts(Equal(3, 3));
  parts.Acquire(1);
  parts.Run();
  const Bytes before = parts.InSlab(1);
  const std::byte* const slot = parts.cache().slot(1);
  parts.Begin(1, {0, 1, 2});
  EXPECT_EQ(parts.StateOf(1), proto::kPending);
  parts.Run();
  EXPECT_EQ(parts.computed, std::vector<uint32_t>({0, 2}));
  EXPECT_TRUE(parts.executor().Updating(1));
  EXPECT_TRUE(parts.committed.empty());
  EXPECT_EQ(Bytes(slot, slot + before.size()), before) << "it is being used";
  parts.Release(1);
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, UpdatesComeInTheOrderOfTheNextForward) {
  PartsOptions options = Equal(4, 4);
  options.pipeline_blocks = 1;
  Parts parts(options);
  Schedule(parts, {2, 0, 3, 1});
  parts.Begin(1, {0, 1, 2, 3});
  parts.Run();
  EXPECT_EQ(parts.computed, std::vector<uint32_t>({2, 0, 3, 1}));
}

TEST(UpdateExecutorTest, WhatARankWaitsForIsUpdatedFirst) {
  PartsOptions options = Equal(4, 1);
  options.pipeline_blocks = 1;
  Parts parts(options);
  Schedule(parts, {0, 1, 2, 3});
  parts.Begin(1, {0, 1, 2, 3});
  const uint64_t waiting = parts.Acquire(3);
  while (!parts.IsAnswered(waiting)) parts.Turn();
  EXPECT_EQ(parts.computed, std::vector<uint32_t>({3}));
  EXPECT_EQ(parts.InSlab(3), parts.now.tensors[3]->weights);
  parts.Release(3);
  parts.executor().Hurry();
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

// One slot, and the forward stands before the tensor that is in it: the others would take its
// place.
TEST(UpdateExecutorTest, TheForwardIsWaitedForWhileItMayCome) {
  for (const bool hurry : {false, true}) {
    Parts parts(Equal(3, 1));
    Schedule(parts, {0, 1, 2});
    parts.Begin(1, {0, 1, 2});
    parts.Run();
    EXPECT_EQ(parts.computed, std::vector<uint32_t>({0}));
    EXPECT_EQ(parts.StateOf(0), proto::kResident);
    hurry ? parts.executor().Hurry() : parts.clock().AdvanceSeconds(0.3);
    parts.Run();
    EXPECT_EQ(parts.computed, std::vector<uint32_t>({0, 1, 2}));
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
}

TEST(UpdateExecutorTest, ExtentsInFlightAreAsManyAsThereAreBlocks) {
  PartsOptions options{.window_bytes = 16ull << 20, .pipeline_blocks = 3};
  options.tensors = {TestTensor("large", 8 * proto::kExtentElements)};
  Parts parts(options);
  parts.Begin(1, {0});
  parts.executor().Turn();
  EXPECT_EQ(parts.context.outstanding, 3u);
  EXPECT_EQ(parts.executor().buffer_bytes(), 3 * parts.context.layout.pipeline_block_bytes);
  while (parts.committed.empty()) {
    parts.Turn();
    ASSERT_LE(parts.context.outstanding, 3u);
  }
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, ExtentsInMemoryAreAsManyAsTheThreadsKeepBusy) {
  PartsOptions options{.keeps_weights = true, .keeps_state = true, .pipeline_blocks = 1};
  options.tensors = {TestTensor("large", 9 * proto::kExtentElements)};
  for (const uint32_t threads : {1, 3}) {
    options.depths.update_threads = threads;
    Parts parts(options);
    parts.Begin(1, {0});
    parts.executor().Turn();
    EXPECT_EQ(parts.context.outstanding, 2 * threads + 2);
    parts.Run();
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
}

TEST(UpdateExecutorTest, WhatStaysInMemoryIsReadOnce) {
  PartsOptions options = Mixed();
  options.keeps_weights = options.keeps_state = true;
  Parts parts(options);
  parts.Begin(1, kAll);
  parts.Run();
  const uint64_t read = parts.drive().counters().reads;
  parts.Begin(2, kAll);
  parts.Run();
  EXPECT_EQ(parts.drive().counters().reads, read);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, StepsOfAnIntervalAreCommittedAtItsEnd) {
  for (const bool keeps : {false, true}) {
    PartsOptions options = Mixed();
    options.keeps_weights = options.keeps_state = keeps;
    options.durability = {.steps = 3};
    Parts parts(options);
    const JobState first = parts.now;
    for (const uint64_t step : {1, 2}) {
      const uint64_t bytes = parts.drive().counters().written_bytes;
      parts.Begin(step, kAll);
      parts.Run();
      EXPECT_EQ(parts.drive().counters().written_bytes > bytes, !keeps) << "step " << step;
    }
    EXPECT_EQ(parts.written, std::vector<uint64_t>({1, 2}));
    EXPECT_TRUE(parts.executor().HasUncommitted());
    EXPECT_EQ(parts.CompareDurable(first), "");
    parts.Begin(3, kAll);
    parts.Run();
    EXPECT_EQ(parts.committed, std::vector<uint64_t>({3}));
    EXPECT_FALSE(parts.executor().HasUncommitted());
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
}

PartsOptions InMemoryWithCheckpoints() {
  PartsOptions options = Mixed();
  options.keeps_weights = options.keeps_state = true;
  options.durability = {.steps = 2};
  return options;
}

// As far as the third may begin.
JobState TakeTwoSteps(Parts& parts) {
  parts.Begin(1, kAll);
  parts.Run();
  parts.Begin(2, kAll);
  while (!parts.executor().MayBegin()) parts.Turn();
  return parts.now;
}

TEST(UpdateExecutorTest, ACheckpointIsWrittenWhileTheNextStepRuns) {
  Parts parts(InMemoryWithCheckpoints());
  const JobState checkpoint = TakeTwoSteps(parts);
  EXPECT_TRUE(parts.executor().committing());
  parts.Begin(3, kAll);
  EXPECT_TRUE(parts.committed.empty());
  parts.Run();
  EXPECT_EQ(parts.written, std::vector<uint64_t>({1, 2, 3}));
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({2}));
  EXPECT_EQ(parts.CompareDurable(checkpoint), "");
  for (const uint32_t tensor : kAll)
    EXPECT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights) << tensor;
  parts.Begin(4, kAll);
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({2, 4}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, AnIntervalByTheClockBeginsWithTheEndOfACheckpoint) {
  PartsOptions options = InMemoryWithCheckpoints();
  options.durability = {.steps = 0, .seconds = 10};
  Parts parts(options);
  parts.clock().AdvanceSeconds(10);
  parts.Begin(1, kAll);
  while (!parts.executor().MayBegin()) parts.Turn();
  ASSERT_TRUE(parts.executor().committing());
  parts.Begin(2, kAll);
  parts.Run();
  EXPECT_EQ(parts.written, std::vector<uint64_t>({1, 2}));
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
}

TEST(UpdateExecutorTest, APowerCutBesideACheckpointLeavesItOrTheOneBefore) {
  int cuts_before = 0, cuts_after = 0;
  for (int turns = 0; cuts_after < 3; ++turns) {
    Parts parts(InMemoryWithCheckpoints());
    const JobState first = parts.now, checkpoint = TakeTwoSteps(parts);
    parts.Begin(3, kAll);
    for (int i = 0; i < turns; ++i) parts.Turn();
    const bool was_committed = !parts.committed.empty();
    parts.drive().PowerCut();
    parts.Run();
    parts.drive().RestorePower();
    const bool is_first = parts.CompareDurable(first).empty();
    EXPECT_TRUE(is_first || parts.CompareDurable(checkpoint).empty()) << "after turn " << turns;
    EXPECT_FALSE(is_first && was_committed) << "after turn " << turns;
    (was_committed ? cuts_after : cuts_before) += 1;
    ASSERT_LT(turns, 1000);
  }
  EXPECT_GT(cuts_before, 5);
}

// What it writes would go into the checkpoint.
TEST(UpdateExecutorTest, WhatPassesThroughMemoryIsUpdatedAfterTheCheckpoint) {
  for (const bool keeps_weights : {false, true}) {
    PartsOptions options = InMemoryWithCheckpoints();
    options.keeps_weights = keeps_weights;
    options.keeps_state = false;
    Parts parts(options);
    const JobState checkpoint = TakeTwoSteps(parts);
    parts.computed.clear();
    parts.Begin(3, kAll);
    while (parts.committed.empty()) {
      parts.Turn();
      for (const uint32_t tensor : parts.computed) EXPECT_FALSE(parts.committed.empty()) << tensor;
    }
    EXPECT_EQ(parts.CompareDurable(checkpoint), "");
    parts.Run();
    parts.executor().CommitSoon();
    parts.Run();
    EXPECT_EQ(parts.committed, std::vector<uint64_t>({2, 3}));
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
}

TEST(UpdateExecutorTest, WhoAsksBesideACheckpointHasTheStepThatIsUnderWay) {
  Parts parts(InMemoryWithCheckpoints());
  TakeTwoSteps(parts);
  parts.executor().CommitSoon();  // of nothing new
  parts.Begin(3, kAll);
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({2, 3}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  EXPECT_FALSE(parts.executor().HasUncommitted());
}

TEST(UpdateExecutorTest, WhoAsksForACommitHasItBeforeTheEndOfTheInterval) {
  PartsOptions options = Mixed();
  options.keeps_weights = options.keeps_state = true;
  options.durability = {.steps = 100};
  Parts parts(options);
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_TRUE(parts.committed.empty()) << "there is nothing";
  parts.Begin(1, kAll);
  parts.Run();
  parts.executor().CommitSoon();  // at once
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  parts.Begin(2, kAll);
  parts.executor().CommitSoon();  // with the step
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1, 2}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateExecutorTest, AnIntervalByTheClockEndsWithTheFirstStepBehindIt) {
  PartsOptions options = Equal(2, 2);
  options.durability = {.steps = 0, .seconds = 10};
  Parts parts(options);
  parts.clock().AdvanceSeconds(9);
  parts.Begin(1, {0, 1});
  parts.Run();
  EXPECT_TRUE(parts.committed.empty());
  parts.clock().AdvanceSeconds(1);
  parts.Begin(2, {0, 1});
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({2}));
  parts.clock().AdvanceSeconds(9);
  parts.Begin(3, {0, 1});
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({2})) << "counted from that commit";
}

// A bit of one of its first reads: of a step, whatever it finds in memory already.
class WrongBitTest : public ::testing::TestWithParam<std::tuple<const char*, bool, bool, int>> {
 protected:
  static PartsOptions Options() {
    const auto [optimizer, keeps_weights, keeps_state, interval] = GetParam();
    PartsOptions options = Mixed(kernels::OptimizerSpec(optimizer));
    options.keeps_weights = keeps_weights;
    options.keeps_state = keeps_state;
    options.durability = {.steps = static_cast<uint64_t>(interval)};
    return options;
  }
};

TEST_P(WrongBitTest, OnTheWayIsReadAgainAndTheStepGoesOn) {
  for (uint64_t nth = 1;; ++nth) {
    Parts parts(Options());
    parts.Begin(1, kAll);
    parts.Run();
    parts.drive().AddFault({aio::FaultKind::kBitFlip, nth});
    const uint64_t mismatches = parts.context.store->error_counts().checksum_mismatches;
    parts.Begin(2, kAll);
    parts.Run();
    const bool was_met = parts.drive().faults_met() == 1;
    parts.drive().ClearFaults();
    ASSERT_TRUE(parts.context.failure.ok()) << nth << ": " << parts.context.failure;
    EXPECT_EQ(parts.context.store->error_counts().checksum_mismatches - mismatches,
              was_met ? 1u : 0u);
    parts.executor().CommitSoon();
    parts.Run();
    ASSERT_EQ(parts.CompareDurable(parts.now), "") << "bit of read " << nth;
    for (const uint32_t tensor : kAll)
      ASSERT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights) << tensor;
    if (!was_met) break;
    ASSERT_LT(nth, 100u);
  }
}

TEST_P(WrongBitTest, ThatStaysIsTheEndOfTheJob) {
  Parts parts(Options());
  parts.Begin(1, kAll);
  parts.Run();
  const uint64_t reads = parts.drive().counters().reads;
  parts.drive().AddFault({aio::FaultKind::kBitFlip, 1, /*persistent=*/true});
  parts.Begin(2, kAll);
  parts.Run();
  if (parts.drive().counters().reads == reads) return;  // all is in memory
  EXPECT_EQ(ErrorIdOf(parts.context.failure), ErrorId::kChecksum) << parts.context.failure;
}

INSTANTIATE_TEST_SUITE_P(All, WrongBitTest,
                         ::testing::Combine(::testing::Values("adamw", "lamb"), ::testing::Bool(),
                                            ::testing::Bool(), ::testing::Values(1, 4)));

TEST(UpdateExecutorTest, AFaultOfTheDriveFailsTheJobAndTheEpochBeforeStands) {
  using aio::FaultKind;
  for (const auto& [kind, error] : {std::pair{FaultKind::kReadError, ErrorId::kIo},
                                    {FaultKind::kBitFlip, ErrorId::kChecksum},
                                    {FaultKind::kWriteError, ErrorId::kIo},
                                    {FaultKind::kFlushError, ErrorId::kStoreFailed}}) {
    SCOPED_TRACE(aio::FaultName(kind));
    Parts parts(Mixed());
    parts.Begin(1, kAll);
    parts.Run();
    const JobState before = parts.now;
    parts.drive().AddFault({kind, 1, /*persistent=*/true});
    parts.Begin(2, kAll);
    const uint64_t waiting = parts.Acquire(0);
    parts.Run();
    EXPECT_EQ(ErrorIdOf(parts.context.failure), error) << parts.context.failure;
    EXPECT_TRUE(parts.IsAnswered(waiting));
    EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
    parts.drive().ClearFaults();
    EXPECT_EQ(parts.CompareDurable(before), "");
  }
}

}  // namespace
}  // namespace offload::daemon

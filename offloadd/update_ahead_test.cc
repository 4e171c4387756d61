#include "offloadd/update_ahead.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "offloadd/parts_fixture.h"

namespace offload::daemon {
namespace {

using proto::Dtype;

constexpr uint64_t kElements = 40960;  // of a tensor that is no bundle
constexpr uint64_t kLarge = proto::kExtentElements + 20000;

// Two of one extent, one of two, a bundle; nothing but that stays in memory.
PartsOptions Ahead(uint32_t pipeline_blocks = 4) {
  PartsOptions options{
      .window_bytes = 4ull << 20, .pipeline_blocks = pipeline_blocks, .updates_ahead = true};
  options.tensors = {TestTensor("a", kElements), TestTensor("b", kLarge, Dtype::kBFloat16),
                     TestTensor("c", kElements, Dtype::kBFloat16),
                     TestTensor("small", 1000, Dtype::kBFloat16)};
  return options;
}
const std::vector<uint32_t> kAllAhead = {0, 1, 2, 3};
constexpr uint64_t kExtentsAhead = 4;  // of all but the bundle

// After a step, whose weights ranks see and use while the next one is announced.
void StepAndAnnounce(Parts& parts, const std::vector<uint32_t>& announced = kAllAhead) {
  parts.Begin(1, kAllAhead);
  parts.Run();
  parts.Announce(2, announced);
  parts.Run();
}

TEST(UpdateAheadTest, NobodySeesItBeforeTheStepAndThenItIsTheSteps) {
  for (const bool in_window : {true, false}) {
    PartsOptions options = Ahead();
    if (!in_window) options.window_bytes = 600 << 10;  // of the largest alone
    Parts parts(options);
    parts.Begin(1, kAllAhead);
    parts.Run();
    const uint64_t written = parts.drive().counters().written_bytes;
    parts.Announce(2, kAllAhead);
    parts.Run();
    EXPECT_GT(parts.drive().counters().written_bytes, written + 12 * (2 * kElements + kLarge));
    EXPECT_EQ(parts.executor().buffer_bytes(), 0u);
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
    for (const uint32_t tensor : kAllAhead) {
      const uint64_t waiting = parts.Acquire(tensor);
      parts.Run();
      ASSERT_TRUE(parts.IsAnswered(waiting));
      EXPECT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights) << tensor;
      parts.Release(tensor);
    }
    const uint64_t written_ahead = parts.drive().counters().written_bytes;
    parts.Begin(2, kAllAhead);
    parts.Run();
    EXPECT_EQ(parts.executor().used_ahead(), kExtentsAhead);
    EXPECT_EQ(parts.executor().lost_ahead(), 0u);
    EXPECT_LT(parts.drive().counters().written_bytes, written_ahead + 12 * kElements)
        << "a bundle and a table";
    EXPECT_EQ(parts.committed, std::vector<uint64_t>({1, 2}));
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
    for (const uint32_t tensor : kAllAhead) {
      const uint64_t waiting = parts.Acquire(tensor);
      parts.Run();
      ASSERT_TRUE(parts.IsAnswered(waiting));
      EXPECT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights) << tensor;
      parts.Release(tensor);
    }
  }
}

TEST(UpdateAheadTest, AnExtentWhoseGradientHasChangedIsUpdatedAnew) {
  Parts parts(Ahead());
  StepAndAnnounce(parts);
  parts.GradientOf(2, 1).back() ^= std::byte{1};  // of its second extent
  parts.Begin(2, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.executor().used_ahead(), kExtentsAhead - 1);
  EXPECT_EQ(parts.executor().lost_ahead(), 1u);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  EXPECT_EQ(parts.InSlab(1), parts.now.tensors[1]->weights);
}

TEST(UpdateAheadTest, AStepOfOtherNumbersTakesNothingOfIt) {
  Parts parts(Ahead());
  StepAndAnnounce(parts);
  parts.context.optimizer.Set("lr", 0.5);
  parts.Begin(2, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.executor().used_ahead(), 0u);
  EXPECT_EQ(parts.executor().lost_ahead(), kExtentsAhead);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  parts.Announce(3, kAllAhead);  // one step is left out
  parts.Run();
  parts.Begin(3, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.executor().lost_ahead() + parts.executor().used_ahead(), kExtentsAhead);
  parts.Announce(4, kAllAhead);
  parts.Run();
  parts.Begin(4, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.executor().used_ahead(), kExtentsAhead);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateAheadTest, ATensorThatTheStepLeavesOutKeepsItsValues) {
  Parts parts(Ahead());
  StepAndAnnounce(parts);
  parts.Begin(2, {0, 3});
  parts.Run();
  EXPECT_EQ(parts.executor().used_ahead(), 1u);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  parts.Begin(3, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(UpdateAheadTest, ABackwardThatIsNotSteppedIsForgotten) {
  Parts parts(Ahead());
  StepAndAnnounce(parts);
  for (const uint32_t tensor : {0, 1, 2}) {
    for (std::byte& byte : parts.GradientOf(2, tensor)) byte ^= std::byte{1};  // another batch
  }
  parts.Announce(2, {0, 1});
  parts.Run();
  parts.Announce(2, {2});
  parts.Run();
  parts.Begin(2, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
  EXPECT_GE(parts.executor().lost_ahead(), kExtentsAhead);
}

TEST(UpdateAheadTest, APutComesBeforeTheStepAllTheSame) {
  for (int turns = 0; turns < 40; ++turns) {
    Parts parts(Ahead());
    parts.Begin(1, kAllAhead);
    parts.Run();
    parts.Announce(2, kAllAhead);
    for (int i = 0; i < turns; ++i) parts.Turn();
    parts.Put(0, MakeValues(Dtype::kFloat32, kElements, /*key=*/77));
    parts.Run();
    parts.Begin(2, kAllAhead);
    parts.Run();
    ASSERT_EQ(parts.CompareDurable(parts.now), "") << turns;
    ASSERT_EQ(parts.InSlab(0), parts.now.tensors[0]->weights) << turns;
  }
}

TEST(UpdateAheadTest, AStepMayComeAtAnyMoment) {
  for (int turns = 0; turns < 40; ++turns) {
    for (const uint32_t blocks : {1, 2, 3, 8}) {
      Parts parts(Ahead(blocks));
      parts.Begin(1, kAllAhead);
      parts.Run();
      parts.Announce(2, kAllAhead);
      for (int i = 0; i < turns; ++i) parts.Turn();
      parts.Begin(2, kAllAhead);
      parts.Run();
      ASSERT_EQ(parts.committed.size(), 2u);
      ASSERT_EQ(parts.CompareDurable(parts.now), "") << turns << " turns, " << blocks << " blocks";
      ASSERT_EQ(parts.executor().buffer_bytes(), 0u);
    }
  }
}

TEST(UpdateAheadTest, APowerCutAmidItLeavesTheStepBefore) {
  for (int turns = 0; turns < 40; ++turns) {
    Parts parts(Ahead());
    parts.Begin(1, kAllAhead);
    parts.Run();
    parts.Announce(2, kAllAhead);
    for (int i = 0; i < turns; ++i) parts.Turn();
    parts.drive().PowerCut();
    parts.Run();
    parts.drive().RestorePower();
    ASSERT_EQ(parts.CompareDurable(parts.now), "") << turns;
  }
}

TEST(UpdateAheadTest, WithinAnIntervalNothingIsDone) {
  PartsOptions options = Ahead();
  options.durability = {.steps = 3};
  Parts parts(options);
  parts.Begin(1, kAllAhead);
  parts.Run();
  const uint64_t written = parts.drive().counters().written_bytes;
  parts.Announce(2, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.drive().counters().written_bytes, written);
  for (const uint64_t step : {2, 3}) {
    parts.Begin(step, kAllAhead);
    parts.Run();
  }
  EXPECT_EQ(parts.executor().used_ahead(), 0u);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

// What a job without announcements has read is of use to the first update before a step.
TEST(UpdateAheadTest, StateThatIsReadAlreadyIsNotReadAgain) {
  uint64_t read[2] = {};
  for (const bool reads_ahead : {false, true}) {
    PartsOptions options = Ahead(/*pipeline_blocks=*/10);
    options.reads_ahead = reads_ahead;
    Parts parts(options);
    const uint64_t before = parts.drive().counters().read_bytes;
    parts.Begin(1, kAllAhead);
    parts.Run();
    parts.Announce(2, kAllAhead);
    parts.Run();
    parts.Begin(2, kAllAhead);
    parts.Run();
    EXPECT_EQ(parts.executor().used_ahead(), kExtentsAhead);
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
    parts.Announce(3, kAllAhead);
    parts.Run();
    parts.Begin(3, kAllAhead);
    parts.Run();
    EXPECT_EQ(parts.executor().used_ahead(), 2 * kExtentsAhead);
    EXPECT_EQ(parts.executor().lost_ahead(), 0u);
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
    read[reads_ahead] = parts.drive().counters().read_bytes - before;
  }
  EXPECT_EQ(read[true], read[false]);
}

TEST(UpdateAheadTest, WithOneBlockThereIsNoRoomForIt) {
  PartsOptions options = Ahead(/*pipeline_blocks=*/1);
  options.reads_ahead = true;
  Parts parts(options);
  StepAndAnnounce(parts);
  EXPECT_EQ(parts.executor().buffer_bytes(), parts.context.layout.pipeline_block_bytes)
      << "read ahead";
  parts.Begin(2, kAllAhead);
  parts.Run();
  EXPECT_EQ(parts.executor().used_ahead() + parts.executor().lost_ahead(), 0u);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(AheadPolicyTest, StepsAreLeftOutAsLongAsTheWorkIsLost) {
  AheadPolicy policy;
  int steps = 0, worked = 0;
  for (; steps < 1000; ++steps) {
    const uint64_t allowed = policy.Allowed(100);
    worked += allowed > 0;
    policy.Judge(0, allowed);
  }
  EXPECT_GE(worked, steps / 16);
  EXPECT_LE(worked, steps / 16 + 5);
  while (policy.Allowed(100) == 0) continue;
  policy.Judge(10, 0);
  EXPECT_GT(policy.Allowed(100), 0u) << "one that was of use is enough";
}

TEST(AheadPolicyTest, AFewExtentsBeginAndEachStepOfUseDoublesThem) {
  AheadPolicy policy;
  for (const uint64_t allowed : {100, 200, 400, 800, 1600, 1600}) {
    EXPECT_EQ(policy.Allowed(1600), allowed);
    policy.Judge(/*used=*/allowed, /*lost=*/0);
  }
  policy.Judge(/*used=*/1, /*lost=*/1599);
  EXPECT_EQ(policy.Allowed(1600), 0u);
  EXPECT_LE(policy.Allowed(1600), 100u) << "and then from the beginning";
  EXPECT_EQ(policy.Allowed(0), 0u);
}

// Bytes for each parameter, of bf16.
double BytesOfUpdates(int lost_every) {
  AheadPolicy policy;
  constexpr uint64_t kExtents = 1000;
  double bytes = 0;
  constexpr int kSkipped = 200, kSteps = 2000;
  for (int step = 1; step <= kSkipped + kSteps; ++step) {
    const uint64_t ahead = policy.Allowed(kExtents);
    const bool is_lost = step % lost_every == 0;
    if (step > kSkipped) bytes += 26 + (is_lost ? 22.0 * ahead / kExtents : 0);
    is_lost ? policy.Judge(0, ahead) : policy.Judge(ahead, 0);
  }
  return bytes / kSteps;
}

TEST(AheadPolicyTest, WhatIsLostNowAndThenCostsLessThanHalfAByte) {
  for (const int lost_every : {1, 2, 3, 5, 10, 20, 40, 100})
    EXPECT_LE(BytesOfUpdates(lost_every), 26.5) << lost_every;
}

}  // namespace
}  // namespace offload::daemon

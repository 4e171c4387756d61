#include "offloadd/read_ahead.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "offloadd/parts_fixture.h"

namespace offload::daemon {
namespace {

using proto::Dtype;

constexpr uint64_t kElements = 40960;  // of a tensor that is no bundle
constexpr uint64_t kLarge = proto::kExtentElements + 20000;
const std::vector<uint32_t> kAll = {0, 1, 2, 3};

// Four extents of state on the drive, and a bundle's.
PartsOptions Options(uint32_t pipeline_blocks, bool reads_ahead = true) {
  PartsOptions options{
      .window_bytes = 4ull << 20, .pipeline_blocks = pipeline_blocks, .reads_ahead = reads_ahead};
  options.tensors = {TestTensor("a", kElements), TestTensor("b", kLarge, Dtype::kBFloat16),
                     TestTensor("c", kElements, Dtype::kBFloat16),
                     TestTensor("small", 1000, Dtype::kBFloat16)};
  return options;
}

void Schedule(Parts& parts, const std::vector<uint32_t>& tensors) {
  parts.cache().SetSchedule(tensors);
  const WeightCache::Position position;
  parts.cache().SetPositions({&position, 1});
}

// Of a step and all that follows of itself.
void Step(Parts& parts, uint64_t step, const std::vector<uint32_t>& tensors = kAll) {
  parts.Begin(step, tensors);
  parts.Run();
}

uint64_t ReadBytes(Parts& parts) { return parts.drive().counters().read_bytes; }

TEST(ReadAheadTest, WhatTheNextStepNeedsIsReadBeforeIt) {
  uint64_t read_bytes[2] = {};
  for (const bool reads_ahead : {false, true}) {
    Parts parts(Options(/*pipeline_blocks=*/3, reads_ahead));
    Step(parts, 1);
    EXPECT_EQ(parts.executor().buffer_bytes(),
              reads_ahead ? 3 * parts.context.layout.pipeline_block_bytes : 0);
    const uint64_t before = ReadBytes(parts);
    parts.Run();
    EXPECT_EQ(ReadBytes(parts), before) << "as much as there is room for, once";
    parts.Begin(2, kAll);
    while (parts.committed.size() < 2) parts.Turn();
    read_bytes[reads_ahead] = ReadBytes(parts) - before;
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
  EXPECT_GT(read_bytes[0], read_bytes[1] + 8 * (kElements + kElements)) << "three extents fewer";
}

TEST(ReadAheadTest, TheFirstOfTheNextForwardAreReadFirst) {
  for (const uint32_t first : {0, 2}) {
    Parts parts(Options(/*pipeline_blocks=*/1));
    Schedule(parts, {first, 1, 2 - first, 3});
    Step(parts, 1);
    const uint64_t before = ReadBytes(parts);
    parts.Begin(2, {first});
    while (parts.committed.size() < 2) parts.Turn();
    EXPECT_EQ(ReadBytes(parts), before) << "weights are in the window, and its state was read";
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
}

TEST(ReadAheadTest, AStepMayComeAtAnyMoment) {
  for (int turns = 0; turns < 30; turns += 3) {
    for (const uint32_t blocks : {1, 2, 8}) {
      Parts parts(Options(blocks));
      parts.Begin(1, kAll);
      while (parts.committed.empty()) parts.Turn();
      for (int i = 0; i < turns; ++i) parts.Turn();
      Step(parts, 2);
      Step(parts, 3);
      ASSERT_EQ(parts.committed.size(), 3u);
      ASSERT_EQ(parts.CompareDurable(parts.now), "") << turns << " turns, " << blocks << " blocks";
    }
  }
}

TEST(ReadAheadTest, WhatIsPutIsReadAnew) {
  for (int turns = 0; turns < 30; turns += 2) {
    Parts parts(Options(/*pipeline_blocks=*/8));
    parts.Begin(1, kAll);
    while (parts.committed.empty()) parts.Turn();
    for (int i = 0; i < turns; ++i) parts.Turn();
    for (const uint32_t tensor : {0, 2}) {  // of bf16 the residual is state
      const proto::Tensor& declared = parts.context.catalogue.tensors[tensor];
      parts.Put(tensor, MakeValues(declared.dtype, declared.element_count, /*key=*/77));
    }
    parts.Run();
    Step(parts, 2);
    ASSERT_EQ(parts.CompareDurable(parts.now), "") << turns;
  }
}

TEST(ReadAheadTest, WhatAStepLeavesOutIsForgotten) {
  Parts parts(Options(/*pipeline_blocks=*/8));
  Step(parts, 1);
  Step(parts, 2, {0, 3});
  EXPECT_EQ(parts.executor().buffer_bytes(), 2 * parts.context.layout.pipeline_block_bytes)
      << "of the tensor and the bundle that it updated";
  Step(parts, 3);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(ReadAheadTest, StepsOfAnIntervalAreReadAhead) {
  PartsOptions options = Options(/*pipeline_blocks=*/8);
  options.durability = {.steps = 3};
  Parts parts(options);
  for (uint64_t step = 1; step <= 6; ++step) Step(parts, step);
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({3, 6}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

// LAMB sweeps twice over the state.
TEST(ReadAheadTest, TwoSweepsReadTheStateOnceMore) {
  PartsOptions options = Options(/*pipeline_blocks=*/8);
  options.optimizer = kernels::OptimizerSpec("lamb");
  Parts parts(options);
  for (uint64_t step = 1; step <= 3; ++step) Step(parts, step);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

// What was read ahead holds the only block, its tensor is in use, and another one is waited for.
TEST(ReadAheadTest, ABlockIsGivenBackToWhoeverNeedsOne) {
  Parts parts(Options(/*pipeline_blocks=*/1));
  Schedule(parts, {0, 1, 2, 3});
  Step(parts, 1);
  parts.Acquire(0);
  parts.Run();
  parts.Begin(2, kAll);
  const uint64_t waiting = parts.Acquire(2);
  parts.Run();
  ASSERT_TRUE(parts.IsAnswered(waiting));
  EXPECT_EQ(parts.InSlab(2), parts.now.tensors[2]->weights);
  parts.Release(2);
  parts.Release(0);
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(ReadAheadTest, AStateThatCannotBeReadFailsTheStepThatNeedsIt) {
  Parts parts(Options(/*pipeline_blocks=*/8));
  parts.Begin(1, kAll);
  while (parts.committed.empty()) parts.Turn();
  parts.drive().AddFault({aio::FaultKind::kBitFlip, 1, /*persistent=*/true});
  parts.Run();
  EXPECT_FALSE(parts.context.failed()) << "nobody has needed it yet";
  Step(parts, 2);
  EXPECT_TRUE(parts.context.failed());
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
}

}  // namespace
}  // namespace offload::daemon

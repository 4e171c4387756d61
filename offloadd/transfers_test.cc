#include "offloadd/transfers.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "offloadd/parts_fixture.h"
#include "proto/buffer_tensors.h"

namespace offload::daemon {
namespace {

using proto::Dtype;
using proto::Plane;

constexpr uint64_t kElements = 40960;

// A tensor of either dtype, a bundle of two, and some more.
PartsOptions Options(uint32_t ranks = 1) {
  PartsOptions options{.window_bytes = 4ull << 20, .ranks = ranks};
  options.tensors = {TestTensor("fp32", kElements), TestTensor("bf16", kElements, Dtype::kBFloat16),
                     TestTensor("small.a", 1000, Dtype::kBFloat16),
                     TestTensor("small.b", 2000, Dtype::kBFloat16),
                     TestTensor("large", proto::kExtentElements + 5000)};
  return options;
}
const std::vector<uint32_t> kAll = {0, 1, 2, 3, 4};

Bytes Values(const Parts& parts, uint32_t tensor, uint64_t key) {
  const proto::Tensor& declared = parts.context.catalogue.tensors[tensor];
  return MakeValues(declared.dtype, declared.element_count, key);
}

// Makes the puts so far durable, as the end of a load does.
void EndLoad(Parts& parts) {
  parts.context.unsettled_puts = false;
  parts.executor().CommitSoon();
  parts.Run();
}

Bytes Expected(const Parts& parts, uint32_t tensor, Plane plane) {
  return PlaneBytes(parts.context.catalogue, tensor, *parts.now.tensors[tensor], plane);
}

TEST(TransfersTest, GetsBringEveryPlaneOfTheLastStep) {
  Parts parts(Options());
  parts.Begin(1, kAll);
  std::vector<std::pair<uint64_t, Bytes>> gets;
  for (const uint32_t tensor : {0, 1, 2, 3}) {
    for (const Plane plane : {Plane::kWeight, Plane::kMaster, Plane::kState0, Plane::kState1})
      gets.emplace_back(parts.Get(tensor, plane), Expected(parts, tensor, plane));
  }
  parts.Run();
  EXPECT_TRUE(parts.transfers().idle());
  for (size_t i = 0; i < gets.size(); ++i) {
    ASSERT_TRUE(parts.StatusOf(gets[i].first).ok()) << parts.StatusOf(gets[i].first);
    EXPECT_EQ(parts.Got(gets[i].first), gets[i].second) << "get " << i;
  }
}

TEST(TransfersTest, APutReplacesWeightAndMasterAndKeepsTheMoments) {
  Parts parts(Options());
  parts.Begin(1, kAll);
  parts.Run();
  for (const uint32_t tensor : kAll) parts.Put(tensor, Values(parts, tensor, 77));
  parts.Run();
  std::vector<std::pair<uint64_t, Bytes>> gets;
  for (const uint32_t tensor : {0, 1, 2, 3}) {
    for (const Plane plane : {Plane::kWeight, Plane::kMaster, Plane::kState0})
      gets.emplace_back(parts.Get(tensor, plane), Expected(parts, tensor, plane));
  }
  parts.Run();
  for (size_t i = 0; i < gets.size(); ++i)
    EXPECT_EQ(parts.Got(gets[i].first), gets[i].second) << "get " << i;
  EndLoad(parts);
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(TransfersTest, APutIsSeenByWhoHasTheTensorAndByWhoBringsItLater) {
  Parts parts(Options());
  for (const bool is_there : {true, false}) {
    const uint32_t tensor = is_there ? 0 : 1;
    if (is_there) parts.Acquire(tensor);
    parts.Run();
    parts.Put(tensor, Values(parts, tensor, 5));
    parts.Run();
    if (!is_there) parts.Acquire(tensor);
    parts.Run();
    EXPECT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights);
  }
}

TEST(TransfersTest, TransfersOfATensorRunInTheOrderInWhichTheyCame) {
  Parts parts(Options());
  const Bytes first = Expected(parts, 0, Plane::kWeight);
  const uint64_t before = parts.Get(0, Plane::kWeight);
  parts.Put(0, Values(parts, 0, 1001));
  const Bytes second = Expected(parts, 0, Plane::kWeight);
  const uint64_t between = parts.Get(0, Plane::kWeight);
  parts.Put(0, Values(parts, 0, 1002));
  const uint64_t after = parts.Get(0, Plane::kWeight);
  parts.Run();
  EXPECT_EQ(parts.Got(before), first);
  EXPECT_EQ(parts.Got(between), second);
  EXPECT_EQ(parts.Got(after), Expected(parts, 0, Plane::kWeight));
  EXPECT_NE(first, second);
}

// Of a tensor that is put twice the later values stay, and a get between two puts is between them.
TEST(TransfersTest, PutsIntoABundleThatWaitTogetherAreWrittenOnce) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    PartsOptions options = Options();
    options.tensors = {TestTensor("small.a", 1000, dtype), TestTensor("small.b", 2000, dtype),
                       TestTensor("small.c", 3000, dtype)};
    Parts parts(options);
    parts.Begin(1, {0, 1, 2});
    parts.Run();
    const auto count = [&](const std::vector<uint32_t>& tensors, uint64_t key) {
      const uint64_t before = parts.drive().started_count();
      for (const uint32_t tensor : tensors) parts.Put(tensor, Values(parts, tensor, key++));
      parts.Run();
      EXPECT_FALSE(parts.transfers().putting());
      return parts.drive().started_count() - before;
    };
    EXPECT_GT(count({0}, 1), 0u);
    const uint64_t alone = count({0}, 2);  // in an epoch that has one
    EXPECT_EQ(count({2, 0, 1, 0}, 10), alone);
    std::vector<std::pair<uint64_t, Bytes>> gets;
    const auto get = [&] {
      for (const uint32_t tensor : {0, 1, 2}) {
        for (const Plane plane : {Plane::kWeight, Plane::kMaster})
          gets.emplace_back(parts.Get(tensor, plane), Expected(parts, tensor, plane));
      }
    };
    get();
    for (const uint32_t tensor : {1, 2}) parts.Put(tensor, Values(parts, tensor, 20));
    get();
    for (const uint32_t tensor : {0, 1}) parts.Put(tensor, Values(parts, tensor, 30));
    get();
    parts.Run();
    for (const auto& [tag, expected] : gets) {
      ASSERT_TRUE(parts.StatusOf(tag).ok()) << parts.StatusOf(tag);
      EXPECT_EQ(parts.Got(tag), expected);
    }
    EndLoad(parts);
    EXPECT_EQ(parts.CompareDurable(parts.now), "");
  }
}

TEST(TransfersTest, APutWaitsForTheCommitOfTheStepBefore) {
  for (const uint64_t interval : {1, 100}) {
    PartsOptions options = Options();
    options.durability = {.steps = interval};
    Parts parts(options);
    parts.Begin(1, {0});
    const JobState stepped = parts.now;
    const uint64_t put = parts.Put(1, Values(parts, 1, 9));
    EXPECT_TRUE(parts.transfers().putting());
    while (!parts.IsAnswered(put)) {
      ASSERT_FALSE(parts.context.unsettled_puts && parts.committed.empty());
      parts.Turn();
    }
    EXPECT_EQ(parts.committed, std::vector<uint64_t>({1}));
    EXPECT_FALSE(parts.transfers().putting());
    EXPECT_EQ(parts.CompareDurable(stepped), "");
  }
}

// They commit nothing, whoever asks, and what they have left in memory has to be written before it
// can be put.
TEST(TransfersTest, APutAfterPartialStepsIsOfWhatTheyHaveNotUpdated) {
  PartsOptions options = Options();
  options.durability = {.steps = 2};
  options.keeps_weights = options.keeps_state = true;
  Parts parts(options);
  const JobState before = parts.now;
  parts.Begin(1, {0}, /*is_partial=*/true);
  parts.executor().CommitSoon();
  parts.Run();
  parts.Begin(2, {0}, /*is_partial=*/true);
  parts.Run();
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_FALSE(parts.executor().HasUncommitted());
  EXPECT_EQ(parts.committed, std::vector<uint64_t>());
  const JobState stepped = parts.now;
  const uint64_t refused = parts.Put(0, Values(parts, 0, 9));
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(refused)), ErrorId::kProtocol);
  parts.now = stepped;
  const uint64_t put = parts.Put(1, Values(parts, 1, 9));
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(put).ok()) << parts.StatusOf(put);
  EXPECT_EQ(parts.committed, std::vector<uint64_t>());
  EXPECT_EQ(parts.CompareDurable(before), "");
  parts.Begin(3, {4});
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({3}));
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(TransfersTest, OnlyAStepOrTheEndOfALoadMakesAPutDurable) {
  Parts parts(Options());
  const JobState before = parts.now;
  parts.Put(0, Values(parts, 0, 9));
  parts.Run();
  EXPECT_TRUE(parts.context.unsettled_puts);
  EXPECT_FALSE(parts.executor().HasUncommitted());
  parts.executor().CommitSoon();
  parts.Run();
  EXPECT_TRUE(parts.committed.empty());
  EXPECT_EQ(parts.CompareDurable(before), "");
  parts.Begin(1, {1});
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "") << "with the step";
  parts.Put(2, Values(parts, 2, 10));
  parts.Run();
  EndLoad(parts);
  EXPECT_EQ(parts.committed, std::vector<uint64_t>({1, 1})) << "the same step once more";
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

// Masters of its neighbours are weights, residuals and tie bits that stand around its own.
TEST(TransfersTest, APutOfOneMemberOfABundleLeavesTheOthers) {
  Parts parts(Options());
  for (const uint64_t step : {1, 2}) {
    parts.Begin(step, kAll);
    parts.Run();
  }
  for (const uint32_t tensor : {2, 3}) {
    parts.Put(tensor, Values(parts, tensor, 33 + tensor));
    parts.Run();
    EndLoad(parts);
    EXPECT_EQ(parts.CompareDurable(parts.now), "") << tensor;
  }
}

TEST(TransfersTest, WhatStaysInMemoryIsPutThere) {
  PartsOptions options = Options();
  options.keeps_weights = options.keeps_state = true;
  Parts parts(options);
  parts.Begin(1, kAll);
  parts.Run();
  for (const uint32_t tensor : kAll) parts.Put(tensor, Values(parts, tensor, 21));
  parts.Run();
  parts.Begin(2, kAll);  // from the put masters, in memory
  parts.Run();
  EXPECT_EQ(parts.CompareDurable(parts.now), "");
}

TEST(TransfersTest, PutsWaitWhileSnapshotsChange) {
  Parts parts(Options());
  parts.context.changing_snapshots = true;
  const uint64_t put = parts.Put(0, Values(parts, 0, 9));
  const uint64_t get = parts.Get(1, Plane::kWeight);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(put));
  EXPECT_TRUE(parts.IsAnswered(get));
  parts.context.changing_snapshots = false;
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(put).ok());
}

TEST(TransfersTest, PartOfAnExtentCannotBePut) {
  Parts parts(Options());
  const Bytes before = Expected(parts, 0, Plane::kWeight);
  parts.transfers().Add(0, {.tag = 1000,
                            .operation = proto::RingOperation::kPut,
                            .tensor = 0,
                            .element_count = kElements - 1,
                            .region_offset = proto::kSectorBytes});
  const uint64_t get = parts.Get(0, Plane::kWeight);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(1000)), ErrorId::kProtocol);
  EXPECT_TRUE(absl::StrContains(parts.StatusOf(1000).message(), "\"fp32\""))
      << parts.StatusOf(1000);
  EXPECT_EQ(parts.Got(get), before);
  EXPECT_TRUE(parts.context.failure.ok());
}

TEST(TransfersTest, BuffersAreBoundedAndEverybodyGetsOne) {
  PartsOptions options{.window_bytes = 4ull << 20};
  for (int i = 0; i < 24; ++i)
    options.tensors.push_back(TestTensor(absl::StrCat("tensor.", i), kElements));
  Parts parts(options);
  std::vector<uint64_t> gets;
  for (uint32_t tensor = 0; tensor < 24; ++tensor)
    gets.push_back(parts.Get(tensor, Plane::kWeight));
  uint64_t most = 0;
  while (!parts.transfers().idle()) {
    parts.Turn();
    most = std::max(most, parts.context.outstanding);
  }
  EXPECT_EQ(most, 4u);
  for (uint32_t tensor = 0; tensor < 24; ++tensor)
    EXPECT_EQ(parts.Got(gets[tensor]), Expected(parts, tensor, Plane::kWeight)) << tensor;
}

TEST(TransfersTest, AsManyRunAtATimeAsTheDepthSays) {
  PartsOptions options = Options();
  options.keeps_weights = true;  // which needs no buffer
  Parts parts(options);
  for (const uint32_t tensor : {0, 1, 4}) parts.Acquire(tensor);
  parts.Run();
  parts.context.depths.transfers = 2;
  for (const uint32_t tensor : {0, 1, 0, 1, 0}) parts.Get(tensor, Plane::kWeight);
  parts.transfers().Turn();
  EXPECT_EQ(parts.context.outstanding, 2u);
  parts.Run();
  EXPECT_TRUE(parts.transfers().idle());
}

// ---- The drive ---------------------------------------------------------------------------------

TEST(TransfersTest, AGetThatMeetsALostExtentCostsNobodyElseAnything) {
  Parts parts(Options());
  parts.drive().AddFault({aio::FaultKind::kBitFlip, 1, /*persistent=*/true});
  const uint64_t lost = parts.Get(0, Plane::kWeight);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(lost)), ErrorId::kChecksum);
  EXPECT_TRUE(parts.context.failure.ok()) << parts.context.failure;
  parts.drive().ClearFaults();
  const uint64_t get = parts.Get(0, Plane::kWeight);
  parts.Run();
  EXPECT_EQ(parts.Got(get), Expected(parts, 0, Plane::kWeight));
}

TEST(TransfersTest, ABitThatFlipsOnTheWayIsReadAgain) {
  Parts parts(Options());
  parts.drive().AddFault({aio::FaultKind::kBitFlip});
  const uint64_t get = parts.Get(0, Plane::kWeight);
  parts.Run();
  EXPECT_EQ(parts.drive().faults_met(), 1u);
  EXPECT_TRUE(parts.StatusOf(get).ok()) << parts.StatusOf(get);
  EXPECT_EQ(parts.Got(get), Expected(parts, 0, Plane::kWeight));
}

TEST(TransfersTest, APutThatCannotBeWrittenFailsTheJobAndTheEpochStands) {
  Parts parts(Options());
  const JobState before = parts.now;
  parts.drive().AddFault({aio::FaultKind::kWriteError, 1, /*persistent=*/true});
  const uint64_t put = parts.Put(0, Values(parts, 0, 9));
  const uint64_t queued = parts.Put(0, Values(parts, 0, 10));
  parts.Run();
  for (const uint64_t tag : {put, queued})
    EXPECT_EQ(ErrorIdOf(parts.StatusOf(tag)), ErrorId::kIo) << parts.StatusOf(tag);
  EXPECT_FALSE(parts.context.failure.ok());
  EXPECT_FALSE(parts.transfers().putting());
  parts.drive().ClearFaults();
  EXPECT_EQ(parts.CompareDurable(before), "");
}

// ---- Several ranks -----------------------------------------------------------------------------

TEST(TransfersTest, OnlyTheFirstRankPuts) {
  Parts parts(Options(/*ranks=*/2));
  const uint64_t put = parts.Put(0, Values(parts, 0, 9), /*rank=*/1);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(put)), ErrorId::kProtocol);
  EXPECT_TRUE(absl::StrContains(parts.StatusOf(put).message(), "rank 1 puts"));
  EXPECT_FALSE(parts.context.unsettled_puts);
}

TEST(TransfersTest, APutBeginsWhenEveryOtherRankFollowsAndEndsForAllAtOnce) {
  Parts parts(Options(/*ranks=*/3));
  const Bytes before = Expected(parts, 0, Plane::kWeight);
  parts.Put(0, Values(parts, 0, 9));
  const uint64_t end = parts.EndPuts(0);
  const uint64_t first = parts.EndPuts(0, /*rank=*/1);
  const uint64_t get = parts.Get(1, Plane::kWeight, /*rank=*/2);
  parts.Run();
  EXPECT_TRUE(parts.IsAnswered(get)) << "other tensors go on";
  EXPECT_FALSE(parts.context.unsettled_puts) << "rank 2 may still read the old bytes";
  const uint64_t second = parts.EndPuts(0, /*rank=*/2);
  EXPECT_FALSE(parts.IsAnswered(first) || parts.IsAnswered(second));
  parts.Run();
  for (const uint64_t tag : {end, first, second})
    EXPECT_TRUE(parts.StatusOf(tag).ok()) << parts.StatusOf(tag);
  const uint64_t after = parts.Get(0, Plane::kWeight, /*rank=*/2);
  parts.Run();
  EXPECT_EQ(parts.Got(after), Expected(parts, 0, Plane::kWeight));
  EXPECT_NE(parts.Got(after), before);
}

// It may have to read before it comes to where it follows; members of a bundle are read together.
TEST(TransfersTest, ARankReadsUntilItFollowsAPutThatWaitsForThat) {
  for (const uint32_t tensor : {0, 1, 2, 3}) {
    Parts parts(Options(/*ranks=*/2));
    const Bytes before = Expected(parts, tensor, Plane::kWeight);
    const uint64_t put = parts.Put(tensor, Values(parts, tensor, 9));
    parts.EndPuts(tensor);
    const uint64_t own = parts.Get(tensor, Plane::kWeight);
    parts.Run();
    for (const uint32_t other : {0, 1, 2, 3}) {
      const uint64_t get = parts.Get(other, Plane::kWeight, /*rank=*/1);
      parts.Run();
      ASSERT_TRUE(parts.IsAnswered(get)) << other << " beside a put of " << tensor;
      EXPECT_EQ(parts.Got(get), other == tensor ? before : Expected(parts, other, Plane::kWeight));
    }
    EXPECT_FALSE(parts.IsAnswered(put) || parts.IsAnswered(own));
    parts.EndPuts(tensor, /*rank=*/1);
    const uint64_t after = parts.Get(tensor, Plane::kWeight, /*rank=*/1);
    parts.Run();
    for (const uint64_t get : {own, after})
      EXPECT_EQ(parts.Got(get), Expected(parts, tensor, Plane::kWeight));
  }
}

TEST(TransfersTest, EverySequenceIsFollowedByItself) {
  Parts parts(Options(/*ranks=*/2));
  parts.EndPuts(0, /*rank=*/1);
  parts.Put(0, Values(parts, 0, 9));
  parts.EndPuts(0);
  parts.Run();
  const uint64_t put = parts.Put(0, Values(parts, 0, 10));
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(put)) << "rank 1 has followed once only";
  parts.EndPuts(0, /*rank=*/1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(put).ok()) << parts.StatusOf(put);
}

TEST(TransfersTest, ARankInAnExchangeReadsNothingAndNeedNotFollow) {
  Parts parts(Options(/*ranks=*/2));
  parts.context.ranks[1].is_exchanging = true;
  const uint64_t put = parts.Put(0, Values(parts, 0, 9));
  parts.EndPuts(0);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(put).ok()) << parts.StatusOf(put);
  parts.context.ranks[1].is_exchanging = false;
  const uint64_t next = parts.Put(0, Values(parts, 0, 10));
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(next)) << "what it has seen was one sequence";
  parts.EndPuts(0, /*rank=*/1);
  parts.Run();
  EXPECT_TRUE(parts.IsAnswered(next));
}

TEST(TransfersTest, ARankThatStepsInsteadOfFollowingIsNamed) {
  Parts parts(Options(/*ranks=*/2));
  parts.context.ranks[1].is_stepping = true;
  const uint64_t put = parts.Put(1, Values(parts, 1, 9));
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(put)), ErrorId::kRanksDiffer);
  EXPECT_TRUE(absl::StrContains(parts.StatusOf(put).message(), "\"bf16\"")) << parts.StatusOf(put);
  EXPECT_TRUE(absl::StrContains(parts.StatusOf(put).message(), "rank 1")) << parts.StatusOf(put);
  EXPECT_FALSE(parts.transfers().putting());
  EXPECT_TRUE(parts.transfers().idle());
}

TEST(TransfersTest, ARankThatLooksAtGradientsForGoodInsteadOfFollowingIsNamed) {
  Parts parts(Options(/*ranks=*/3));
  bool is_ahead = true;
  parts.context.is_ahead_of = [&](uint32_t rank, uint32_t other) {
    return is_ahead && rank == 2 && other == 0;
  };
  const uint64_t put = parts.Put(1, Values(parts, 1, 9));
  const uint64_t end = parts.EndPuts(1);
  parts.Run();
  parts.clock().AdvanceSeconds(60);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(put)) << "rank 1 may be on its way to it";
  parts.EndPuts(1, /*rank=*/1);
  parts.Run();
  parts.clock().AdvanceSeconds(20);
  is_ahead = false;  // a thread of rank 0 has given what it waited for
  parts.Run();
  is_ahead = true;
  parts.Run();
  parts.clock().AdvanceSeconds(20);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(put));
  parts.clock().AdvanceSeconds(20);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(put)), ErrorId::kRanksDiffer);
  for (const char* part : {"\"bf16\"", "rank 2 waits for the gradients of rank 0"})
    EXPECT_TRUE(absl::StrContains(parts.StatusOf(put).message(), part)) << parts.StatusOf(put);
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(end)), ErrorId::kRanksDiffer) << "at once";
  EXPECT_FALSE(parts.transfers().putting());
}

TEST(TransfersTest, RanksThatMakeTheSameOfTheOldValuePutItOnce) {
  Parts parts(Options(/*ranks=*/3));
  const uint64_t put = parts.Put(0, Values(parts, 0, 9), /*rank=*/0, /*digest=*/5);
  for (const uint32_t rank : {1, 2}) parts.EndPuts(0, rank, /*digest=*/5);
  const uint64_t end = parts.EndPuts(0, /*rank=*/0, /*digest=*/5);
  parts.Run();
  for (const uint64_t tag : {put, end})
    EXPECT_TRUE(parts.StatusOf(tag).ok()) << parts.StatusOf(tag);
  const uint64_t after = parts.Get(0, Plane::kWeight, /*rank=*/2);
  parts.Run();
  EXPECT_EQ(parts.Got(after), Expected(parts, 0, Plane::kWeight));
}

// A rank that overwrites what another one changes has no digest.
TEST(TransfersTest, RanksThatMakeDifferentValuesPutNothingAndAreAllToldSo) {
  for (const uint64_t other : {0, 6}) {
    Parts parts(Options(/*ranks=*/3));
    const Bytes before = Expected(parts, 1, Plane::kWeight);
    const uint64_t put = parts.Put(1, Values(parts, 1, 9), /*rank=*/0, /*digest=*/5);
    const uint64_t end = parts.EndPuts(1, /*rank=*/0, /*digest=*/5);
    const uint64_t first = parts.EndPuts(1, /*rank=*/1, /*digest=*/5);
    const uint64_t second = parts.EndPuts(1, /*rank=*/2, other);
    parts.Run();
    for (const uint64_t tag : {put, end, first, second}) {
      EXPECT_EQ(ErrorIdOf(parts.StatusOf(tag)), ErrorId::kWeightOfRanks) << parts.StatusOf(tag);
      EXPECT_TRUE(
          absl::StrContains(parts.StatusOf(tag).message(), "ranks 0 and 2 change \"bf16\""));
    }
    EXPECT_TRUE(parts.transfers().idle());
    EXPECT_FALSE(parts.transfers().putting() || parts.context.unsettled_puts);
    const uint64_t after = parts.Get(1, Plane::kWeight);
    parts.Run();
    EXPECT_EQ(parts.Got(after), before);

    const uint64_t again = parts.Put(1, Values(parts, 1, 10));
    parts.Run();
    EXPECT_FALSE(parts.IsAnswered(again)) << "what was refused is over for all";
    for (const uint32_t rank : {0, 1, 2}) parts.EndPuts(1, rank);
    parts.Run();
    EXPECT_TRUE(parts.StatusOf(again).ok()) << parts.StatusOf(again);
  }
}

TEST(TransfersTest, ThoseThatFollowWhatOneRankHasPassedByAreToldSo) {
  Parts parts(Options(/*ranks=*/3));
  parts.context.ranks[1].is_stepping = true;
  const uint64_t follow = parts.EndPuts(1, /*rank=*/2);
  parts.Put(1, Values(parts, 1, 9));
  parts.EndPuts(1);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(follow)), ErrorId::kRanksDiffer) << parts.StatusOf(follow);
}

TEST(TransfersTest, ARankThatWritesWhileTheFirstStepsIsToldSo) {
  Parts parts(Options(/*ranks=*/2));
  const uint64_t follow = parts.EndPuts(1, /*rank=*/1);
  parts.Run();
  parts.clock().AdvanceSeconds(60);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(follow)) << "rank 0 may be on its way to it";
  parts.context.ranks[0].is_stepping = true;
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(follow)), ErrorId::kRanksDiffer);
  for (const char* part : {"rank 1 writes \"bf16\"", "rank 0 takes a step"})
    EXPECT_TRUE(absl::StrContains(parts.StatusOf(follow).message(), part))
        << parts.StatusOf(follow);

  parts.context.ranks[0].is_stepping = false;
  const uint64_t put = parts.Put(1, Values(parts, 1, 9));
  parts.EndPuts(1);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(put)) << "what was refused does not count";
  parts.EndPuts(1, /*rank=*/1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(put).ok()) << parts.StatusOf(put);
}

TEST(TransfersTest, ARankThatWritesWhileTheFirstWaitsForItForGoodIsToldSo) {
  for (const bool exchanges : {false, true}) {
    Parts parts(Options(/*ranks=*/2));
    bool waits = true;
    parts.context.is_ahead_of = [&](uint32_t rank, uint32_t other) {
      return waits && !exchanges && rank == 0 && other == 1;
    };
    parts.context.ranks[0].is_exchanging = exchanges;
    const uint64_t follow = parts.EndPuts(1, /*rank=*/1);
    parts.Run();
    parts.clock().AdvanceSeconds(20);
    waits = parts.context.ranks[0].is_exchanging = false;
    parts.Run();
    waits = true;
    parts.context.ranks[0].is_exchanging = exchanges;
    parts.Run();
    parts.clock().AdvanceSeconds(20);
    parts.Run();
    EXPECT_FALSE(parts.IsAnswered(follow)) << "it went on meanwhile";
    parts.clock().AdvanceSeconds(20);
    parts.Run();
    EXPECT_EQ(ErrorIdOf(parts.StatusOf(follow)), ErrorId::kRanksDiffer);
    EXPECT_TRUE(absl::StrContains(
        parts.StatusOf(follow).message(),
        exchanges ? "rank 0 waits in an exchange" : "rank 0 waits for the gradients of rank 1"))
        << parts.StatusOf(follow);
  }
}

TEST(TransfersTest, RanksThatWriteInDifferentOrdersAreToldSoWithBothWeights) {
  Parts parts(Options(/*ranks=*/2));
  const uint64_t put = parts.Put(1, Values(parts, 1, 9));
  parts.EndPuts(1);
  const uint64_t follow = parts.EndPuts(0, /*rank=*/1);
  parts.Run();
  parts.clock().AdvanceSeconds(20);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(put) || parts.IsAnswered(follow)) << "another thread may come";
  parts.clock().AdvanceSeconds(20);
  parts.Run();
  const auto expect = [&](uint64_t tag, const char* text) {
    EXPECT_EQ(ErrorIdOf(parts.StatusOf(tag)), ErrorId::kRanksDiffer);
    EXPECT_TRUE(absl::StrContains(parts.StatusOf(tag).message(), text)) << parts.StatusOf(tag);
  };
  expect(put, "rank 0 writes \"bf16\" in place while rank 1 writes \"fp32\"");
  expect(follow, "rank 1 writes \"fp32\" in place while rank 0 writes \"bf16\"");
}

TEST(TransfersTest, ARankThatWritesWhenTheFirstHasClosedIsToldSo) {
  Parts parts(Options(/*ranks=*/2));
  parts.context.ranks[0].is_here = false;
  const uint64_t follow = parts.EndPuts(1, /*rank=*/1);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(follow)), ErrorId::kRanksDiffer);
  EXPECT_TRUE(absl::StrContains(parts.StatusOf(follow).message(), "rank 0 has closed the job"))
      << parts.StatusOf(follow);
}

TEST(TransfersTest, ABufferIsPutWithoutTheOthers) {
  Parts parts(Options(/*ranks=*/2));
  parts.context.catalogue.tensors[0].name = proto::BufferTensorName("mask");
  parts.context.ranks[1].is_stepping = true;
  const uint64_t put = parts.Put(0, Values(parts, 0, 9));
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(put).ok()) << parts.StatusOf(put);
}

TEST(TransfersTest, AFailureAnswersWhoWaitsAndWhoFollows) {
  Parts parts(Options(/*ranks=*/3));
  const uint64_t put = parts.Put(0, Values(parts, 0, 9));
  const uint64_t follow = parts.EndPuts(0, /*rank=*/1);
  parts.Run();
  parts.context.fail(MakeError(ErrorId::kRankLost, "rank 2"));
  for (const uint64_t tag : {put, follow})
    EXPECT_EQ(ErrorIdOf(parts.StatusOf(tag)), ErrorId::kRankLost);
  EXPECT_TRUE(parts.transfers().idle());
  EXPECT_FALSE(parts.transfers().putting());
}

}  // namespace
}  // namespace offload::daemon

#include "offloadd/weight_cache.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "offloadd/parts_fixture.h"

namespace offload::daemon {
namespace {

constexpr uint64_t kElements = 40960;           // of a tensor that is no bundle
constexpr uint64_t kSlotBytes = kElements * 4;  // whole sectors
constexpr uint32_t kTensors = 6;

PartsOptions Options(uint32_t slots, uint32_t ranks = 1) {
  PartsOptions options{.window_bytes = slots * kSlotBytes, .ranks = ranks};
  for (uint32_t i = 0; i < kTensors; ++i)
    options.tensors.push_back(TestTensor(absl::StrCat("tensor.", i), kElements));
  return options;
}

std::vector<bool> Resident(const Parts& parts) {
  std::vector<bool> resident;
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor)
    resident.push_back(parts.StateOf(tensor) == proto::kResident);
  return resident;
}

// Brings them one after the other, and lets them go.
void Use(Parts& parts, const std::vector<uint32_t>& tensors) {
  for (const uint32_t tensor : tensors) {
    const uint64_t tag = parts.Acquire(tensor);
    parts.Run();
    ASSERT_TRUE(parts.StatusOf(tag).ok()) << parts.StatusOf(tag);
    parts.Release(tensor);
  }
}

TEST(WeightCacheTest, AnAcquireBringsTheBytesOfTheDrive) {
  Parts parts(Options(3));
  const uint64_t first = parts.Acquire(2), second = parts.Acquire(4);
  EXPECT_FALSE(parts.IsAnswered(first));
  EXPECT_EQ(parts.StateOf(2), proto::kAbsent);
  parts.Run();
  for (const auto& [tag, tensor] : {std::pair{first, 2u}, {second, 4u}}) {
    EXPECT_TRUE(parts.StatusOf(tag).ok()) << parts.StatusOf(tag);
    EXPECT_EQ(parts.StateOf(tensor), proto::kResident);
    EXPECT_EQ(parts.InSlab(tensor), parts.now.tensors[tensor]->weights) << tensor;
  }
  EXPECT_EQ(parts.cache().resident_bytes(), 2 * kSlotBytes);
}

TEST(WeightCacheTest, WhatIsThereIsAnsweredAtOnceWithoutTheDrive) {
  Parts parts(Options(3));
  Use(parts, {1});
  const uint64_t started = parts.drive().started_count();
  const uint64_t tag = parts.Acquire(1);
  EXPECT_TRUE(parts.StatusOf(tag).ok()) << "before any turn";
  parts.Run();
  EXPECT_EQ(parts.drive().started_count(), started);
}

TEST(WeightCacheTest, AcquiresOfOneTensorShareItsRead) {
  Parts parts(Options(3));
  const uint64_t started = parts.drive().started_count();
  for (int i = 0; i < 3; ++i) parts.Acquire(1);
  parts.Run();
  EXPECT_EQ(parts.answered().size(), kTensors + 3) << "and the puts of the beginning";
  EXPECT_EQ(parts.drive().started_count(), started + 1);
}

TEST(WeightCacheTest, APinnedTensorStaysAndWhoWantsItsRoomWaits) {
  Parts parts(Options(3));
  for (const uint32_t tensor : {0, 1, 2}) parts.Acquire(tensor);
  parts.Run();
  const uint64_t waiting = parts.Acquire(3);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting));
  EXPECT_EQ(Resident(parts), std::vector<bool>({true, true, true, false, false, false}));
  parts.Release(1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(waiting).ok()) << parts.StatusOf(waiting);
  EXPECT_EQ(Resident(parts), std::vector<bool>({true, false, true, true, false, false}));
  EXPECT_EQ(parts.InSlab(3), parts.now.tensors[3]->weights);
}

TEST(WeightCacheTest, WhoWaitsInVainForRoomIsToldWhyAndMayAskAgain) {
  Parts parts(Options(3));
  for (const uint32_t tensor : {0, 1, 2}) parts.Acquire(tensor);
  parts.Run();
  const uint64_t waiting = parts.Acquire(3);
  parts.Run();
  parts.clock().AdvanceSeconds(29.9);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting));
  parts.clock().AdvanceSeconds(0.2);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(waiting)), ErrorId::kWindowExhausted);
  EXPECT_TRUE(absl::StrContains(parts.StatusOf(waiting).message(), "\"tensor.3\" (160.0 KiB)"))
      << parts.StatusOf(waiting);
  EXPECT_TRUE(parts.context.failure.ok()) << "nobody else is the worse for it";
  parts.Release(0);
  const uint64_t again = parts.Acquire(3);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(again).ok()) << parts.StatusOf(again);
}

TEST(WeightCacheTest, ASlowRankIsWaitedForHoweverLongItUsesTheRoom) {
  Parts parts(Options(2, /*ranks=*/2));
  for (const uint32_t tensor : {0, 1}) parts.Acquire(tensor, /*rank=*/1);
  parts.Run();
  const uint64_t waiting = parts.Acquire(3, /*rank=*/0);
  for (int i = 0; i < 5; ++i) {
    parts.Run();
    parts.clock().AdvanceSeconds(31);
  }
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting));
  parts.Release(0, /*rank=*/1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(waiting).ok()) << parts.StatusOf(waiting);
}

// Each has what the other wants room for: no operation will end before one of them is given up.
TEST(WeightCacheTest, OfRanksThatWaitForEachOthersRoomOneIsTold) {
  Parts parts(Options(2, /*ranks=*/2));
  for (const uint32_t rank : {0, 1}) parts.Acquire(rank, rank);
  parts.Run();
  const uint64_t first = parts.Acquire(2, /*rank=*/0), second = parts.Acquire(3, /*rank=*/1);
  parts.Run();
  parts.clock().AdvanceSeconds(31);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(first)), ErrorId::kWindowExhausted);
  EXPECT_FALSE(parts.IsAnswered(second));
  for (const uint32_t tensor : {0, 2}) parts.Release(tensor, /*rank=*/0);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(second).ok()) << parts.StatusOf(second);
}

TEST(WeightCacheTest, ARankThatWaitsForOthersLetsNothingGo) {
  Parts parts(Options(2, /*ranks=*/2));
  parts.context.waits_for_ranks = [](uint32_t rank) { return rank == 1; };
  for (const uint32_t tensor : {0, 1}) parts.Acquire(tensor, /*rank=*/1);
  parts.Run();
  const uint64_t waiting = parts.Acquire(3, /*rank=*/0);
  parts.Run();
  parts.clock().AdvanceSeconds(31);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(waiting)), ErrorId::kWindowExhausted);
}

// An operator that writes one weight has others pinned, and its put waits for the ranks that
// follow.
TEST(WeightCacheTest, ARankWhosePutWaitsForOthersLetsNothingGo) {
  Parts parts(Options(2, /*ranks=*/2));
  parts.context.waits_for_ranks = [&](uint32_t rank) { return parts.transfers().Waits(rank); };
  for (const uint32_t tensor : {0, 1}) parts.Acquire(tensor, /*rank=*/0);
  parts.Run();
  const uint64_t end = parts.EndPuts(4, /*rank=*/0);
  const uint64_t waiting = parts.Acquire(3, /*rank=*/1);
  parts.Run();
  parts.clock().AdvanceSeconds(31);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(waiting)), ErrorId::kWindowExhausted);
  parts.Release(3, /*rank=*/1);
  EXPECT_FALSE(parts.IsAnswered(end));
  const uint64_t follows = parts.EndPuts(4, /*rank=*/1);
  parts.Run();
  for (const uint64_t tag : {end, follows}) EXPECT_TRUE(parts.StatusOf(tag).ok());
}

TEST(WeightCacheTest, ARankThatWaitsForASlowOneIsWaitedFor) {
  Parts parts(Options(2, /*ranks=*/3));
  parts.context.waits_for_ranks = [](uint32_t rank) { return rank == 1; };
  for (const uint32_t tensor : {0, 1}) parts.Acquire(tensor, /*rank=*/1);
  parts.Run();
  const uint64_t waiting = parts.Acquire(3, /*rank=*/0);
  for (int i = 0; i < 3; ++i) {
    parts.Run();
    parts.clock().AdvanceSeconds(31);
  }
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting)) << "rank 2 is busy, without any weights";
  parts.context.waits_for_ranks = [](uint32_t rank) { return rank != 0; };
  parts.clock().AdvanceSeconds(31);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(waiting)), ErrorId::kWindowExhausted);
}

TEST(WeightCacheTest, RanksWaitTogetherOnlyWhenNoneOfThemComputes) {
  Parts parts(Options(2, /*ranks=*/3));
  const auto all_wait = [&] { return parts.cache().AllRanksWait(); };
  EXPECT_FALSE(all_wait());
  const uint64_t first = parts.Acquire(0, /*rank=*/0), second = parts.Acquire(1, /*rank=*/0);
  EXPECT_FALSE(all_wait()) << "rank 1 computes";
  parts.context.waits_for_ranks = [](uint32_t rank) { return rank == 1; };
  EXPECT_FALSE(all_wait()) << "rank 2 computes";
  parts.context.ranks[2].is_here = false;
  EXPECT_TRUE(all_wait());
  parts.Run();
  for (const uint64_t tag : {first, second}) EXPECT_TRUE(parts.StatusOf(tag).ok());
  EXPECT_FALSE(all_wait()) << "rank 0 has what it waited for";
  parts.Acquire(3, /*rank=*/0);
  EXPECT_TRUE(all_wait()) << "there is no room";
  parts.cache().FailWaiters(absl::CancelledError("the job ends"));
  EXPECT_FALSE(all_wait());
  parts.context.ranks[0].is_here = parts.context.ranks[1].is_here = false;
  EXPECT_TRUE(all_wait()) << "nobody is here";
}

TEST(WeightCacheTest, WithoutAScheduleTheOldestMakesRoom) {
  Parts parts(Options(3));
  Use(parts, {2, 0, 1, 2, 3});
  EXPECT_EQ(Resident(parts), std::vector<bool>({true, true, false, true, false, false}));
}

TEST(WeightCacheTest, WithAScheduleWhatIsNeededLastMakesRoom) {
  Parts parts(Options(3));
  const std::vector<uint32_t> schedule = {0, 1, 2, 3, 2, 1};
  parts.cache().SetSchedule(schedule);
  Use(parts, {0, 1, 2});
  const WeightCache::Position position{.rank = 0, .step = 1, .touch = 3};
  parts.cache().SetPositions({&position, 1});
  EXPECT_EQ(parts.cache().NextUse(2), 1u);
  EXPECT_EQ(parts.cache().NextUse(1), 2u);
  EXPECT_EQ(parts.cache().NextUse(0), 3u);
  EXPECT_EQ(parts.cache().NextUse(4), kNeverUsed);
  Use(parts, {3});
  EXPECT_EQ(Resident(parts), std::vector<bool>({false, true, true, true, false, false}));
}

TEST(WeightCacheTest, APrefetchTakesNothingThatIsNeededSooner) {
  Parts parts(Options(3));
  const std::vector<uint32_t> schedule = {0, 1, 2, 3};
  parts.cache().SetSchedule(schedule);
  Use(parts, {0, 1, 2});
  WeightCache::Position position{.rank = 0, .step = 1, .touch = 0};
  parts.cache().SetPositions({&position, 1});
  parts.cache().Prefetch(3);
  parts.Run();
  EXPECT_EQ(Resident(parts), std::vector<bool>({true, true, true, false, false, false}));
  position.touch = 1;  // 0 is needed after 3 from here on
  parts.cache().SetPositions({&position, 1});
  parts.Run();
  EXPECT_EQ(Resident(parts), std::vector<bool>({false, true, true, true, false, false}));
}

TEST(WeightCacheTest, WishesOfARankThatIsGoneAreForgotten) {
  Parts parts(Options(3));
  parts.cache().Prefetch(3);
  parts.cache().DropWishes();
  parts.Run();
  EXPECT_EQ(parts.StateOf(3), proto::kAbsent);
}

// Of two that wait for room, the one that is a step behind: the other will wait for it in the end.
TEST(WeightCacheTest, TheRankThatIsBehindAllOthersIsServedFirst) {
  Parts parts(Options(3, /*ranks=*/2));
  const WeightCache::Position positions[] = {{.rank = 0, .step = 2, .touch = 0},
                                             {.rank = 1, .step = 1, .touch = 4}};
  parts.cache().SetPositions(positions);
  EXPECT_EQ(parts.cache().position(), 4u);
  for (const uint32_t tensor : {0, 1, 2}) parts.Acquire(tensor);
  parts.Run();
  const uint64_t ahead = parts.Acquire(3, /*rank=*/0), behind = parts.Acquire(4, /*rank=*/1);
  parts.Run();
  parts.Release(1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(behind).ok()) << parts.StatusOf(behind);
  EXPECT_FALSE(parts.IsAnswered(ahead));
}

TEST(WeightCacheTest, ATensorStaysWhileAnyRankHasItPinned) {
  Parts parts(Options(1, /*ranks=*/2));
  parts.Acquire(0, /*rank=*/0);
  parts.Acquire(0, /*rank=*/1);
  parts.Run();
  parts.Release(0, /*rank=*/0);
  const uint64_t waiting = parts.Acquire(1, /*rank=*/0);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting));
  parts.Release(0, /*rank=*/1);
  parts.Run();
  EXPECT_TRUE(parts.IsAnswered(waiting));
}

TEST(WeightCacheTest, APendingTensorIsAnsweredByItsUpdateOnly) {
  Parts parts(Options(3));
  Use(parts, {1});
  const std::vector<uint32_t> updated = {1};
  parts.cache().MarkPending(updated);
  EXPECT_EQ(parts.StateOf(1), proto::kPending);
  const uint64_t waiting = parts.Acquire(1);
  EXPECT_EQ(parts.on_demand, updated) << "the update is to hurry";
  EXPECT_TRUE(parts.cache().Unused(1)) << "the pin is that of one who waits";
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting));
  ASSERT_TRUE(parts.cache().Claim(1, std::nullopt));
  EXPECT_FALSE(parts.cache().loaded(1));
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(waiting));
  parts.cache().Updated(1);
  EXPECT_TRUE(parts.StatusOf(waiting).ok());
  EXPECT_EQ(parts.StateOf(1), proto::kResident);
  EXPECT_FALSE(parts.cache().Unused(1)) << "from here on it is used";
}

TEST(WeightCacheTest, TheLoadOfABundleDoesNotAnswerForItsPendingMember) {
  PartsOptions options = Options(1);
  options.tensors.push_back(TestTensor("small.0", 10));
  options.tensors.push_back(TestTensor("small.1", 20));
  Parts parts(options);
  const std::vector<uint32_t> updated = {kTensors};
  parts.cache().MarkPending(updated);
  const uint64_t pending = parts.Acquire(kTensors), other = parts.Acquire(kTensors + 1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(other).ok()) << parts.StatusOf(other);
  EXPECT_FALSE(parts.IsAnswered(pending));
  EXPECT_EQ(parts.StateOf(kTensors), proto::kPending);
  const uint32_t bundle = parts.context.catalogue.placements[kTensors].store_tensor;
  ASSERT_TRUE(parts.cache().Claim(bundle, std::nullopt));
  parts.cache().Updated(bundle);
  EXPECT_TRUE(parts.StatusOf(pending).ok());
}

TEST(WeightCacheTest, AnUpdateThatIsPoliteTakesOnlyWhatIsNeededLater) {
  Parts parts(Options(3));
  const std::vector<uint32_t> schedule = {0, 1, 2, 3};
  parts.cache().SetSchedule(schedule);
  Use(parts, {0, 1, 2});
  EXPECT_FALSE(parts.cache().HasSlot(3));
  EXPECT_FALSE(parts.cache().Claim(3, parts.cache().NextUse(3)));
  EXPECT_EQ(parts.StateOf(2), proto::kResident);
  EXPECT_TRUE(parts.cache().Claim(3, std::nullopt));
  EXPECT_EQ(parts.StateOf(2), proto::kAbsent);
  parts.cache().Updated(3);
}

TEST(WeightCacheTest, AHeldTensorIsNeitherEvictedNorLoaded) {
  Parts parts(Options(1));
  Use(parts, {0});
  parts.cache().Hold(0);
  const uint64_t first = parts.Acquire(1);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(first));
  parts.cache().Unhold(0);
  parts.cache().Hold(1);
  parts.Run();
  EXPECT_FALSE(parts.IsAnswered(first));
  EXPECT_EQ(parts.StateOf(0), proto::kResident) << "no room is made in vain";
  parts.cache().Unhold(1);
  parts.Run();
  EXPECT_TRUE(parts.IsAnswered(first));
}

TEST(WeightCacheTest, BundlesStayForGood) {
  PartsOptions options = Options(1);
  options.tensors.push_back(TestTensor("small.0", 10));
  options.tensors.push_back(TestTensor("small.1", 20));
  Parts parts(options);
  const uint64_t small = parts.Acquire(kTensors + 1);
  parts.Run();
  EXPECT_TRUE(parts.StatusOf(small).ok());
  for (const uint32_t member : {kTensors, kTensors + 1}) {
    EXPECT_EQ(parts.StateOf(member), proto::kResident);
    EXPECT_EQ(parts.InSlab(member), parts.now.tensors[member]->weights);
  }
  parts.Release(kTensors + 1);
  Use(parts, {0, 1, 2, 3});
  EXPECT_EQ(parts.StateOf(kTensors), proto::kResident);
}

TEST(WeightCacheTest, ReadsInFlightAreBoundedAndAnAcquireOvertakesThem) {
  PartsOptions options{.window_bytes = 3ull << 30};
  for (int i = 0; i < 2; ++i)
    options.tensors.push_back(TestTensor(absl::StrCat("large.", i), 6 * proto::kExtentElements));
  options.window_bytes = 12 * proto::kExtentElements * 4;
  Parts parts(options);
  parts.context.depths.loads = 2;
  parts.cache().Prefetch(0);
  parts.cache().Prefetch(1);
  parts.cache().Turn();
  EXPECT_EQ(parts.context.outstanding, 2u);
  const uint64_t urgent = parts.Acquire(1);
  while (!parts.IsAnswered(urgent)) parts.Turn();
  EXPECT_EQ(parts.StateOf(0), proto::kAbsent) << "at most two of its six extents came before";
  parts.Run();
  EXPECT_EQ(parts.StateOf(0), proto::kResident);
  EXPECT_EQ(parts.InSlab(0), parts.now.tensors[0]->weights);
  EXPECT_EQ(parts.InSlab(1), parts.now.tensors[1]->weights);
}

TEST(WeightCacheTest, ABitThatFlipsOnTheWayIsReadAgain) {
  Parts parts(Options(3));
  parts.drive().AddFault({aio::FaultKind::kBitFlip});
  const uint64_t tag = parts.Acquire(1);
  parts.Run();
  EXPECT_EQ(parts.drive().faults_met(), 1u);
  EXPECT_TRUE(parts.StatusOf(tag).ok()) << parts.StatusOf(tag);
  EXPECT_EQ(parts.InSlab(1), parts.now.tensors[1]->weights);
}

TEST(WeightCacheTest, WrongBytesAreNeverShownAndFailTheJob) {
  Parts parts(Options(3));
  parts.drive().AddFault({aio::FaultKind::kBitFlip, 1, /*persistent=*/true});
  const uint64_t tag = parts.Acquire(1);
  parts.Run();
  EXPECT_EQ(ErrorIdOf(parts.context.failure), ErrorId::kChecksum) << parts.context.failure;
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(tag)), ErrorId::kChecksum);
  EXPECT_EQ(parts.StateOf(1), proto::kAbsent);
}

TEST(WeightCacheTest, AFailureAnswersEverybodyOnceAndStartsNothingMore) {
  Parts parts(Options(1));
  Use(parts, {0});
  parts.cache().Hold(0);
  const uint64_t waiting = parts.Acquire(1);
  parts.cache().Prefetch(2);
  parts.Run();
  const uint64_t started = parts.drive().started_count();
  parts.context.fail(MakeError(ErrorId::kIo, "the drive"));
  EXPECT_EQ(ErrorIdOf(parts.StatusOf(waiting)), ErrorId::kIo);
  parts.cache().Unhold(0);
  parts.Run();
  EXPECT_EQ(parts.drive().started_count(), started);
}

}  // namespace
}  // namespace offload::daemon

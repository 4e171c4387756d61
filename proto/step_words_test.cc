#include "proto/step_words.h"

#include <vector>

#include "gtest/gtest.h"

namespace offload::proto {
namespace {

TEST(StepWordsTest, SumsAreTheWordsAndTheirDifferenceIsWhatWasAdded) {
  alignas(64) std::byte page[4096] = {};
  StepWords& words = *StepWordsOf(page);
  words.phase_nanoseconds[1] = 30;
  words.stall_nanoseconds[1][2] = 10;
  const StepSums before = ReadStepWords(words);
  words.phase_nanoseconds[1] += 5;
  words.stall_nanoseconds[2][3] += 2;
  words.prefetches[0] += 7;
  const StepSums added = Difference(ReadStepWords(words), before);
  StepSums expected;
  expected.phase_nanoseconds[1] = 5;
  expected.stall_nanoseconds[2][3] = 2;
  expected.prefetches[0] = 7;
  EXPECT_EQ(added, expected);
  EXPECT_EQ(ReadStepWords(words).StallNanoseconds(), 12u);
  EXPECT_EQ(ReadStepWords(words).AllNanoseconds(), 35u);
}

TEST(StepWordsTest, TimesOfUseAreReadOnlyWhereTheyAreInside) {
  constexpr uint64_t kTensors = 100, kBytes = kRegionFixedBytes + 4096;
  static_assert(PinTableBytes(kTensors) <= 4096);
  std::vector<std::byte> memory(kBytes + 64);
  std::byte* const region = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  StepWords& words = *StepWordsOf(region);
  EXPECT_TRUE(UseTimesOf(region, kBytes, kTensors).empty());
  const uint64_t last = kBytes - kTensors * sizeof(UseTimes);
  words.use_times_offset = UseTimesOffset(kRegionFixedBytes, kTensors);
  EXPECT_EQ(UseTimesOf(region, kBytes, kTensors).size(), kTensors);
  words.use_times_offset = last;
  EXPECT_EQ(UseTimesOf(region, kBytes, kTensors).size(), kTensors);
  for (const uint64_t bad : {last + 8, last - 4, kRegionFixedBytes - 8, uint64_t{8}, UINT64_MAX - 7,
                             UINT64_MAX - kTensors * sizeof(UseTimes) + 1}) {
    words.use_times_offset = bad;
    EXPECT_TRUE(UseTimesOf(region, kBytes, kTensors).empty()) << bad;
  }
}

TEST(StepWordsTest, ARankWhoseWordsGoBackHasDoneNothing) {
  StepSums before;
  before.phase_nanoseconds[0] = 100;
  before.prefetches[2] = 3;
  EXPECT_EQ(Difference(StepSums(), before), StepSums());
}

TEST(StepWordsTest, SeveralRanksAreShownByTheirMean) {
  StepSums sum, one;
  one.phase_nanoseconds[0] = 10;
  one.prefetches[1] = 3;
  AddTo(sum, one);
  AddTo(sum, one);
  EXPECT_EQ(DividedBy(sum, 2), one);
}

TEST(StepWordsTest, TheWordsStandBehindTheHeaderAndBeforeTheRings) {
  std::vector<std::byte> region(kRegionFixedBytes);
  EXPECT_GE(reinterpret_cast<std::byte*>(StepWordsOf(region.data())),
            region.data() + sizeof(RegionHeader));
  EXPECT_LE(reinterpret_cast<std::byte*>(StepWordsOf(region.data()) + 1),
            region.data() + kSubmissionRingOffset);
}

}  // namespace
}  // namespace offload::proto

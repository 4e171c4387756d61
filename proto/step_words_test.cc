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

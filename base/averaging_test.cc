#include "base/averaging.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "base/parse_averaging.h"

namespace offload {
namespace {

using Step = AverageStep::Kind;

TEST(Averaging, IsReadAsItIsSaid) {
  for (const char* text : {"none", "ema:0.999", "ema:0.5", "swa:1:1", "swa:1000:100"}) {
    const auto averaging = ParseAveraging(text);
    ASSERT_TRUE(averaging.ok()) << text << ": " << averaging.status();
    EXPECT_EQ(averaging->Text(), text);
  }
  EXPECT_FALSE(ParseAveraging("")->is_on());
  EXPECT_EQ(ParseAveraging("ema:0.9999999999999999")->Text(), "ema:0.9999999999999999");
}

TEST(Averaging, AnythingElseIsRefused) {
  for (const char* text :
       {"ema", "ema:", "ema:0", "ema:1", "ema:-0.5", "ema:nan", "ema:0.9 ", "ema:0.9:2", "swa",
        "swa:", "swa:1", "swa:0:1", "swa:1:0", "swa:1:1:1", "swa:-1:1", "swa:2000000000:1", "mean"})
    EXPECT_EQ(ErrorIdOf(ParseAveraging(text).status()), ErrorId::kBadValue) << text;
}

TEST(Averaging, AnExponentialOneBeginsWithTheFirstUpdateAndMovesWithEach) {
  const Averaging averaging = *ParseAveraging("ema:0.75");
  EXPECT_EQ(StepOf(averaging, 1).kind, Step::kTake);
  for (const int64_t update : {2, 3, 1000}) {
    EXPECT_EQ(StepOf(averaging, update).kind, Step::kLerp);
    EXPECT_EQ(StepOf(averaging, update).value, 0.25);
  }
}

TEST(Averaging, AnEqualOneFollowsUntilItBeginsAndCountsEveryNthUpdate) {
  const Averaging averaging = *ParseAveraging("swa:3:2");
  std::vector<Step> kinds;
  for (int64_t update = 1; update <= 7; ++update) kinds.push_back(StepOf(averaging, update).kind);
  EXPECT_EQ(kinds, (std::vector{Step::kTake, Step::kTake, Step::kTake, Step::kKeep, Step::kMean,
                                Step::kKeep, Step::kMean}));
  EXPECT_EQ(StepOf(averaging, 5).value, 2);
  EXPECT_EQ(StepOf(averaging, 7).value, 3);
}

TEST(Averaging, NoneLeavesThePlaneAlone) { EXPECT_EQ(StepOf({}, 1).kind, Step::kKeep); }

}  // namespace
}  // namespace offload

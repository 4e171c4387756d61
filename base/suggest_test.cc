#include "base/suggest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace offload {
namespace {

TEST(SuggestTest, DistanceCountsEveryKindOfSlip) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("", "ram"), 3u);
  EXPECT_EQ(EditDistance("pool", "pool"), 0u);
  EXPECT_EQ(EditDistance("pool", "pol"), 1u);
  EXPECT_EQ(EditDistance("pool", "pooll"), 1u);
  EXPECT_EQ(EditDistance("pool", "poel"), 1u);
  EXPECT_EQ(EditDistance("memroy", "memory"), 1u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

TEST(SuggestTest, NamesTheNearestKnownWord) {
  const std::vector<std::string> known = {"--params", "--ram", "--pool"};
  EXPECT_EQ(NearestWord("--parms", known), "--params");
  EXPECT_EQ(NearestWord("--rma", known), "--ram");
}

TEST(SuggestTest, SaysNothingWhenNothingIsNear) {
  const std::vector<std::string> known = {"status", "doctor"};
  EXPECT_EQ(NearestWord("xyzzy", known), "");
  EXPECT_EQ(NearestWord("", known), "");
}

}  // namespace
}  // namespace offload

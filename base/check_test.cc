#include "base/check.h"

#include <gtest/gtest.h>

namespace offload {
namespace {

TEST(CheckTest, HoldingConditionEvaluatesOnceAndItsValuesNever) {
  int condition_count = 0, value_count = 0;
  OFFLOAD_CHECK(++condition_count == 1) << ++value_count;
  OFFLOAD_CHECK_OK(absl::OkStatus()) << ++value_count;
  OFFLOAD_CHECK_OK(absl::StatusOr<int>(3)) << ++value_count;
  EXPECT_EQ(condition_count, 1);
  EXPECT_EQ(value_count, 0);
}

TEST(CheckTest, StandsInUnbracedBranches) {
  bool other = false;
  if (false)
    OFFLOAD_CHECK_OK(absl::InternalError("never"));
  else
    other = true;
  EXPECT_TRUE(other);
}

TEST(CheckDeathTest, FailedConditionPrintsPlaceConditionAndValues) {
  const int slot = 7;
  EXPECT_DEATH(OFFLOAD_CHECK(slot < 4) << "slot " << slot,
               "base/check_test.cc:[0-9]+: check failed: slot < 4 slot 7");
}

TEST(CheckDeathTest, FailedStatusPrintsTheStatusAndValues) {
  EXPECT_DEATH(OFFLOAD_CHECK_OK(absl::DataLossError("gone")) << "extent 3",
               "check failed: .* is OK DATA_LOSS: gone extent 3");
}

}  // namespace
}  // namespace offload

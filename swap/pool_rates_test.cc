#include "swap/pool_rates.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

TEST(PoolRatesTest, APoolIsMeasuredAndNothingIsLeftThere) {
  TemporaryPool pool;
  const auto rates = MeasurePool(pool.path(), {});
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_GT(rates->read_bytes_per_second, 1e5);
  EXPECT_GT(rates->write_bytes_per_second, 1e5);
  EXPECT_GT(rates->latency_seconds, 0);
  EXPECT_LT(rates->latency_seconds, 10);
  EXPECT_TRUE(pool.Files().empty());
}

TEST(PoolRatesTest, SeveralPoolsAreMeasuredTogether) {
  TemporaryPool first, second;
  const auto rates = MeasurePool(absl::StrCat(first.path(), ",", second.path()), {});
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_GT(rates->read_bytes_per_second, 1e5);
  EXPECT_TRUE(first.Files().empty() && second.Files().empty());
}

TEST(PoolRatesTest, WhatCannotBeMeasuredSaysWhy) {
  EXPECT_EQ(ErrorIdOf(MeasurePool("/no/such/pool", {}).status()), ErrorId::kPoolMissing);
  EXPECT_EQ(ErrorIdOf(MeasurePool("/proc", {}).status()).has_value(), true);
  TemporaryPool pool;
  EXPECT_FALSE(MeasurePool(absl::StrCat(pool.path(), ",", pool.path()), {}).ok());
}

}  // namespace
}  // namespace offload::swap

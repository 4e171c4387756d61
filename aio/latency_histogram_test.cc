#include "aio/latency_histogram.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace offload::aio {
namespace {

TEST(LatencyHistogramTest, EveryBucketBeginsWhereTheOneBeforeEnds) {
  EXPECT_EQ(LatencyHistogram::BucketOf(0), 0u);
  for (size_t i = 0; i + 1 < LatencyHistogram::kBucketCount; ++i) {
    const int64_t end = LatencyHistogram::UpperNanoseconds(i);
    EXPECT_EQ(LatencyHistogram::BucketOf(end - 1), i);
    EXPECT_EQ(LatencyHistogram::BucketOf(end), i + 1);
  }
}

TEST(LatencyHistogramTest, AboveFourMicrosecondsABucketIsAtMostAQuarterWide) {
  for (size_t i = 4; i < LatencyHistogram::kBucketCount; ++i) {
    const auto begin = static_cast<double>(LatencyHistogram::UpperNanoseconds(i - 1));
    EXPECT_LE(static_cast<double>(LatencyHistogram::UpperNanoseconds(i)), begin * 1.25);
  }
}

TEST(LatencyHistogramTest, ExtremesHaveTheirPlace) {
  EXPECT_EQ(LatencyHistogram::BucketOf(-5), 0u);
  EXPECT_EQ(LatencyHistogram::BucketOf(INT64_MAX), LatencyHistogram::kBucketCount - 1);
  EXPECT_GT(LatencyHistogram::UpperNanoseconds(LatencyHistogram::kBucketCount - 1),
            int64_t{60} * 1000 * 1000 * 1000);
}

TEST(LatencyHistogramTest, QuantilesAreAtMostAQuarterTooHigh) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.QuantileSeconds(0.5), 0);
  for (int i = 1; i <= 1000; ++i) histogram.Add(int64_t{i} * 10'000);  // 10 us to 10 ms
  EXPECT_EQ(histogram.count(), 1000u);
  for (const double part : {0.01, 0.5, 0.9, 0.99, 1.0}) {
    const double exact = part * 10e-3;
    EXPECT_GE(histogram.QuantileSeconds(part), exact) << part;
    EXPECT_LE(histogram.QuantileSeconds(part), exact * 1.26) << part;
  }
  EXPECT_GT(histogram.QuantileSeconds(0), 0) << "the smallest";
  EXPECT_NEAR(histogram.sum_seconds(), 5.005, 1e-9);
  EXPECT_EQ(histogram.CountBelow(LatencyHistogram::BucketOf(10'000)), 0u);
  EXPECT_EQ(histogram.CountBelow(LatencyHistogram::kBucketCount), 1000u);
}

TEST(LatencyHistogramTest, MergeAddsCounts) {
  LatencyHistogram one, other;
  one.Add(1000);
  other.Add(1'000'000'000);
  one.Merge(other);
  EXPECT_EQ(one.count(), 2u);
  EXPECT_LT(one.QuantileSeconds(0.5), 1e-5);
  EXPECT_GE(one.QuantileSeconds(1), 1);
  EXPECT_NEAR(one.sum_seconds(), 1.000001, 1e-9);
}

}  // namespace
}  // namespace offload::aio

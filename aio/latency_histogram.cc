#include "aio/latency_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace offload::aio {
namespace {

constexpr int kUnitShift = 10;      // the unit is 1024 ns
constexpr uint64_t kPerOctave = 4;  // buckets
constexpr int kPerOctaveShift = 2;

}  // namespace

// Below kPerOctave units a bucket is one unit; above, the two bits behind the highest choose among
// the octave's buckets.
size_t LatencyHistogram::BucketOf(int64_t nanoseconds) {
  const uint64_t units = static_cast<uint64_t>(std::max<int64_t>(nanoseconds, 0)) >> kUnitShift;
  if (units < kPerOctave) return units;
  const int octave = std::bit_width(units) - 1;
  const uint64_t quarter = (units >> (octave - kPerOctaveShift)) & (kPerOctave - 1);
  const uint64_t bucket = static_cast<uint64_t>(octave - 1) * kPerOctave + quarter;
  return std::min<uint64_t>(bucket, kBucketCount - 1);
}

int64_t LatencyHistogram::UpperNanoseconds(size_t bucket) {
  const uint64_t next = bucket + 1;
  if (next < kPerOctave) return static_cast<int64_t>(next << kUnitShift);
  const uint64_t octave = next / kPerOctave + 1;
  const uint64_t units = (kPerOctave + next % kPerOctave) << (octave - kPerOctaveShift);
  return static_cast<int64_t>(units << kUnitShift);
}

uint64_t LatencyHistogram::count() const { return CountBelow(kBucketCount); }

uint64_t LatencyHistogram::CountBelow(size_t end) const {
  uint64_t sum = 0;
  for (size_t i = 0; i < end; ++i) sum += buckets_[i].load(std::memory_order_relaxed);
  return sum;
}

double LatencyHistogram::QuantileSeconds(double part) const {
  std::array<uint64_t, kBucketCount> counts;
  uint64_t sum = 0;
  for (size_t i = 0; i < kBucketCount; ++i) {
    counts[i] = buckets_[i].load(std::memory_order_relaxed);
    sum += counts[i];
  }
  if (sum == 0) return 0;
  const double exact = std::ceil(std::clamp(part, 0.0, 1.0) * static_cast<double>(sum));
  const uint64_t wanted = std::max<uint64_t>(1, static_cast<uint64_t>(exact));
  size_t bucket = 0;
  for (uint64_t seen = counts[0]; seen < wanted && bucket + 1 < kBucketCount;) {
    seen += counts[++bucket];
  }
  return static_cast<double>(UpperNanoseconds(bucket)) * 1e-9;
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  for (size_t i = 0; i < kBucketCount; ++i) {
    buckets_[i].fetch_add(other.buckets_[i].load(std::memory_order_relaxed),
                          std::memory_order_relaxed);
  }
  sum_nanoseconds_.fetch_add(other.sum_nanoseconds_.load(std::memory_order_relaxed),
                             std::memory_order_relaxed);
}

}  // namespace offload::aio

// aio/latency_histogram.h
//
// How long operations took, on a scale of logarithms: four buckets to an octave, from one
// microsecond to more than a minute, so that a quantile is at most a quarter too high. Adding costs
// one relaxed increment.
//
// Thread safety: Add() and the readers may run on any threads at once; what a reader sees is of
// some moment during its call, not of one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace offload::aio {

class LatencyHistogram {
 public:
  static constexpr size_t kBucketCount = 104;

  void Add(int64_t nanoseconds) {
    buckets_[BucketOf(nanoseconds)].fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t count() const;

  // The upper end of the bucket in which the given part of all, 0 to 1, has been reached; 0 when
  // there are none.
  double QuantileSeconds(double part) const;

  // Adds what the other one has counted.
  void Merge(const LatencyHistogram& other);

  static size_t BucketOf(int64_t nanoseconds);
  // Exclusive; the last bucket has everything above as well.
  static int64_t UpperNanoseconds(size_t bucket);

 private:
  std::array<std::atomic<uint64_t>, kBucketCount> buckets_{};
};

}  // namespace offload::aio

// aio/latency_histogram.h
//
// How long operations took, on a scale of logarithms: four buckets to an octave, from one
// microsecond to more than a minute, so that a quantile is at most a quarter too high. Adding costs
// two relaxed additions.
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
    sum_nanoseconds_.fetch_add(nanoseconds > 0 ? static_cast<uint64_t>(nanoseconds) : 0,
                               std::memory_order_relaxed);
  }
  uint64_t count() const;
  // Of those in buckets [0, end).
  uint64_t CountBelow(size_t end) const;
  double sum_seconds() const {
    return static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  }

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
  std::atomic<uint64_t> sum_nanoseconds_{0};
};

}  // namespace offload::aio

// offloadd/rate_meter.h
//
// What the drives of a job give while they have enough to do: bytes and seconds, apart for times in
// which they only read, only wrote, or did both. Times with little under way say nothing of a drive
// and are left out, and so are those with a flush.
//
// A transfer's bytes are spread evenly over its life, so that what is under way when the load
// changes counts on both sides of the change.
//
// Pure: is told the time. Thread safety: the loop's thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "swap/transfer_watch.h"

namespace offload::daemon {

class RateMeter {
 public:
  struct Sums {
    double seconds = 0, read_bytes = 0, written_bytes = 0;

    void Add(const Sums& more) {
      seconds += more.seconds;
      read_bytes += more.read_bytes;
      written_bytes += more.written_bytes;
    }
  };
  // Times in which the drives only read, only wrote, did both.
  struct Measured {
    Sums reads, writes, both;

    void Add(const Measured& more) {
      reads.Add(more.reads);
      writes.Add(more.writes);
      both.Add(more.both);
    }
  };

  // `clock` outlives the object. A drive has enough to do with `busy_bytes` under way.
  RateMeter(const Clock* clock, uint64_t busy_bytes) : clock_(*clock), busy_bytes_(busy_bytes) {}
  RateMeter(const RateMeter&) = delete;
  RateMeter& operator=(const RateMeter&) = delete;

  // For a store or a scratch file, which the object outlives; `inner` is told everything, too.
  swap::TransferWatch Watch(swap::TransferWatch inner);
  // Of transfers that have ended, since the last call.
  Measured Take();

 private:
  enum class Load : uint8_t { kReads, kWrites, kBoth, kLight };
  static constexpr size_t kLoads = 4;
  using Nanoseconds = std::array<int64_t, kLoads>;
  struct Life {
    uint64_t bytes = 0;
    bool writes = false;
    int64_t begin = 0;
    Nanoseconds before{};  // of elapsed_, at its begin
  };

  // Counts the time until now for the load that there has been.
  int64_t Advance();
  Load LoadNow() const;
  void End(const Life& life);
  Sums TakeOf(Load load);

  const Clock& clock_;
  const uint64_t busy_bytes_;
  uint64_t reading_bytes_ = 0, writing_bytes_ = 0;  // under way
  uint32_t flushes_ = 0;
  int64_t now_ = 0;
  Nanoseconds elapsed_{}, taken_{};  // by load; until now_, and until the last Take()
  std::array<Sums, kLoads> bytes_{};
};

}  // namespace offload::daemon

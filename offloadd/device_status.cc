#include "offloadd/device_status.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace offload::daemon {
namespace {

// Buckets of the latencies whose ends are the bounds that are counted up to: every fourth power of
// two microseconds, from 33 us to 8.6 s.
constexpr std::array<size_t, 10> kBoundBuckets = {15, 23, 31, 39, 47, 55, 63, 71, 79, 87};

uint64_t Get(const std::atomic<uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);  // counters order nothing
}

void Describe(const std::atomic<uint64_t>& count, uint64_t bytes,
              const std::atomic<uint64_t>& errors, const aio::LatencyHistogram& latency,
              proto::v1::OperationStatus* status) {
  status->set_count(Get(count));
  status->set_bytes(bytes);
  status->set_errors(Get(errors));
  status->set_p50_seconds(latency.QuantileSeconds(0.5));
  status->set_p99_seconds(latency.QuantileSeconds(0.99));
  status->set_max_seconds(latency.QuantileSeconds(1));
  for (const size_t bucket : kBoundBuckets)
    status->add_latency_counts(latency.CountBelow(bucket + 1));
  status->set_sum_seconds(latency.sum_seconds());
}

}  // namespace

proto::v1::DeviceStatus DescribeDevice(const std::string& file, const aio::Device& device) {
  const aio::Counters& counters = device.counters();
  proto::v1::DeviceStatus status;
  status.set_file(file);
  status.set_engine(std::string(device.engine()));
  Describe(counters.reads, Get(counters.read_bytes), counters.read_errors, counters.read_latency,
           status.mutable_read());
  Describe(counters.writes, Get(counters.written_bytes), counters.write_errors,
           counters.write_latency, status.mutable_write());
  Describe(counters.flushes, 0, counters.flush_errors, counters.flush_latency,
           status.mutable_flush());
  status.set_refusals(Get(counters.refusals));
  status.set_retries(Get(counters.retries));
  status.set_short_transfers(Get(counters.short_transfers));
  status.set_registered_bytes(device.registered_bytes());
  status.set_in_flight(device.in_flight());
  for (const size_t bucket : kBoundBuckets) {
    status.add_latency_bounds_seconds(
        static_cast<double>(aio::LatencyHistogram::UpperNanoseconds(bucket)) * 1e-9);
  }
  return status;
}

}  // namespace offload::daemon

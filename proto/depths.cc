#include "proto/depths.h"

#include <algorithm>
#include <cmath>

#include "proto/slab_layout.h"

namespace offload::proto {
namespace {

// Of a bf16 extent and AdamW, the smallest and the dearest of all: 2 of its bytes are the weight.
constexpr double kReadBytes = 14.0 * kExtentElements, kWrittenBytes = 12.0 * kExtentElements;
constexpr double kWeightBytes = 2.0 * kExtentElements;
// Of a core's update of an extent, beside a trainer that uses the memory, too: about 7 ns each
// element.
constexpr double kUpdateSeconds = 7e-9 * kExtentElements * 1.3;
// Until the loop has looked at what has completed and has started what follows.
constexpr double kTurnSeconds = 1e-3;

constexpr uint32_t kThreadsUnfed = 4;  // where every byte stays in memory, no drive asks for more
constexpr uint32_t kLoadsMax = 512, kTransfersMax = 256, kWriteBacksMax = 128;

// The extents whose updates the pool can read and write in a second, both directions at once.
double FedPerSecond(const MachineRates& rates) {
  if (rates.read_bytes_per_second <= 0 || rates.write_bytes_per_second <= 0) return 0;
  return 1 / std::max(kReadBytes / rates.read_bytes_per_second,
                      kWrittenBytes / rates.write_bytes_per_second);
}

uint32_t Count(double value, uint32_t least, uint32_t most) {
  return static_cast<uint32_t>(std::clamp(std::ceil(value), double{1} * least, double{1} * most));
}

// Transfers of `size_bytes` that a direction has in flight, and as many that follow them.
double InFlight(double bytes_per_second, double latency_seconds, double size_bytes) {
  return 2 * std::ceil(bytes_per_second * (latency_seconds + kTurnSeconds) / size_bytes);
}

}  // namespace

double WriteCost(const MachineRates& rates) {
  if (rates.read_bytes_per_second <= 0 || rates.write_bytes_per_second <= 0) return kWriteCost;
  return std::clamp(rates.read_bytes_per_second / rates.write_bytes_per_second, 1.0, kWriteCostMax);
}

Depths ChooseDepths(const MachineRates& rates, uint32_t update_threads) {
  const double fed = FedPerSecond(rates);
  const uint32_t half = std::max(rates.cores / 2, 1u);
  const Depths floors;
  Depths depths;
  depths.update_threads = update_threads != 0
                              ? update_threads
                              : Count(fed * kUpdateSeconds, std::min(half, kThreadsUnfed), half);
  const double updated = std::min(fed, depths.update_threads / kUpdateSeconds);
  // One in each thread and one that it takes next; in each direction one on the drive, and those
  // that pass while an operation has its latency.
  const double blocks =
      2.0 * depths.update_threads + 2 * (1 + std::ceil(updated * rates.latency_seconds));
  depths.pipeline_blocks = Count(blocks, floors.pipeline_blocks, kPipelineBlocksGoodMax);
  depths.loads = Count(InFlight(rates.read_bytes_per_second, rates.latency_seconds, kWeightBytes),
                       floors.loads, kLoadsMax);
  depths.transfers = Count(depths.loads / 2.0, floors.transfers, kTransfersMax);
  depths.write_backs =
      Count(InFlight(rates.write_bytes_per_second, rates.latency_seconds, kWrittenBytes),
            floors.write_backs, kWriteBacksMax);
  return depths;
}

}  // namespace offload::proto

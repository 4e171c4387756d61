// proto/depths.h
//
// How much of a job is under way at a time: pure arithmetic over what was measured of its pool and
// its machine. Daemon and planner go by the same.
//
// What keeps a drive busy is the bytes that it moves while one operation takes its time (Little's
// law): too few and it idles, too many and what is waited for stands in a queue behind what is not.
// What keeps the update busy is an extent for each of its threads and the next one read meanwhile.
// Below floors that serve any drive of one or two GB/s nothing is won by less, so depths only grow
// from there; a deeper one never changes what is computed.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>

namespace offload::proto {

// Of a pool, all its drives together, and of the machine. 0: not known.
struct MachineRates {
  double read_bytes_per_second = 0, write_bytes_per_second = 0;  // each alone
  double latency_seconds = 0;                                    // of one sector, alone
  uint32_t cores = 0;                                            // that the daemon may run on
};

struct Depths {
  uint32_t update_threads = 1;
  // Of a good pipeline: extents from read to write; a budget may hold fewer. Most of them wait for
  // a core that the trainer computes on: of 8, two were on the drive.
  uint32_t pipeline_blocks = 16;
  uint32_t loads = 32;       // extents being read for acquires and prefetches
  uint32_t transfers = 16;   // puts and gets being served
  uint32_t write_backs = 8;  // extents being written for a commit from where they stay
  friend bool operator==(const Depths&, const Depths&) = default;
};

inline constexpr uint32_t kPipelineBlocksGoodMax = 256;

// How many bytes a drive reads in the time that it writes one, as a plan counts them: between 1 and
// kWriteCostMax; kWriteCost where the rates are not known.
inline constexpr double kWriteCost = 2, kWriteCostMax = 16;
double WriteCost(const MachineRates& rates);

// `update_threads` 0: as many as the pool can feed beside the trainer's own threads, at most half
// of the cores.
Depths ChooseDepths(const MachineRates& rates, uint32_t update_threads = 0);

}  // namespace offload::proto

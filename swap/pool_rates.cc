#include "swap/pool_rates.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mapped_region.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "swap/format.h"
#include "swap/scratch.h"
#include "swap/store.h"

namespace offload::swap {
namespace {

constexpr uint64_t kChunkBytes = uint64_t{1} << 20;
constexpr uint64_t kChunks = 16;      // 16 MiB in each direction
constexpr uint64_t kChunksAhead = 8;  // in flight
constexpr uint64_t kSectors = 8;      // read one by one

absl::Status RunToEnd(Scratch& scratch, const std::function<void(Scratch::Done)>& start) {
  std::optional<absl::Status> result;
  start([&result](absl::Status status) { result = std::move(status); });
  while (!result.has_value()) scratch.Poll(/*wait=*/true);
  return *std::move(result);
}

// Bytes per second of a transfer of all chunks.
absl::StatusOr<double> TimeChunks(Scratch& scratch,
                                  const std::function<void(uint64_t chunk, Scratch::Done)>& start) {
  absl::Status status;
  uint64_t done = 0;
  const double begin_seconds = Clock::Real().NowSeconds();
  for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
    start(chunk, [&](const absl::Status& each) {
      status.Update(each);
      ++done;
    });
    while (chunk + 1 - done >= kChunksAhead) scratch.Poll(/*wait=*/true);
  }
  while (done < kChunks) scratch.Poll(/*wait=*/true);
  OFFLOAD_RETURN_IF_ERROR(status);
  const double seconds = Clock::Real().NowSeconds() - begin_seconds;
  return static_cast<double>(kChunks * kChunkBytes) / std::max(seconds, 1e-9);
}

// The shortest of some: what others do on the machine makes it longer.
absl::StatusOr<double> TimeSectors(Scratch& scratch, std::span<std::byte> sector) {
  double shortest_seconds = std::numeric_limits<double>::infinity();
  for (uint64_t i = 0; i < kSectors; ++i) {
    const double begin_seconds = Clock::Real().NowSeconds();
    OFFLOAD_RETURN_IF_ERROR(RunToEnd(scratch, [&](Scratch::Done done) {
      scratch.Read(kChunks * kChunkBytes + i * kPageBytes, sector, std::move(done));
    }));
    shortest_seconds = std::min(shortest_seconds, Clock::Real().NowSeconds() - begin_seconds);
  }
  return shortest_seconds;
}

}  // namespace

absl::StatusOr<PoolRates> MeasurePool(const std::string& pool, const aio::OpenOptions& io) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Scratch> scratch,
                           Scratch::Create(pools, ScratchOptions{.io = io}));
  OFFLOAD_RETURN_IF_ERROR(scratch->Reserve((kChunks + 1) * kChunkBytes));
  // Zeros, whoever writes or reads them, so that two transfers may share a chunk.
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion memory,
                           MappedRegion::Anonymous(kChunksAhead * kChunkBytes));
  const auto chunk_of = [&](uint64_t chunk) {
    return memory.span().subspan(chunk % kChunksAhead * kChunkBytes, kChunkBytes);
  };
  PoolRates rates;
  OFFLOAD_ASSIGN_OR_RETURN(rates.write_bytes_per_second,
                           TimeChunks(*scratch, [&](uint64_t chunk, Scratch::Done done) {
                             scratch->Write(chunk * kChunkBytes, chunk_of(chunk), std::move(done));
                           }));
  OFFLOAD_ASSIGN_OR_RETURN(rates.read_bytes_per_second,
                           TimeChunks(*scratch, [&](uint64_t chunk, Scratch::Done done) {
                             scratch->Read(chunk * kChunkBytes, chunk_of(chunk), std::move(done));
                           }));
  for (uint64_t i = 0; i < kSectors; ++i) {
    OFFLOAD_RETURN_IF_ERROR(RunToEnd(*scratch, [&](Scratch::Done done) {
      scratch->Write(kChunks * kChunkBytes + i * kPageBytes, memory.span().first(kPageBytes),
                     std::move(done));
    }));
  }
  OFFLOAD_ASSIGN_OR_RETURN(rates.latency_seconds,
                           TimeSectors(*scratch, memory.span().first(kPageBytes)));
  return rates;
}

}  // namespace offload::swap

#include <benchmark/benchmark.h>

#include <cstddef>
#include <vector>

#include "base/crc32c.h"

namespace offload {
namespace {

template <auto kImplementation>
void BM_Crc32c(benchmark::State& state) {
  const std::vector<std::byte> bytes(static_cast<size_t>(state.range(0)), std::byte{0x5a});
  uint32_t crc = 0;
  for (auto _ : state)
    benchmark::DoNotOptimize(crc = kImplementation(crc, bytes.data(), bytes.size()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

BENCHMARK(BM_Crc32c<&internal::Crc32cPortable>)->Arg(16 << 10);
BENCHMARK(BM_Crc32c<&internal::Crc32cSse42>)->Arg(4 << 10)->Arg(64 << 10);
BENCHMARK(BM_Crc32c<&Crc32c>)
    ->Arg(4 << 10)
    ->Arg(16 << 10)
    ->Arg(64 << 10)
    ->Arg(1 << 20)
    ->Arg(64 << 20);

}  // namespace
}  // namespace offload

BENCHMARK_MAIN();

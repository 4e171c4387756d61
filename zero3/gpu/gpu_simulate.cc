// Runs the simulator of the GPU window over any number of seeds, each twice, and once with each
// planted mistake; prints what was met. Exit code 1 when something did not hold, or a mistake was
// not found.

#include <cstdio>
#include <string>

#include "CLI/CLI.hpp"
#include "zero3/gpu/gpu_simulator.h"

namespace offload::zero3 {
namespace {

bool RunSeed(uint64_t seed, GpuSimulationResult* sum) {
  const GpuSimulationResult first = SimulateGpu({.seed = seed});
  const GpuSimulationResult second = SimulateGpu({.seed = seed});
  sum->Add(first);
  std::string failure = first.violation;
  if (failure.empty() && first.trace_hash != second.trace_hash)
    failure = "two runs have different traces";
  if (failure.empty()) return true;
  std::fprintf(stderr, "FAILED: seed %lu: %s\n", seed, failure.c_str());
  return false;
}

bool FindMistakes(uint64_t seed, uint64_t (&wrong)[kMistakes.size()]) {
  bool found_all = true;
  for (size_t i = 0; i < kMistakes.size(); ++i) {
    const GpuSimulationResult result = SimulateGpu({.seed = seed, .mistake = kMistakes[i]});
    wrong[i] += result.wrong_weights + result.wrong_gradients > 0 ? 1 : 0;
    if (!result.violation.empty()) continue;
    std::fprintf(stderr, "FAILED: seed %lu: %s was not found\n", seed, MistakeName(kMistakes[i]));
    found_all = false;
  }
  return found_all;
}

int Main(int argc, char** argv) {
  uint64_t seed = 1, seeds = 5000;
  CLI::App app("Simulates training through the GPU window on the stand-in, each seed twice.");
  app.add_option("--seed", seed, "the first seed")->capture_default_str();
  app.add_option("--seeds", seeds, "how many")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  GpuSimulationResult sum;
  uint64_t wrong[kMistakes.size()] = {};
  bool holds = true;
  for (uint64_t i = 0; i < seeds; ++i) {
    holds &= RunSeed(seed + i, &sum);
    holds &= FindMistakes(seed + i, wrong);
  }
  const auto line = [](const char* name, uint64_t value) {
    std::printf("%-34s %12lu\n", name, value);
  };
  line("seeds", seeds);
  line("steps", sum.steps);
  line("operators", sum.operators);
  line("copies ahead of use", sum.prefetches);
  line("misses", sum.misses);
  line("gradients", sum.gradients);
  line("uses on side streams", sum.side_streams);
  line("captures refused", sum.refused_captures);
  line("runs through a staging ring", sum.staged_runs);
  line("devices that broke", sum.broken_devices);
  line("waits of the host for copies", sum.host_waits);
  line("waits for the slab", sum.source_waits);
  for (size_t i = 0; i < kMistakes.size(); ++i)
    line((std::string("wrong bytes: ") + MistakeName(kMistakes[i])).c_str(), wrong[i]);
  return holds ? 0 : 1;
}

}  // namespace
}  // namespace offload::zero3

int main(int argc, char** argv) { return offload::zero3::Main(argc, argv); }

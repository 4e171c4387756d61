// Runs the simulator over any number of seeds, each twice, and the loop over the n-th fault; prints
// what was met, as a table and (--json) as one line.

#include <string>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"
#include "spdlog/spdlog.h"
#include "swap/seed_runs.h"
#include "swap/simulator.h"

namespace offload::swap {
namespace {

// Returns how many places a fault was put at.
uint64_t RunNthFaults(SeedRuns<SimulationResult>& runs) {
  using aio::FaultKind;
  spdlog::set_level(spdlog::level::off);
  uint64_t positions = 0;
  for (const FaultKind kind :
       {FaultKind::kReadError, FaultKind::kShortRead, FaultKind::kWriteError, FaultKind::kNoSpace,
        FaultKind::kTornWrite, FaultKind::kFlushError, FaultKind::kAgain}) {
    for (const bool persistent : {false, true}) {
      if (runs.has_failed()) return positions;
      runs.Add(SimulateEveryFault(runs.first_seed(), 200, kind, persistent, &positions));
    }
  }
  return positions;
}

nlohmann::ordered_json Table(const SimulationResult& sum, uint64_t positions) {
  nlohmann::ordered_json table = {{"operations", sum.operations},
                                  {"device operations", sum.device_operations},
                                  {"writes", sum.writes},
                                  {"reads", sum.reads},
                                  {"commits", sum.commits},
                                  {"reopenings", sum.reopenings},
                                  {"snapshots", sum.snapshots},
                                  {"snapshots_read", sum.snapshots_read},
                                  {"growths", sum.growths},
                                  {"kills", sum.kills},
                                  {"power cuts", sum.power_cuts},
                                  {"next epochs found", sum.next_epochs_found},
                                  {"mismatches seen", sum.mismatches_seen},
                                  {"refusals to open", sum.refusals_to_open},
                                  {"rotten bits", sum.rotten_bits}};
  if (positions > 0) table["positions of faults"] = positions;
  for (size_t kind = 0; kind < sum.faults.size(); ++kind) {
    if (static_cast<aio::FaultKind>(kind) == aio::FaultKind::kPowerCut) continue;  // counted above
    table["fault: " + std::string(aio::FaultName(static_cast<aio::FaultKind>(kind)))] =
        sum.faults[kind];
  }
  return table;
}

int Main(int argc, char** argv) {
  CLI::App app("Simulates a store under faults and crashes, each seed twice.");
  SeedRuns<SimulationResult> runs;
  runs.AddFlags(app);
  bool nth_fault = false;
  app.add_flag("--nth-fault", nth_fault,
               "instead of seeds: every kind of fault at every position of a 200-operation script");
  CLI11_PARSE(app, argc, argv);

  uint64_t positions = 0;
  if (nth_fault) {
    positions = RunNthFaults(runs);
  } else {
    runs.Run([](uint64_t seed) { return Simulate({.seed = seed}); });
  }
  return runs.Report(Table(runs.sum(), positions));
}

}  // namespace
}  // namespace offload::swap

int main(int argc, char** argv) { return offload::swap::Main(argc, argv); }

// Runs the simulator over any number of seeds, each twice, and the loop over the n-th fault; prints
// what was met, as a table and (--json) as one line.

#include <cstdio>
#include <string>

#include "CLI/CLI.hpp"
#include "base/clock.h"
#include "nlohmann/json.hpp"
#include "spdlog/spdlog.h"
#include "swap/simulator.h"

namespace offload::swap {
namespace {

struct Options {
  uint64_t seed = 1, seeds = 2000;
  double minutes = 0;
  bool nth_fault = false, json = false;
};

struct Total {
  uint64_t runs = 0, positions = 0;
  SimulationResult sum;
  std::string failure;
};

bool RunSeed(uint64_t seed, Total* total) {
  const SimulationResult first = Simulate({.seed = seed});
  const SimulationResult second = Simulate({.seed = seed});
  total->sum.Add(first);
  ++total->runs;
  if (!first.violation.empty()) {
    total->failure = first.violation;
  } else if (first.trace_hash != second.trace_hash) {
    total->failure = "two runs have different traces";
  }
  if (total->failure.empty()) return true;
  total->failure = "seed " + std::to_string(seed) + ": " + total->failure;
  return false;
}

void RunSeeds(const Options& options, Total* total) {
  const Clock& clock = Clock::Real();
  const double begin = clock.NowSeconds();
  for (uint64_t seed = options.seed;; ++seed) {
    const bool enough = options.minutes > 0 ? clock.NowSeconds() - begin >= options.minutes * 60
                                            : seed - options.seed >= options.seeds;
    if (enough || !RunSeed(seed, total)) return;
  }
}

void RunNthFaults(const Options& options, Total* total) {
  using aio::FaultKind;
  for (const FaultKind kind :
       {FaultKind::kReadError, FaultKind::kShortRead, FaultKind::kWriteError, FaultKind::kNoSpace,
        FaultKind::kTornWrite, FaultKind::kFlushError, FaultKind::kAgain}) {
    for (const bool persistent : {false, true}) {
      const SimulationResult result =
          SimulateEveryFault(options.seed, 200, kind, persistent, &total->positions);
      total->sum.Add(result);
      ++total->runs;
      if (!result.violation.empty()) {
        total->failure = result.violation;
        return;
      }
    }
  }
}

nlohmann::ordered_json Table(const Total& total) {
  const SimulationResult& sum = total.sum;
  nlohmann::ordered_json table = {{"runs", total.runs},
                                  {"operations", sum.operations},
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
  if (total.positions > 0) table["positions of faults"] = total.positions;
  for (size_t kind = 0; kind < sum.faults.size(); ++kind) {
    if (static_cast<aio::FaultKind>(kind) == aio::FaultKind::kPowerCut) continue;  // counted above
    table["fault: " + std::string(aio::FaultName(static_cast<aio::FaultKind>(kind)))] =
        sum.faults[kind];
  }
  table["failures"] = total.failure.empty() ? 0 : 1;
  return table;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Simulates a store under faults and crashes, each seed twice.");
  app.add_option("--seed", options.seed, "the first seed")->capture_default_str();
  app.add_option("--seeds", options.seeds, "how many")->capture_default_str();
  app.add_option("--minutes", options.minutes, "as many seeds as fit, instead of --seeds");
  app.add_flag("--nth-fault", options.nth_fault,
               "instead of seeds: every kind of fault at every position of a 200-operation script");
  app.add_flag("--json", options.json, "one line for programs");
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::off);  // stores that fail and are repaired, by the thousand

  Total total;
  options.nth_fault ? RunNthFaults(options, &total) : RunSeeds(options, &total);
  const nlohmann::ordered_json table = Table(total);
  if (options.json) {
    std::printf("%s\n", table.dump().c_str());
  } else {
    for (const auto& [name, value] : table.items())
      std::printf("%-28s %12s\n", name.c_str(), value.dump().c_str());
  }
  if (!total.failure.empty()) std::fprintf(stderr, "FAILED: %s\n", total.failure.c_str());
  return total.failure.empty() ? 0 : 1;
}

}  // namespace
}  // namespace offload::swap

int main(int argc, char** argv) { return offload::swap::Main(argc, argv); }

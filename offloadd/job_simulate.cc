// Runs the job's simulator over any number of seeds, each twice; prints what was met, as a table
// and (--json) as one line.

#include <cstdio>
#include <string>

#include "CLI/CLI.hpp"
#include "base/clock.h"
#include "nlohmann/json.hpp"
#include "offloadd/job_simulator.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

struct Options {
  uint64_t seed = 1, seeds = 2000;
  double minutes = 0;
  bool json = false;
};

struct Total {
  uint64_t runs = 0;
  JobSimulationResult sum;
  std::string failure;
};

bool RunSeed(uint64_t seed, Total* total) {
  const JobSimulationResult first = SimulateJob({.seed = seed});
  const JobSimulationResult second = SimulateJob({.seed = seed});
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

nlohmann::ordered_json Table(const Total& total) {
  const JobSimulationResult& sum = total.sum;
  return {{"runs", total.runs},
          {"launches", sum.launches},
          {"turns", sum.turns},
          {"steps", sum.steps},
          {"refused steps", sum.refused_steps},
          {"uses of weights", sum.uses},
          {"acquires that waited", sum.acquires},
          {"parts of gradients", sum.parts},
          {"looks", sum.looks},
          {"looks at spilled sums", sum.spilled_looks},
          {"rounds anew", sum.rounds_anew},
          {"gradients of trainers", sum.own_gradients},
          {"puts", sum.puts},
          {"of them with what the optimizer keeps", sum.state_puts},
          {"of them of masters", sum.master_puts},
          {"loads", sum.loads},
          {"gets", sum.gets},
          {"exchanges", sum.exchanges},
          {"snapshots", sum.snapshots},
          {"snapshots read", sum.snapshots_read},
          {"deaths of ranks", sum.deaths},
          {"kills", sum.kills},
          {"power cuts", sum.power_cuts},
          {"faults of the drive", sum.drive_faults},
          {"newer states found", sum.newer_states_found},
          {"launches that lost puts", sum.puts_dropped},
          {"failures", total.failure.empty() ? 0 : 1}};
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Simulates jobs of several ranks under faults, deaths and kills, each seed twice.");
  app.add_option("--seed", options.seed, "the first seed")->capture_default_str();
  app.add_option("--seeds", options.seeds, "how many")->capture_default_str();
  app.add_option("--minutes", options.minutes, "as many seeds as fit, instead of --seeds");
  app.add_flag("--json", options.json, "one line for programs");
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::off);  // jobs that fail and end, by the thousand

  Total total;
  RunSeeds(options, &total);
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
}  // namespace offload::daemon

int main(int argc, char** argv) { return offload::daemon::Main(argc, argv); }

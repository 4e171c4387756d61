// Runs the job's simulator over any number of seeds, each twice; prints what was met, as a table
// and (--json) as one line.

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"
#include "offloadd/job_simulator.h"
#include "swap/seed_runs.h"

namespace offload::daemon {
namespace {

nlohmann::ordered_json Table(const JobSimulationResult& sum) {
  return {{"launches", sum.launches},
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
          {"puts that were refused", sum.refused_puts},
          {"loads", sum.loads},
          {"gets", sum.gets},
          {"exchanges", sum.exchanges},
          {"checkpoints that were asked for", sum.checkpoints},
          {"steps beside checkpoints", sum.steps_beside_checkpoints},
          {"snapshots", sum.snapshots},
          {"snapshots read", sum.snapshots_read},
          {"deaths of ranks", sum.deaths},
          {"kills", sum.kills},
          {"power cuts", sum.power_cuts},
          {"faults of the drive", sum.drive_faults},
          {"replans", sum.replans},
          {"places that the pipeline took", sum.places_taken},
          {"places that it gave", sum.places_given},
          {"extents updated ahead of a step", sum.used_ahead},
          {"of no use", sum.lost_ahead},
          {"newer states found", sum.newer_states_found},
          {"launches that lost puts", sum.puts_dropped},
          {"partial steps", sum.partial_steps},
          {"launches that lost partial steps", sum.partial_dropped},
          {"ends of loads after them", sum.partial_loads}};
}

int Main(int argc, char** argv) {
  CLI::App app("Simulates jobs of several ranks under faults, deaths and kills, each seed twice.");
  SeedRuns<JobSimulationResult> runs;
  runs.AddFlags(app);
  CLI11_PARSE(app, argc, argv);
  runs.Run([](uint64_t seed) { return SimulateJob({.seed = seed}); });
  return runs.Report(Table(runs.sum()));
}

}  // namespace
}  // namespace offload::daemon

int main(int argc, char** argv) { return offload::daemon::Main(argc, argv); }

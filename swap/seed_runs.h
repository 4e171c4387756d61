// swap/seed_runs.h
//
// What the programs that run a simulator have in common: flags, the loop over seeds, the report.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "CLI/CLI.hpp"
#include "base/clock.h"
#include "nlohmann/json.hpp"
#include "spdlog/spdlog.h"

namespace offload {

// Runs seeds, each twice, until one fails. A Result has Add(Result), `violation` (empty: none) and
// `trace_hash`.
template <typename Result>
class SeedRuns {
 public:
  void AddFlags(CLI::App& app) {
    app.add_option("--seed", first_seed_, "the first seed")->capture_default_str();
    app.add_option("--seeds", seeds_, "how many")->capture_default_str();
    app.add_option("--minutes", minutes_, "as many seeds as fit, instead of --seeds");
    app.add_flag("--json", json_, "one line for programs");
  }

  // `simulate`: Result of a seed.
  template <typename Simulate>
  void Run(const Simulate& simulate) {
    spdlog::set_level(spdlog::level::off);  // what fails and is repaired, by the thousand
    const Clock& clock = Clock::Real();
    const double begin = clock.NowSeconds();
    for (uint64_t seed = first_seed_; failure_.empty(); ++seed) {
      const bool enough =
          minutes_ > 0 ? clock.NowSeconds() - begin >= minutes_ * 60 : seed - first_seed_ >= seeds_;
      if (enough) return;
      const Result first = simulate(seed);
      Add(first);
      if (failure_.empty() && simulate(seed).trace_hash != first.trace_hash)
        failure_ = "two runs have different traces";
      if (!failure_.empty()) failure_ = "seed " + std::to_string(seed) + ": " + failure_;
    }
  }

  void Add(const Result& result) {
    sum_.Add(result);
    ++runs_;
    if (failure_.empty()) failure_ = result.violation;
  }

  // Prints the table, with the number of runs before it and of failures after it. Returns the exit
  // status.
  int Report(const nlohmann::ordered_json& counts) const {
    nlohmann::ordered_json table = {{"runs", runs_}};
    table.update(counts);
    table["failures"] = failure_.empty() ? 0 : 1;
    if (json_) {
      std::printf("%s\n", table.dump().c_str());
    } else {
      for (const auto& [name, value] : table.items())
        std::printf("%-28s %12s\n", name.c_str(), value.dump().c_str());
    }
    if (!failure_.empty()) std::fprintf(stderr, "FAILED: %s\n", failure_.c_str());
    return failure_.empty() ? 0 : 1;
  }

  uint64_t first_seed() const { return first_seed_; }
  const Result& sum() const { return sum_; }
  bool has_failed() const { return !failure_.empty(); }

 private:
  uint64_t first_seed_ = 1, seeds_ = 2000, runs_ = 0;
  double minutes_ = 0;
  bool json_ = false;
  Result sum_;
  std::string failure_;
};

}  // namespace offload

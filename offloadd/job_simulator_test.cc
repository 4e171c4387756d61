#include "offloadd/job_simulator.h"

#include <gtest/gtest.h>

#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

class JobSimulatorTest : public testing::TestWithParam<uint64_t> {
 protected:
  static constexpr uint64_t kSeedsPerPart = kIsSanitized ? 40 : 250;
  JobSimulatorTest() { spdlog::set_level(spdlog::level::off); }
};

// What would make a trace another one when it is run again (an address, a clock) does so for any
// seed: every eighth is run twice.
constexpr uint64_t kOnceOf = 8;

TEST_P(JobSimulatorTest, EverySeedHoldsWithTheTraceThatItHasAgainAndMeetsEverything) {
  JobSimulationResult sum;
  for (uint64_t seed = GetParam(); seed < GetParam() + kSeedsPerPart; ++seed) {
    const JobSimulationResult result = SimulateJob({.seed = seed});
    ASSERT_EQ(result.violation, "") << "seed " << seed;
    sum.Add(result);
    if (seed % kOnceOf == 0) {
      ASSERT_EQ(SimulateJob({.seed = seed}).trace_hash, result.trace_hash) << "seed " << seed;
    }
  }
  EXPECT_GT(sum.steps, kSeedsPerPart);
  if (kIsSanitized) return;  // of few seeds none may be of a kind
  for (const uint64_t count : {sum.refused_steps,  sum.acquires,      sum.looks,
                               sum.spilled_looks,  sum.rounds_anew,   sum.own_gradients,
                               sum.state_puts,     sum.master_puts,   sum.loads,
                               sum.gets,           sum.exchanges,     sum.checkpoints,
                               sum.snapshots_read, sum.deaths,        sum.kills,
                               sum.power_cuts,     sum.drive_faults,  sum.replans,
                               sum.used_ahead,     sum.lost_ahead,    sum.newer_states_found,
                               sum.puts_dropped,   sum.partial_steps, sum.partial_dropped,
                               sum.partial_loads,  sum.refused_puts})
    EXPECT_GT(count, 0u);
  EXPECT_GT(sum.places_taken, 0u);
  EXPECT_GT(sum.places_given, 0u);
  EXPECT_GT(sum.steps_beside_checkpoints, 0u);
}
INSTANTIATE_TEST_SUITE_P(Seeds, JobSimulatorTest, testing::Range<uint64_t>(1, 2001, 250));

// The daemon has ended there.
TEST(JobSimulatorSelfTest, AStoreFailsBesideAGrowthThatIsDone) {
  EXPECT_EQ(SimulateJob({.seed = 4855}).violation, "");
}

TEST(JobSimulatorSelfTest, DifferentSeedsHaveDifferentTraces) {
  EXPECT_NE(SimulateJob({.seed = 1}).trace_hash, SimulateJob({.seed = 2}).trace_hash);
}

// In every one of a row of runs that has an opportunity, unless what was spoilt is used no more.
class JobSimulatorMistakeTest : public testing::TestWithParam<PlantedMistake> {};

TEST_P(JobSimulatorMistakeTest, IsFound) {
  spdlog::set_level(spdlog::level::off);
  constexpr uint64_t kRuns = 40;
  uint64_t planted = 0, found = 0;
  for (uint64_t seed = 1; seed <= kRuns; ++seed) {
    const JobSimulationResult result = SimulateJob({.seed = seed, .mistake = GetParam()});
    planted += result.mistakes > 0;
    found += !result.violation.empty();
    EXPECT_TRUE(result.violation.empty() || result.mistakes > 0)
        << "seed " << seed << ": " << result.violation;
  }
  RecordProperty("planted", static_cast<int>(planted));
  RecordProperty("found", static_cast<int>(found));
  if (GetParam() == PlantedMistake::kControl) {
    EXPECT_EQ(found, 0u);
    return;
  }
  EXPECT_GT(planted, kRuns / 4);
  EXPECT_GT(found, planted / 2) << "of " << planted;
}
INSTANTIATE_TEST_SUITE_P(Mistakes, JobSimulatorMistakeTest,
                         testing::Values(PlantedMistake::kControl, PlantedMistake::kChangesAmid,
                                         PlantedMistake::kDropsUnwritten,
                                         PlantedMistake::kStaysUnread, PlantedMistake::kKeepsBlock,
                                         PlantedMistake::kHasTwoOwners,
                                         PlantedMistake::kHidesPartial));

}  // namespace
}  // namespace offload::daemon

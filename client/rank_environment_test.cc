#include "client/rank_environment.h"

#include <map>

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::client {
namespace {

using Variables = std::map<std::string, std::string>;

constexpr pid_t kParent = 77;

absl::StatusOr<World> WorldOf(const Variables& variables) {
  return WorldFromEnvironment(
      [&variables](const char* name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end()) return std::nullopt;
        return found->second;
      },
      kParent);
}

const Variables kTorchrun = {
    {"RANK", "2"},
    {"WORLD_SIZE", "4"},
    {"LOCAL_RANK", "2"},
    {"LOCAL_WORLD_SIZE", "4"},
    {"TORCHELASTIC_RUN_ID", "none"},
    {"TORCHELASTIC_RESTART_COUNT", "0"},
    {"TORCHELASTIC_ERROR_FILE", "/tmp/logs/none_x1/attempt_0/2/error.json"},
    {"MASTER_PORT", "29500"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                            {"PMIX_NAMESPACE", "prterun-1"}};
const Variables kMpich = {
    {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm = {{"SLURM_PROCID", "3"},   {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "3"},  {"SLURM_STEP_TASKS_PER_NODE", "4"},
                          {"SLURM_JOB_ID", "123"}, {"SLURM_STEP_ID", "5"}};

Variables With(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}
Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

void ExpectError(const Variables& variables, const std::string& text) {
  const absl::StatusOr<World> world = WorldOf(variables);
  EXPECT_EQ(ErrorIdOf(world.status()), ErrorId::kBadValue) << world.status();
  EXPECT_NE(world.status().message().find(text), absl::string_view::npos) << world.status();
}

TEST(RankEnvironmentTest, AProcessWithoutLauncherIsAWorldOfItsOwn) {
  const World world = WorldOf({}).value();
  EXPECT_EQ(world.world_size, 1u);
  EXPECT_EQ(world.rank, 0u);
  EXPECT_EQ(world.run_id, "");
}

TEST(RankEnvironmentTest, EveryLauncherIsUnderstood) {
  const struct {
    Variables variables;
    const char* launcher;
    uint32_t rank, world_size;
  } kCases[] = {{kTorchrun, "torchrun", 2, 4},
                {kOpenMpi, "Open MPI", 1, 3},
                {kMpich, "MPICH", 0, 2},
                {kSlurm, "Slurm", 3, 4}};
  for (const auto& expected : kCases) {
    SCOPED_TRACE(expected.launcher);
    const absl::StatusOr<World> world = WorldOf(expected.variables);
    ASSERT_TRUE(world.ok()) << world.status();
    EXPECT_EQ(world->launcher, expected.launcher);
    EXPECT_EQ(world->rank, expected.rank);
    EXPECT_EQ(world->local_rank, expected.rank);
    EXPECT_EQ(world->world_size, expected.world_size);
    EXPECT_EQ(world->local_world_size, expected.world_size);
    EXPECT_FALSE(world->run_id.empty());
  }
}

TEST(RankEnvironmentTest, TorchrunWinsOverWhatItWasStartedIn) {
  Variables both = kSlurm;
  both.insert(kTorchrun.begin(), kTorchrun.end());
  EXPECT_EQ(WorldOf(both)->launcher, "torchrun");
}

TEST(RankEnvironmentTest, AVariableThatIsLeftOverMakesNoLauncher) {
  EXPECT_EQ(WorldOf({{"WORLD_SIZE", "8"}})->world_size, 1u);
  EXPECT_EQ(WorldOf(Without(kTorchrun, "RANK"))->world_size, 1u);
  EXPECT_EQ(WorldOf({{"OMPI_COMM_WORLD_SIZE", "8"}})->world_size, 1u);
  EXPECT_EQ(WorldOf({{"SLURM_NTASKS", "8"}, {"SLURM_TASKS_PER_NODE", "8"}})->world_size, 1u);
}

TEST(RankEnvironmentTest, ARankOfSeveralDoesNotTrainAlone) {
  ExpectError({{"RANK", "0"}, {"WORLD_SIZE", "2"}},
              "one of 2 ranks, LOCAL_RANK and LOCAL_WORLD_SIZE are not set");
  ExpectError(Without(kTorchrun, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set");
  EXPECT_EQ(WorldOf({{"RANK", "0"}, {"WORLD_SIZE", "1"}})->world_size, 1u);

  ExpectError(Without(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE"),
              "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE say that this is one of 3 ranks, "
              "OMPI_COMM_WORLD_LOCAL_SIZE is not set");
  ExpectError({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}},
              "MPI_LOCALRANKID and MPI_LOCALNRANKS are not set");
  ExpectError(Without(kSlurm, "SLURM_STEP_TASKS_PER_NODE"),
              "one of 4 ranks, SLURM_STEP_TASKS_PER_NODE is not set");
  ExpectError(Without(kSlurm, "SLURM_STEP_ID"), "SLURM_STEP_ID is not set");
  for (const char* const rank : {"0", "1"}) {
    ExpectError({{"SLURM_PROCID", rank}, {"SLURM_NTASKS", "2"}},
                "SLURM_PROCID and SLURM_NTASKS say that this is one of 2 ranks, SLURM_LOCALID and "
                "SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_ID are not set");
  }
  EXPECT_EQ(WorldOf({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}})->world_size, 1u);
  EXPECT_EQ(WorldOf({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})->world_size, 1u);

  // A launcher that says all counts.
  Variables both = Without(kSlurm, "SLURM_STEP_TASKS_PER_NODE");
  both.insert(kMpich.begin(), kMpich.end());
  EXPECT_EQ(WorldOf(both)->launcher, "MPICH");
}

TEST(RankEnvironmentTest, ABatchScriptOrAShellOfSlurmIsNoRank) {
  const Variables first = With(kSlurm, "SLURM_PROCID", "0");
  EXPECT_EQ(WorldOf(Without(first, "SLURM_STEP_ID"))->world_size, 1u);
  EXPECT_EQ(WorldOf(With(kSlurm, "SLURM_STEP_ID", "4294967290"))->world_size, 1u);
}

TEST(RankEnvironmentTest, RanksOfOneLaunchHaveOneIdAndThoseOfAnotherHaveNot) {
  const std::string id = WorldOf(kTorchrun)->run_id;
  Variables neighbour = With(kTorchrun, "RANK", "3");
  neighbour["TORCHELASTIC_ERROR_FILE"] = "/tmp/logs/none_x1/attempt_0/3/error.json";
  EXPECT_EQ(WorldOf(neighbour)->run_id, id);
  EXPECT_NE(WorldOf(With(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "1"))->run_id, id);
  EXPECT_NE(WorldOf(With(kTorchrun, "TORCHELASTIC_ERROR_FILE",
                         "/tmp/logs/none_y2/attempt_0/2/error.json"))
                ->run_id,
            id);
  EXPECT_NE(WorldOf(With(kSlurm, "SLURM_STEP_ID", "6"))->run_id, WorldOf(kSlurm)->run_id);
  EXPECT_NE(WorldOf(With(kMpich, "PMI_PORT", "node:4711"))->run_id, WorldOf(kMpich)->run_id);
}

TEST(RankEnvironmentTest, WorldsThatCannotBeAreErrorsThatNameTheLauncher) {
  ExpectError(With(kTorchrun, "WORLD_SIZE", "0"), "torchrun says a world of 0 ranks");
  ExpectError(With(kTorchrun, "WORLD_SIZE", "65"), "a world of 65 ranks");
  ExpectError(With(kTorchrun, "RANK", "4"), "rank 4 in a world of 4 ranks");
  ExpectError(With(kTorchrun, "RANK", "two"), "RANK is \"two\"");
  ExpectError(With(kTorchrun, "LOCAL_WORLD_SIZE", "2"), "2 of them on this node");
  ExpectError(With(kSlurm, "SLURM_STEP_TASKS_PER_NODE", "2(x2)"), "2 of them on this node");
}

}  // namespace
}  // namespace offload::client

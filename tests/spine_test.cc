// The spine: the real daemon, started by client::Session, takes steps over every kind of plan, is
// killed, left and resumed, and has at every time the state of the same run in memory.

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <filesystem>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "tests/spine_fixture.h"

namespace offload {
namespace {

class SpineTest : public SpineFixture {
 protected:
  // A whole life: build, train, look, close, resume, train on.
  void TrainAndResume(const Variant& variant) {
    Job job(pool_, "job", variant);
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_FALSE(job.info().exists);
    job.Forward();
    job.Step();
    if (variant.schedule) job.SetSchedule();
    job.Forward();
    job.Step({2});  // a tensor without gradient
    job.Step({1});  // a member of a bundle without one
    job.Forward();
    job.Forward();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Step();
    job.Close();

    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_TRUE(job.info().exists);
    EXPECT_EQ(job.info().step, 4u);
    EXPECT_EQ(job.info().trainer_state, "after 4");
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
};

TEST_F(SpineTest, Fp32AdamWFromTheDrive) { TrainAndResume({.dtype = Dtype::kFloat32}); }
TEST_F(SpineTest, BFloat16AdamWFromTheDrive) { TrainAndResume({.dtype = Dtype::kBFloat16}); }
TEST_F(SpineTest, BFloat16AdamWWithOneBlockAndWithoutSchedule) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .pipeline_blocks = 1, .schedule = false});
}
TEST_F(SpineTest, BFloat16AdamWWithStatePartlyInMemory) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .pipeline_blocks = 3, .state_resident = 1});
}
TEST_F(SpineTest, BFloat16AdamWWithEverythingInMemory) {
  TrainAndResume({.dtype = Dtype::kBFloat16,
                  .pipeline_blocks = 2,
                  .state_resident = 9,
                  .weights_resident = true});
}
TEST_F(SpineTest, BFloat16AdamWWithSpilledGradients) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .spill = true});
}
TEST_F(SpineTest, Fp32AdamWWithSpilledGradients) {
  TrainAndResume({.dtype = Dtype::kFloat32, .spill = true});
}
TEST_F(SpineTest, Fp32SgdWithMomentum) {
  TrainAndResume({.dtype = Dtype::kFloat32, .optimizer = kMomentum});
}
TEST_F(SpineTest, BFloat16SgdWithMomentum) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .optimizer = kMomentum});
}
TEST_F(SpineTest, Fp32SgdWithoutState) {
  TrainAndResume({.dtype = Dtype::kFloat32, .optimizer = kPlainSgd, .pipeline_blocks = 1});
}
TEST_F(SpineTest, BFloat16SgdWithoutState) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .optimizer = kPlainSgd});
}
TEST_F(SpineTest, Fp32LambSweepsTwice) {
  TrainAndResume({.dtype = Dtype::kFloat32, .optimizer = kLamb});
}
TEST_F(SpineTest, BFloat16LambWithSpilledGradients) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .optimizer = kLamb, .spill = true});
}
TEST_F(SpineTest, BFloat16LambWithStateInMemory) {
  TrainAndResume({.dtype = Dtype::kBFloat16,
                  .optimizer = kLamb,
                  .state_resident = 1,
                  .weights_resident = true});
}
TEST_F(SpineTest, BFloat16AdamWOverThreads) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .io_engine = "threads"});
}

TEST_F(SpineTest, BFloat16AdamWOverTwoPools) {
  const std::string first = pool_ + "/a", second = pool_ + "/b";
  std::filesystem::create_directories(first);
  std::filesystem::create_directories(second);
  pool_ = absl::StrCat(first, ",", second);
  TrainAndResume({.dtype = Dtype::kBFloat16});
  EXPECT_TRUE(std::filesystem::exists(second + "/job.offload.member-1"));
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  const absl::Status alone =
      (*session)->OpenJob({.job = "job", .pool = first, .ram_bytes = kRamBytes}).status();
  EXPECT_EQ(ErrorIdOf(alone), ErrorId::kPoolsDiffer) << alone;
  EXPECT_NE(alone.message().find(second), absl::string_view::npos) << alone;
  pool_ = std::filesystem::path(first).parent_path();
}

TEST_F(SpineTest, KilledDaemonResumesAtAWholeStep) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (int round = 0; round < 4; ++round) {
    job.Step();
    job.Step();
    if (round % 2 == 0) {
      ASSERT_TRUE(job.session().WaitDurable().ok());
    }
    const uint64_t returned = job.step();
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_GE(job.info().step + (round % 2 == 0 ? 0 : 1), returned);
    EXPECT_LE(job.info().step, returned);
    job.ReturnToStep(job.info().step);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  }
  job.Close();
}

// Runs offloadctl; its exit code.
int Offloadctl(const std::string& arguments) {
  const std::string binary = getenv("OFFLOADCTL_BINARY");
  const int status = std::system(absl::StrCat(binary, " ", arguments).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(SpineTest, ForkOfASnapshotEqualsTheStateThatItKept) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  const std::string snapshot = absl::StrCat("snapshot create ", pool_, " job");
  EXPECT_EQ(Offloadctl(absl::StrCat(snapshot, " kept")), 0) << "says what it would take";
  ASSERT_EQ(Offloadctl(absl::StrCat(snapshot, " kept --yes")), 0) << "grows, beside the run";
  EXPECT_NE(Offloadctl(absl::StrCat(snapshot, " kept --yes")), 0) << "the name is taken";
  for (int i = 0; i < 3; ++i) job.Step();
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  const std::string fork = absl::StrCat("snapshot fork ", pool_, " job kept --yes --as ");
  ASSERT_EQ(Offloadctl(fork + "early"), 0) << "beside the run";
  job.Step();
  job.Close();
  ASSERT_EQ(Offloadctl(fork + "late"), 0);
  ASSERT_EQ(Offloadctl(absl::StrCat("snapshot fork ", pool_, " job --yes --as last")), 0);

  const std::pair<const char*, uint64_t> forks[] = {{"early", 2}, {"late", 2}, {"last", 6}};
  for (const auto& [name, step] : forks) {
    Job copy(pool_, name, {.dtype = Dtype::kBFloat16, .state_resident = 1});
    copy.Follow(job);
    ASSERT_NO_FATAL_FAILURE(copy.Open());
    EXPECT_EQ(copy.info().step, step);
    EXPECT_EQ(copy.info().trainer_state, absl::StrCat("after ", step));
    copy.ReturnToStep(step);
    ASSERT_NO_FATAL_FAILURE(copy.ExpectEqual()) << name;
    copy.Step();
    ASSERT_NO_FATAL_FAILURE(copy.ExpectEqual()) << name;
    copy.Close();
  }
  EXPECT_EQ(Offloadctl(absl::StrCat("snapshot rm ", pool_, " job kept --yes")), 0);
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 6u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  EXPECT_EQ(Offloadctl(absl::StrCat(snapshot, " again")), 0) << "in the generation that is free";
  EXPECT_EQ(Offloadctl(absl::StrCat("snapshot rm ", pool_, " job again --yes")), 0);
  job.Close();
}

TEST_F(SpineTest, CheckpointIntervalIsWhatAKilledDaemonLeaves) {
  Job job(pool_, "job",
          {.dtype = Dtype::kBFloat16, .state_resident = 1, .durability = "checkpoint:3"});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (int i = 0; i < 5; ++i) job.Step();
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual()) << "what is not committed is read all the same";
  EXPECT_EQ(job.session().slab_header().durable_step.load(), 3u);
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 3u);
  EXPECT_EQ(job.info().trainer_state, "after 3");
  job.ReturnToStep(3);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Step();
  const auto durable = job.session().WaitDurable();
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(*durable, 4u) << "whoever asks gets a commit inside an interval";
  job.Step();
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 4u);
  job.ReturnToStep(4);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Step();
  job.Close();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 5u) << "the end is a checkpoint, too";
  EXPECT_EQ(job.info().trainer_state, "after 5");
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, SnapshotInsideAnIntervalNamesTheStepThatItFinds) {
  Job job(pool_, "job",
          {.dtype = Dtype::kFloat32, .durability = "checkpoint:1000", .generations = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  ASSERT_EQ(Offloadctl(absl::StrCat("snapshot create ", pool_, " job two")), 0);
  EXPECT_EQ(job.session().slab_header().durable_step.load(), 2u);
  job.Step();
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 2u);
  job.ReturnToStep(2);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, GoneRankLeavesItsRecordedStepCommitted) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32, .spill = true});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 1u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, TerminatedDaemonCommitsWhatWasRecorded) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  ASSERT_EQ(kill(job.session().daemon_pid(), SIGTERM), 0);
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 2u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, PutBetweenStepsReplacesTheMasterAndKeepsTheMoments) {
  for (const uint32_t state_resident : {0u, 9u}) {
    SCOPED_TRACE(state_resident);
    Job job(pool_, absl::StrCat("job", state_resident),
            {.dtype = Dtype::kBFloat16, .state_resident = state_resident});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    job.Step();
    for (const uint32_t tensor :
         {0u, 1u, 8u}) {  // a big one, a bundled one, the largest bundled one
      job.ChangeWeights(tensor, 0.25f);
      job.Put(tensor);
    }
    job.Forward();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.ChangeWeights(0, -0.5f);
    job.ChangeWeights(3, -0.5f);
    job.Put(0);
    job.Put(3);
    job.EndLoad();
    job.Close();
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_EQ(job.info().step, 2u);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
}

}  // namespace
}  // namespace offload

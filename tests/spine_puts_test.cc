// Weights that are put between steps, at the real daemon: a step or the end of a load makes them
// durable, and whatever else happens they are dropped as a whole.

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/shm_abi.h"
#include "tests/spine_fixture.h"

namespace offload {
namespace {

// A big tensor, a bundled one, a frozen one, and the largest that is bundled.
constexpr uint32_t kPut[] = {0, 1, 4, 8};

int Offloadctl(const std::string& arguments) {
  const std::string binary = getenv("OFFLOADCTL_BINARY");
  const int status = std::system(absl::StrCat(binary, " ", arguments).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class SpinePutsTest : public SpineFixture {
 protected:
  static void PutSome(Job& job, float by) {
    for (const uint32_t tensor : kPut) {
      job.ChangeWeights(tensor, by);
      ASSERT_NO_FATAL_FAILURE(job.Put(tensor));
    }
  }

  // The job as it is on the drive, beside what the history says of that step.
  static void ExpectStep(Job& job, uint64_t step) {
    ASSERT_NO_FATAL_FAILURE(job.Open());
    ASSERT_EQ(job.info().step, step);
    EXPECT_EQ(job.info().trainer_state, step == 0 ? "begin" : absl::StrCat("after ", step));
    job.ReturnToStep(step);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  }

  static uint64_t DurableStep(Job& job) { return job.session().slab_header().durable_step.load(); }
};

TEST_F(SpinePutsTest, PutsWithoutAStepAreDroppedHoweverTheJobEnds) {
  const std::pair<const char*, std::function<void(Job&)>> ends[] = {
      {"closed", [](Job& job) { job.Close(); }},
      {"left", [](Job& job) { job.Leave(); }},
      {"killed", [](Job& job) { job.KillDaemon(); }},
      {"terminated",
       [](Job& job) {
         ASSERT_EQ(kill(job.session().daemon_pid(), SIGTERM), 0);
         job.Leave();
       }},
  };
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat64, Dtype::kFloat16}) {
    Job job(pool_, absl::StrCat("job", static_cast<int>(dtype)),
            {.dtype = dtype, .state_resident = 1});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    for (const auto& [name, end] : ends) {
      SCOPED_TRACE(name);
      PutSome(job, 0.25f);
      ASSERT_NO_FATAL_FAILURE(job.ExpectEqual()) << "they are there while the job is open";
      ASSERT_NO_FATAL_FAILURE(end(job));
      ASSERT_NO_FATAL_FAILURE(ExpectStep(job, job.step()));
      job.Step();
      ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    }
    job.Close();
  }
}

TEST_F(SpinePutsTest, TheNextStepTakesThemIntoItsEpoch) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  PutSome(job, 0.25f);
  job.Step({0});  // also those that it does not update
  ASSERT_TRUE(job.session().WaitDurable().ok());
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 1));
  job.Close();
}

TEST_F(SpinePutsTest, TheEndOfALoadMakesThemDurableUnderTheStepThatThereIs) {
  for (const char* durability : {"step", "checkpoint:1000"}) {
    SCOPED_TRACE(durability);
    Job job(pool_, durability[0] == 's' ? "every" : "interval",
            {.dtype = Dtype::kBFloat16, .durability = durability});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    job.EndLoad();  // of nothing
    job.Step();
    PutSome(job, 0.25f);
    job.EndLoad();
    PutSome(job, 0.5f);  // and these are not
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 1));
    job.Close();
  }
}

// One of two extents, two of a bundle, one of a single extent.
constexpr uint32_t kWithStates[] = {0, 1, 3, 7};

TEST_F(SpinePutsTest, ANewJobBeginsWithWhatAnOptimizerHasKept) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat64, Dtype::kFloat16}) {
    for (const uint32_t state_resident : {0, 1}) {
      SCOPED_TRACE(absl::StrCat("dtype ", static_cast<int>(dtype), ", ", state_resident));
      Job job(pool_, absl::StrCat("job", static_cast<int>(dtype), state_resident),
              {.dtype = dtype,
               .state_resident = state_resident,
               .begins_with_states = {std::begin(kWithStates), std::end(kWithStates)}});
      ASSERT_NO_FATAL_FAILURE(job.Open());
      job.KillDaemon();
      ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 0)) << "they are of epoch 0";
      for (int i = 0; i < 2; ++i) job.Step();
      ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
      job.Close();
      ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 2));
      job.Close();
    }
  }
}

TEST_F(SpinePutsTest, WhatAnOptimizerKeepsIsPutAsWeightsAre) {
  for (const char* durability : {"step", "checkpoint:1000"}) {
    SCOPED_TRACE(durability);
    Job job(pool_, durability[0] == 's' ? "every" : "interval",
            {.dtype = Dtype::kBFloat16, .state_resident = 1, .durability = durability});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    job.Step();
    ASSERT_TRUE(job.session().WaitDurable().ok());
    const auto put = [&] {
      for (const uint32_t tensor : kWithStates) {
        job.SetStates(tensor, 5);
        const absl::Status status = job.TryPutStates(tensor);
        ASSERT_TRUE(status.ok()) << status;
      }
      ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    };
    ASSERT_NO_FATAL_FAILURE(put());
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 1)) << "without a step they are dropped";
    ASSERT_NO_FATAL_FAILURE(put());
    job.Step({7});
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    ASSERT_TRUE(job.session().WaitDurable().ok());
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 2))
        << "a step takes them, those too that it does not update";
    job.Close();
  }
}

TEST_F(SpinePutsTest, MastersArePutWithAllTheirBits) {
  for (const auto& [state_resident, dtype] :
       {std::pair(0u, Dtype::kBFloat16), std::pair(1u, Dtype::kBFloat16),
        std::pair(0u, Dtype::kFloat16), std::pair(1u, Dtype::kFloat16)}) {
    Job job(pool_, absl::StrCat("job", static_cast<int>(dtype), state_resident),
            {.dtype = dtype, .state_resident = state_resident});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    const auto put = [&] {
      for (const uint32_t tensor : kWithStates) {
        job.SetMasters(tensor);
        const absl::Status status = job.TryPutMaster(tensor);
        ASSERT_TRUE(status.ok()) << status;
      }
      ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    };
    ASSERT_NO_FATAL_FAILURE(put());  // over residuals that were never written
    job.Step({3});
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    ASSERT_NO_FATAL_FAILURE(put());
    job.ChangeWeights(1, 0.25f);  // beside them in the bundle
    ASSERT_NO_FATAL_FAILURE(job.Put(1));
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.EndLoad();
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 1));
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
}

TEST_F(SpinePutsTest, WaitingForDurabilityMakesOnlyStepsDurable) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  PutSome(job, 0.25f);
  const auto durable = job.session().WaitDurable();
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(*durable, 1u);
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 1));
  job.Close();
}

// A frozen tensor has no update that its put would wait for.
TEST_F(SpinePutsTest, APutRightAfterAStepIsNotInThatStepsEpoch) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (uint64_t step = 1; step <= 3; ++step) {
    job.Step();
    job.ChangeWeights(4, 0.25f);
    ASSERT_NO_FATAL_FAILURE(job.Put(4));
    EXPECT_EQ(DurableStep(job), step);
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(ExpectStep(job, step));
  }
  job.Close();
}

TEST_F(SpinePutsTest, StepsInsideAnIntervalAreNotDroppedWithThem) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .durability = "checkpoint:1000"});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  EXPECT_EQ(DurableStep(job), 0u);
  PutSome(job, 0.25f);
  EXPECT_EQ(DurableStep(job), 2u);
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 2));
  job.Close();
}

TEST_F(SpinePutsTest, PutsThatNobodyWaitedForCountBeforeTheStepThatFollows) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  constexpr uint32_t kTensor = 8;
  const uint64_t count = job.catalogue().tensors[kTensor].element_count;
  const std::vector<float> ones(count, 1.0f);
  std::memcpy(job.session().region() + proto::kRegionFixedBytes, ones.data(), count * 4);
  job.Step();
  const client::Ticket ticket =
      job.session().Put(kTensor, 0, count, proto::kRegionFixedBytes);  // waits for the step
  job.SetWeights(kTensor, ones);
  job.Step();
  EXPECT_TRUE(job.session().Wait(ticket).ok());
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
  ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 2));
  job.Close();
}

TEST_F(SpinePutsTest, ASnapshotHoldsTheLastStepWithoutThemAndLeavesThemToTheNext) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1, .generations = 3});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  const std::string snapshot = absl::StrCat("snapshot create ", pool_, " job ");
  ASSERT_EQ(Offloadctl(snapshot + "before"), 0);
  for (const char* name : {"first", "second"}) {
    PutSome(job, 0.25f);
    ASSERT_EQ(Offloadctl(snapshot + name), 0);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual()) << "the trainer has what it has put";
  }
  ASSERT_EQ(Offloadctl(absl::StrCat("snapshot rm ", pool_, " job before --yes")), 0);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  PutSome(job, 0.25f);
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 1));

  PutSome(job, 0.5f);
  ASSERT_EQ(Offloadctl(snapshot + "third"), 0);
  job.Step({1});
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
  ASSERT_NO_FATAL_FAILURE(ExpectStep(job, 2));
  job.Close();
  for (const char* name : {"first", "third"}) {
    const std::string fork = absl::StrCat("fork-of-", name);
    ASSERT_EQ(
        Offloadctl(absl::StrCat("snapshot fork ", pool_, " job ", name, " --yes --as ", fork)), 0);
    Job copy(pool_, fork, {.dtype = Dtype::kBFloat16, .state_resident = 1});
    copy.Follow(job);
    ASSERT_NO_FATAL_FAILURE(ExpectStep(copy, 1)) << name;
    copy.Close();
  }
}

}  // namespace
}  // namespace offload

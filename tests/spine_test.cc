// The spine: the real daemon, started by client::Session, takes steps over every kind of plan, is
// killed, left and resumed, and has at every time the state of the same run in memory.

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
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
TEST_F(SpineTest, Fp64AdamWFromTheDrive) { TrainAndResume({.dtype = Dtype::kFloat64}); }
TEST_F(SpineTest, Fp16AdamWFromTheDrive) { TrainAndResume({.dtype = Dtype::kFloat16}); }
TEST_F(SpineTest, Fp64AdamWWithSpilledGradientsAndStatePartlyInMemory) {
  TrainAndResume({.dtype = Dtype::kFloat64, .state_resident = 1, .spill = true});
}
TEST_F(SpineTest, Fp16AdamWWithSpilledGradientsAndStatePartlyInMemory) {
  TrainAndResume({.dtype = Dtype::kFloat16, .state_resident = 1, .spill = true});
}
TEST_F(SpineTest, Fp64LambWithEverythingInMemory) {
  TrainAndResume({.dtype = Dtype::kFloat64,
                  .optimizer = kLamb,
                  .state_resident = 9,
                  .weights_resident = true});
}
TEST_F(SpineTest, Fp16LambWithEverythingInMemory) {
  TrainAndResume({.dtype = Dtype::kFloat16,
                  .optimizer = kLamb,
                  .state_resident = 9,
                  .weights_resident = true});
}
OptimizerSpec Averaged(OptimizerSpec optimizer, const Averaging& averaging) {
  optimizer.SetAveraging(averaging);
  return optimizer;
}
constexpr Averaging kExponential{.kind = Averaging::Kind::kExponential, .decay = 0.75};
constexpr Averaging kEqual{.kind = Averaging::Kind::kEqual, .from = 2, .every = 2};

TEST_F(SpineTest, BFloat16AdamWWithAnAverage) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .optimizer = Averaged(OptimizerSpec(), kExponential)});
}
TEST_F(SpineTest, BFloat16SgdWithAnAverageAndTieBitsOfWholeExtents) {
  TrainAndResume({.dtype = Dtype::kBFloat16,
                  .optimizer = Averaged(OptimizerSpec("sgd"), kExponential),
                  .half_steps = true});
}
TEST_F(SpineTest, Fp32LambWithAMeanAndSpilledGradients) {
  TrainAndResume({.dtype = Dtype::kFloat32,
                  .optimizer = Averaged(OptimizerSpec("lamb"), kEqual),
                  .spill = true});
}
TEST_F(SpineTest, Fp64AdamWWithAMeanAndStatePartlyInMemory) {
  TrainAndResume({.dtype = Dtype::kFloat64,
                  .optimizer = Averaged(OptimizerSpec(), kEqual),
                  .pipeline_blocks = 3,
                  .state_resident = 1});
}
TEST_F(SpineTest, Fp16AdamWWithAnAverage) {
  TrainAndResume({.dtype = Dtype::kFloat16, .optimizer = Averaged(OptimizerSpec(), kExponential)});
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

TEST_F(SpineTest, BFloat16SgdWithTieBitsOfWholeExtents) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .optimizer = kHalfSteps, .half_steps = true});
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

TEST_F(SpineTest, OnlyAStoreThatIsMadeHasProgress) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  ASSERT_FALSE(job.to_format().empty());
  for (const uint64_t bytes : job.to_format()) EXPECT_GT(bytes, 0u);
  job.Close();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_TRUE(job.to_format().empty());
  job.Close();
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

// What stays in memory, in an interval that only the end of the job ends.
class SpineIntervalTest : public SpineTest {
 protected:
  // All of it stays in memory.
  static Variant InMemory(Variant variant, const char* durability = "checkpoint:1000") {
    variant.durability = durability;
    variant.state_resident = 9;
    variant.weights_resident = true;
    return variant;
  }
  void TrainAndResumeInMemory(Variant variant) { TrainAndResume(InMemory(std::move(variant))); }
};

TEST_F(SpineIntervalTest, BFloat16AdamW) { TrainAndResumeInMemory({.dtype = Dtype::kBFloat16}); }
TEST_F(SpineIntervalTest, BFloat16AdamWWithAnAverage) {
  TrainAndResumeInMemory(
      {.dtype = Dtype::kBFloat16, .optimizer = Averaged(OptimizerSpec(), kExponential)});
}
TEST_F(SpineIntervalTest, Fp32AdamW) { TrainAndResumeInMemory({.dtype = Dtype::kFloat32}); }
TEST_F(SpineIntervalTest, BFloat16LambSweepsTwice) {
  TrainAndResumeInMemory({.dtype = Dtype::kBFloat16, .optimizer = kLamb});
}
TEST_F(SpineIntervalTest, Fp32SgdWithoutState) {
  TrainAndResumeInMemory({.dtype = Dtype::kFloat32, .optimizer = kPlainSgd});
}
TEST_F(SpineIntervalTest, BFloat16SgdWithTieBitsOfWholeExtents) {
  TrainAndResumeInMemory({.dtype = Dtype::kBFloat16, .optimizer = kHalfSteps, .half_steps = true});
}
TEST_F(SpineIntervalTest, BFloat16AdamWWithSpilledGradients) {
  TrainAndResumeInMemory({.dtype = Dtype::kBFloat16, .spill = true});
}
TEST_F(SpineIntervalTest, StateThatStaysOfWeightsThatPassThroughTheWindow) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .state_resident = 1, .durability = "checkpoint:1000"});
}

// Bytes of all planes that a step updates; with `left`, of those that stay in memory.
uint64_t UpdatedBytes(const Job& job, bool left) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < job.catalogue().store_tensors.size(); ++i) {
    const proto::StoreTensor& tensor = job.catalogue().store_tensors[i];
    if (!tensor.trainable) continue;
    if (!left || job.plan().weight_resident[i]) bytes += proto::WeightSlotBytes(tensor);
    const uint32_t extents = proto::ExtentCount(tensor.element_count);
    for (uint32_t index = 0; index < (left ? job.plan().state_resident[i] : extents); ++index)
      bytes += proto::StateBytes(tensor, index);
  }
  return bytes;
}

TEST_F(SpineIntervalTest, WhatStaysInMemoryIsWrittenAtTheCheckpointOnly) {
  const Variant variants[] = {
      {.state_resident = 9, .weights_resident = true, .durability = "checkpoint:1000"},
      {.state_resident = 1, .weights_resident = true, .durability = "checkpoint:1000"},
      {.weights_resident = true, .durability = "checkpoint:1000"},
      {.durability = "checkpoint:1000"},
      {.state_resident = 9, .weights_resident = true, .durability = "step"}};
  int jobs = 0;
  for (Variant variant : variants) {
    variant.dtype = Dtype::kBFloat16;
    SCOPED_TRACE(absl::StrCat(variant.state_resident,
                              variant.weights_resident ? " with" : " without", " weights, ",
                              variant.durability));
    Job job(pool_, absl::StrCat("job", ++jobs), variant);
    ASSERT_NO_FATAL_FAILURE(job.Open());
    const proto::SlabHeader& header = job.session().slab_header();
    const uint64_t all_bytes = UpdatedBytes(job, false), left_bytes = UpdatedBytes(job, true);
    const bool commits = variant.durability == "step";
    ASSERT_TRUE(variant.state_resident < 9 || left_bytes == all_bytes);
    job.Step();
    job.ExpectEqual();  // waits for each tensor's writes
    for (int step = 0; step < 3; ++step) {
      const uint64_t before = header.bytes_written;
      job.Step();
      job.ExpectEqual();
      if (commits) {
        ASSERT_TRUE(job.session().WaitDurable().ok());
        EXPECT_GE(header.bytes_written - before, all_bytes);
      } else {
        EXPECT_EQ(header.bytes_written - before, all_bytes - left_bytes);
      }
    }
    const uint64_t before = header.bytes_written;
    ASSERT_TRUE(job.session().WaitDurable().ok());
    EXPECT_GE(header.bytes_written - before, commits ? 0 : left_bytes);
    EXPECT_LT(header.bytes_written - before, (commits ? 0 : left_bytes) + (1 << 20)) << "once";
    job.Close();
  }
}

TEST_F(SpineIntervalTest, TieBitsThatFillAPlaneAreWrittenAtOnce) {
  Job job(pool_, "job",
          InMemory({.dtype = Dtype::kBFloat16, .optimizer = kHalfSteps, .half_steps = true}));
  ASSERT_NO_FATAL_FAILURE(job.Open());
  const proto::SlabHeader& header = job.session().slab_header();
  job.ExpectEqual();
  for (int step = 0; step < 3; ++step) {
    const uint64_t before = header.bytes_written;
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    if (step == 1) continue;  // most are whole again
    EXPECT_GT(header.bytes_written, before);
    EXPECT_LT(header.bytes_written - before, UpdatedBytes(job, false) / 16);
  }
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 0u);
  job.ReturnToStep(0);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

// The steps after it are not part of it.
TEST_F(SpineIntervalTest, ACheckpointThatIsAskedForHoldsTheLastStep) {
  Job job(pool_, "job", InMemory({.dtype = Dtype::kBFloat16}));
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.session().Checkpoint().value(), 0u) << "nothing is newer";
  job.Step();
  job.Step();
  EXPECT_EQ(job.session().Checkpoint().value(), 2u);
  EXPECT_EQ(job.session().WaitDurable().value(), 2u);
  job.Step();
  job.ExpectEqual();
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 2u);
  job.ReturnToStep(2);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

// The bits of a step beside a checkpoint are written when that is committed.
TEST_F(SpineIntervalTest, TieBitsOfTheNextStepAreNotInACheckpoint) {
  Job job(pool_, "job",
          InMemory({.dtype = Dtype::kBFloat16, .optimizer = kHalfSteps, .half_steps = true},
                   "checkpoint:2"));
  ASSERT_NO_FATAL_FAILURE(job.Open());
  uint64_t step = 0;
  for (int life = 0; life < 3; ++life) {
    for (int i = 0; i < 3; ++i) job.Step();
    job.ExpectEqual();
    if (life == 1) {
      ASSERT_TRUE(job.session().WaitDurable().ok());
    }
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_LE(job.info().step, step + 3);
    EXPECT_GE(job.info().step, life == 1 ? step + 3 : step);
    step = job.info().step;
    job.ReturnToStep(step);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  }
  job.Close();
}

TEST_F(SpineIntervalTest, IntervalsByTheClockEndWithTheFirstStepAfterThem) {
  Job job(pool_, "hours", {.dtype = Dtype::kBFloat16, .durability = "checkpoint:1h"});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (int i = 0; i < 3; ++i) job.Step();
  EXPECT_EQ(job.session().slab_header().durable_step.load(), 0u);
  job.Close();
  Job often(pool_, "often", {.dtype = Dtype::kBFloat16, .durability = "checkpoint:1s"});
  ASSERT_NO_FATAL_FAILURE(often.Open());
  often.Step();
  ASSERT_TRUE(often.session().WaitDurable().ok());
  std::this_thread::sleep_for(std::chrono::seconds(1));
  often.Step();
  often.Step();
  often.ExpectEqual();  // it writes, after the commit of the one before
  EXPECT_GE(often.session().slab_header().durable_step.load(), 2u);
  often.Close();
}

TEST_F(SpineIntervalTest, ADaemonThatIsKilledWhileItWritesThemLeavesTheCheckpointBefore) {
  const Variant variant = {.dtype = Dtype::kBFloat16,
                           .state_resident = 1,
                           .weights_resident = true,
                           .durability = "checkpoint:2"};
  const std::pair<const char*, uint64_t> kills[] = {
      {"job.write_back:1:exit", 0}, {"job.write_back:4:exit", 0}, {"job.before_commit:2:exit", 2}};
  int jobs = 0;
  for (const auto& [place, checkpoint] : kills) {
    SCOPED_TRACE(place);
    const std::string name = absl::StrCat("job", ++jobs);
    Job job(pool_, name, variant);
    setenv("OFFLOADD_FAULT_POINT", place, 1);
    const absl::Status opened = job.TryOpen();
    unsetenv("OFFLOADD_FAULT_POINT");
    ASSERT_TRUE(opened.ok()) << opened;
    while (job.NumberedStep().ok()) ASSERT_LT(job.step(), 8u);
    job.Leave();
    Job after(pool_, name, variant);
    after.SkipTo(checkpoint);
    ASSERT_NO_FATAL_FAILURE(after.Open());
    EXPECT_EQ(after.info().step, checkpoint);
    ASSERT_NO_FATAL_FAILURE(after.ExpectEqual());
    after.Close();
  }
}

// Four blocks are two extents of an update that begins before its step.
Variant Foreseen(Dtype dtype) { return {.dtype = dtype, .pipeline_blocks = 4}; }

TEST_F(SpineTest, UpdatesThatBeginBeforeTheStepAreTheStepsOrNothing) {
  Variant averaged = Foreseen(Dtype::kBFloat16);
  averaged.optimizer.SetAveraging(kExponential);
  const std::pair<const char*, Variant> variants[] = {{"fp32", Foreseen(Dtype::kFloat32)},
                                                      {"bf16", Foreseen(Dtype::kBFloat16)},
                                                      {"average", averaged}};
  for (const auto& [name, variant] : variants) {
    SCOPED_TRACE(name);
    Job job(pool_, name, variant);
    ASSERT_NO_FATAL_FAILURE(job.Open());
    for (const bool changes : {false, true}) {
      ASSERT_TRUE(job.NumberedStep().ok());
      ASSERT_TRUE(job.AnnouncedStep(changes).ok());
      ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    }
    job.Close();
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_EQ(job.info().step, 4u);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
}

TEST_F(SpineTest, ADaemonThatIsKilledAmidSuchUpdatesLeavesTheStepBefore) {
  const std::pair<const char*, uint64_t> kills[] = {{"job.update_ahead:1:exit", 1},
                                                    {"job.update_ahead:3:exit", 1},
                                                    {"job.update_ahead:7:exit", 2}};
  int jobs = 0;
  for (const auto& [place, step] : kills) {
    SCOPED_TRACE(place);
    const std::string name = absl::StrCat("job", ++jobs);
    Job job(pool_, name, Foreseen(Dtype::kBFloat16));
    setenv("OFFLOADD_FAULT_POINT", place, 1);
    const absl::Status opened = job.TryOpen();
    unsetenv("OFFLOADD_FAULT_POINT");
    ASSERT_TRUE(opened.ok()) << opened;
    ASSERT_TRUE(job.NumberedStep().ok());
    while (job.AnnouncedStep().ok()) ASSERT_LT(job.step(), 8u);
    job.Leave();
    Job after(pool_, name, Foreseen(Dtype::kBFloat16));
    after.SkipTo(step);
    ASSERT_NO_FATAL_FAILURE(after.Open());
    EXPECT_EQ(after.info().step, step);
    ASSERT_NO_FATAL_FAILURE(after.ExpectEqual());
    after.Close();
  }
}

// Assumes of the pool that it gives a byte a second, and judges every step by whatever it shows.
class SpineReplanTest : public SpineTest {
 protected:
  SpineReplanTest() {
    for (const char* variable : kVariables) setenv(variable, "1", 1);
  }
  ~SpineReplanTest() override {
    for (const char* variable : kVariables) unsetenv(variable);
  }

 private:
  static constexpr const char* kVariables[] = {"OFFLOADD_POOL_READ", "OFFLOADD_POOL_WRITE",
                                               "OFFLOADD_REPLAN", "OFFLOADD_REPLAN_STEPS"};
};

// A pool is measured once a daemon, unless its rates are given.
TEST_F(SpineTest, APoolWhoseRatesAreNotGivenIsMeasured) {
  const char* const kVariables[] = {"OFFLOADD_POOL_READ", "OFFLOADD_POOL_WRITE"};
  for (const std::vector<const char*>& given :
       std::vector<std::vector<const char*>>{{kVariables[0], kVariables[1]}, {kVariables[1]}, {}}) {
    std::map<std::string, std::string> before;
    for (const char* variable : kVariables) {
      if (const char* const value = getenv(variable)) before[variable] = value;
      unsetenv(variable);
    }
    for (const char* variable : given) setenv(variable, "1e9", 1);
    testing::internal::CaptureStderr();
    Job job(pool_, absl::StrCat("job", given.size()), {.dtype = Dtype::kFloat32});
    const absl::Status opened = job.TryOpen();
    const std::string said = testing::internal::GetCapturedStderr();
    for (const char* variable : kVariables) unsetenv(variable);
    for (const auto& [variable, value] : before) setenv(variable.c_str(), value.c_str(), 1);
    ASSERT_TRUE(opened.ok()) << opened;
    EXPECT_EQ(absl::StrContains(said, " GB/s, writes "), given.size() < 2) << said;
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
}

TEST_F(SpineReplanTest, StepsAreTheSameAfterIt) {
  for (const char* durability : {"step", "checkpoint:2"}) {
    Job job(pool_, durability[0] == 's' ? "steps" : "intervals",
            {.dtype = Dtype::kBFloat16, .durability = durability});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    for (int i = 0; i < 4; ++i) job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
}

// It is the last thing before a step begins, when the one before it is committed.
TEST_F(SpineReplanTest, ADaemonThatIsKilledAmidItLeavesTheStepBefore) {
  const Variant variant = {.dtype = Dtype::kBFloat16};
  Job job(pool_, "job", variant);
  setenv("OFFLOADD_FAULT_POINT", "job.replan:1:exit", 1);
  const absl::Status opened = job.TryOpen();
  unsetenv("OFFLOADD_FAULT_POINT");
  ASSERT_TRUE(opened.ok()) << opened;
  uint64_t steps = 0;
  for (; job.NumberedStep().ok(); ++steps) ASSERT_LT(steps, 30u) << "nothing was replanned";
  EXPECT_GE(steps, 1u) << "two judgements";
  job.Leave();
  Job after(pool_, "job", variant);
  after.SkipTo(steps);
  ASSERT_NO_FATAL_FAILURE(after.Open());
  EXPECT_EQ(after.info().step, steps);
  ASSERT_NO_FATAL_FAILURE(after.ExpectEqual());
  after.Step();
  ASSERT_NO_FATAL_FAILURE(after.ExpectEqual());
  after.Close();
}

TEST_F(SpineTest, SnapshotInsideAnIntervalNamesTheStepThatItFinds) {
  Job job(pool_, "job",
          {.dtype = Dtype::kFloat32,
           .state_resident = 1,
           .durability = "checkpoint:1000",
           .generations = 1});
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

// Whichever call it is that meets the end, and whether the daemon still answers it or has gone.
TEST_F(SpineTest, WhoAsksATerminatedDaemonIsToldThatItEnds) {
  for (int round = 0; round < 10; ++round) {
    Job job(pool_, absl::StrCat("job", round), {.dtype = Dtype::kFloat32});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    job.Step();
    ASSERT_EQ(kill(job.session().daemon_pid(), SIGTERM), 0);
    absl::Status status;
    for (uint32_t i = 0; status.ok(); ++i) {
      const auto tensor = static_cast<uint32_t>(i % job.catalogue().tensors.size());
      status = job.session().Acquire(tensor).status();
      if (status.ok()) job.session().Release(tensor);
      if (status.ok()) status = job.session().WaitDurable().status();
    }
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kDaemonLost) << status;
    EXPECT_EQ(ErrorIdOf(job.session().WaitDurable().status()), ErrorId::kDaemonLost);
    job.Leave();
  }
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

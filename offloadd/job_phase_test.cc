#include "offloadd/job_phase.h"

#include <set>
#include <string>

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

std::set<JobPhase> AllowedPhases(JobCall call) {
  std::set<JobPhase> allowed;
  for (int i = 0; i < kJobPhases; ++i) {
    const auto phase = static_cast<JobPhase>(i);
    if (CheckAllowed(call, phase).ok()) allowed.insert(phase);
  }
  return allowed;
}

std::string Refusal(JobCall call, JobPhase phase) {
  const absl::Status status = CheckAllowed(call, phase);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kProtocol) << status;
  return std::string(status.message());
}

void ExpectSaid(JobCall call, JobPhase phase, const std::string& text) {
  EXPECT_NE(Refusal(call, phase).find(text), std::string::npos) << Refusal(call, phase);
}

TEST(JobPhaseTest, EveryCallHasItsPhases) {
  using enum JobPhase;
  const std::set<JobPhase> living = {kOpen, kSealing, kSealed, kPublishing, kTraining};
  const std::set<JobPhase> sealed = {kSealed, kPublishing, kTraining};
  EXPECT_EQ(AllowedPhases(JobCall::kMap), living);
  EXPECT_EQ(AllowedPhases(JobCall::kDeclareTensors), std::set{kOpen});
  EXPECT_EQ(AllowedPhases(JobCall::kReserveScratch), living);
  EXPECT_EQ(AllowedPhases(JobCall::kSeal), std::set{kOpen});
  EXPECT_EQ(AllowedPhases(JobCall::kPublish), (std::set{kSealed, kTraining}));
  EXPECT_EQ(AllowedPhases(JobCall::kEndLoad), std::set{kTraining});
  EXPECT_EQ(AllowedPhases(JobCall::kSetSchedule), sealed);
  EXPECT_EQ(AllowedPhases(JobCall::kSetSquareRoots), living);
  EXPECT_EQ(AllowedPhases(JobCall::kBeginStep), std::set{kTraining});
  EXPECT_EQ(AllowedPhases(JobCall::kStep), std::set{kTraining});
  EXPECT_EQ(AllowedPhases(JobCall::kWaitDurable), std::set{kTraining});
  EXPECT_EQ(AllowedPhases(JobCall::kCheckpoint), std::set{kTraining});
  EXPECT_EQ(AllowedPhases(JobCall::kExchange), living);
}

TEST(JobPhaseTest, ARefusalNamesTheCallThatIsMissingOrCameBefore) {
  ExpectSaid(JobCall::kDeclareTensors, JobPhase::kOpening, "DeclareTensors before OpenJob");
  ExpectSaid(JobCall::kDeclareTensors, JobPhase::kSealed, "DeclareTensors after Seal");
  ExpectSaid(JobCall::kSeal, JobPhase::kSealing, "Seal for the second time");
  ExpectSaid(JobCall::kSeal, JobPhase::kTraining, "Seal for the second time");
  ExpectSaid(JobCall::kPublish, JobPhase::kOpen, "Publish before Seal");
  ExpectSaid(JobCall::kPublish, JobPhase::kPublishing, "Publish for the second time");
  ExpectSaid(JobCall::kStep, JobPhase::kOpen, "Step before Publish");
  ExpectSaid(JobCall::kStep, JobPhase::kPublishing, "Step before Publish");
  ExpectSaid(JobCall::kSetSchedule, JobPhase::kSealing, "SetSchedule before Seal");
}

TEST(JobPhaseTest, NothingIsAllowedOnceAJobIsClosing) {
  for (int i = 0; i < kJobCalls; ++i) {
    for (const JobPhase phase : {JobPhase::kClosing, JobPhase::kDrained})
      ExpectSaid(static_cast<JobCall>(i), phase, "after CloseJob");
  }
}

TEST(JobPhaseTest, AJobClosesFromAnywhereOnceAndNothingComesAfterItsEnd) {
  for (int i = 0; i < kJobPhases; ++i) {
    const auto phase = static_cast<JobPhase>(i);
    EXPECT_EQ(CanFollow(phase, JobPhase::kClosing), !IsClosing(phase)) << NameOf(phase);
    EXPECT_FALSE(CanFollow(JobPhase::kDrained, phase)) << NameOf(phase);
    EXPECT_EQ(CanFollow(phase, JobPhase::kDrained), phase == JobPhase::kClosing) << NameOf(phase);
    EXPECT_FALSE(CanFollow(phase, JobPhase::kOpening)) << NameOf(phase);
  }
}

TEST(JobPhaseTest, ANewJobIsSealedPublishedAndTrainedAndAnOldOneTrainsOnceItIsSealed) {
  using enum JobPhase;
  for (const auto& [from, to] : {std::pair{kOpening, kOpen}, std::pair{kOpen, kSealing},
                                 std::pair{kSealing, kSealed}, std::pair{kSealed, kPublishing},
                                 std::pair{kPublishing, kTraining}, std::pair{kSealing, kTraining},
                                 std::pair{kSealing, kOpen}, std::pair{kPublishing, kSealed}}) {
    EXPECT_TRUE(CanFollow(from, to)) << NameOf(from) << " to " << NameOf(to);
  }
  for (const auto& [from, to] : {std::pair{kOpen, kSealed}, std::pair{kSealed, kTraining},
                                 std::pair{kTraining, kSealed}, std::pair{kOpening, kSealing}}) {
    EXPECT_FALSE(CanFollow(from, to)) << NameOf(from) << " to " << NameOf(to);
  }
}

}  // namespace
}  // namespace offload::daemon

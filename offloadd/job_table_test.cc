#include "offloadd/job_table.h"

#include <functional>
#include <utility>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

class JobTableTest : public testing::Test {
 protected:
  // What is taken by who asks for it.
  JobTable::Claim Take(const std::string& store, const std::string& run_id = "", uid_t user = 1000,
                       pid_t pid = 1) {
    auto claim =
        table_.Take({.user = user, .name = "job", .store = store, .run_id = run_id, .pid = pid});
    EXPECT_TRUE(claim.ok()) << claim.status();
    return *std::move(claim);
  }
  static void Drain(Job& job) {
    const auto drained =
        job.loop().Call<absl::Status>([&job](std::function<void(absl::Status)> answer) {
          job.Shutdown([answer = std::move(answer)] { answer(absl::OkStatus()); });
        });
    ASSERT_TRUE(drained.ok()) << drained;
  }

  JobTable table_;
};

TEST_F(JobTableTest, AJobIsItsMakersAndNobodyElses) {
  const JobTable::Claim first = Take("pool/job");
  EXPECT_TRUE(first.is_ours);
  EXPECT_EQ(table_.Find("pool/job"), first.job);
  EXPECT_EQ(table_.Find("pool/other"), nullptr);
  const JobTable::Claim second = Take("pool/job", "", 1000, 2);
  EXPECT_FALSE(second.is_ours);
  EXPECT_EQ(second.job->identity().pid, 1);
  EXPECT_TRUE(Take("pool/other").is_ours);
}

TEST_F(JobTableTest, RanksOfOneLaunchShareAJob) {
  const JobTable::Claim first = Take("pool/job", "launch.0");
  const JobTable::Claim second = Take("pool/job", "launch.0");
  EXPECT_TRUE(first.is_ours && second.is_ours);
  EXPECT_EQ(first.job, second.job);
}

TEST_F(JobTableTest, ALaunchDoesNotJoinTheJobOfAnotherOneOrOfAnotherUser) {
  const JobTable::Claim first = Take("pool/job", "launch.0");
  EXPECT_FALSE(Take("pool/job", "launch.1").is_ours);
  EXPECT_FALSE(Take("pool/job", "launch.0", 1001).is_ours);
  EXPECT_FALSE(Take("pool/job").is_ours);
}

TEST_F(JobTableTest, AJobThatIsLeavingDoesNotCountAlsoWhileItIsKept) {
  const JobTable::Claim first = Take("pool/job");
  Drain(*first.job);
  EXPECT_EQ(table_.Find("pool/job"), nullptr);
  EXPECT_EQ(table_.All().size(), 1u) << "it is still there";
  const JobTable::Claim second = Take("pool/job");
  EXPECT_TRUE(second.is_ours);
  EXPECT_NE(second.job, first.job);
  EXPECT_EQ(table_.Find("pool/job"), second.job);
}

TEST_F(JobTableTest, TheTableKeepsNoJobAlive) {
  std::weak_ptr<Job> job = Take("pool/job").job;
  EXPECT_TRUE(job.expired());
  EXPECT_TRUE(table_.All().empty());
  EXPECT_TRUE(Take("pool/job").is_ours);
}

}  // namespace
}  // namespace offload::daemon

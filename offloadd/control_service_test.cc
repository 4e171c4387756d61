// What the service answers to tools, whatever state its sessions are in. tests/border_test.cc asks
// it what ranks ask.

#include "offloadd/control_service.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>

#include "base/error.h"
#include "gtest/gtest.h"
#include "offloadd/session_fixture.h"
#include "proto/grpc_status.h"

namespace offload::daemon {
namespace {

namespace v1 = proto::v1;

class ControlServiceTest : public testing::Test {
 protected:
  ControlServiceTest() { std::filesystem::create_directories(pool_); }
  ~ControlServiceTest() override { std::filesystem::remove_all(pool_); }

  // A job that nobody has opened yet.
  std::shared_ptr<Job> Take(const std::string& name) {
    const std::string store = std::filesystem::canonical(pool_).string() + "/" + name;
    auto claim = jobs_.Take({.name = name, .store = store, .pid = getpid()});
    EXPECT_TRUE(claim.ok() && claim->is_ours) << claim.status();
    return claim->job;
  }
  // Between the two the job's loop does nothing but wait.
  void Halt(Job& job) {
    std::promise<void> halted;
    std::shared_future<void> go = go_.get_future().share();
    ASSERT_TRUE(job.loop().Post([&halted, go] {
      halted.set_value();
      go.wait();
    }));
    halted.get_future().wait();
  }
  void Go() { go_.set_value(); }
  v1::StatusReply Status() {
    v1::StatusReply reply;
    const v1::StatusRequest request;
    EXPECT_TRUE(service_.Status(nullptr, &request, &reply).ok());
    return reply;
  }
  static absl::Status ListJobs(ControlService& service, const std::string& pool,
                               v1::ListJobsReply* reply) {
    v1::ListJobsRequest request;
    request.set_pool(pool);
    return proto::FromGrpc(service.ListJobs(nullptr, &request, reply));
  }
  static absl::Status RemoveJob(ControlService& service, const std::string& pool,
                                const std::string& job) {
    v1::RemoveJobRequest request;
    request.set_pool(pool);
    request.set_job(job);
    v1::Empty reply;
    return proto::FromGrpc(service.RemoveJob(nullptr, &request, &reply));
  }
  // Without anybody who reads progress: only for calls that fail before there is any.
  static absl::Status CreateSnapshot(ControlService& service, const std::string& pool) {
    v1::CreateSnapshotRequest request;
    request.set_pool(pool);
    request.set_job("job");
    request.set_name("kept");
    return proto::FromGrpc(service.CreateSnapshot(nullptr, &request, nullptr));
  }
  static absl::Status DeleteSnapshot(ControlService& service, const std::string& pool) {
    v1::DeleteSnapshotRequest request;
    request.set_pool(pool);
    request.set_job("job");
    request.set_name("kept");
    v1::Empty reply;
    return proto::FromGrpc(service.DeleteSnapshot(nullptr, &request, &reply));
  }

  const std::string pool_ = testing::TempDir() + "/control_service_" + std::to_string(getpid());
  std::promise<void> go_;
  JobTable jobs_;
  SessionTable sessions_;
  ControlService service_{&sessions_,
                          &jobs_,
                          {.allowed = {pool_}},
                          /*serves_tools=*/true,
                          /*is_private=*/false};
};

TEST_F(ControlServiceTest, TheSocketOfOtherUsersAnswersNoTool) {
  ControlService for_others(&sessions_, &jobs_, {.allowed = {pool_}}, /*serves_tools=*/false,
                            /*is_private=*/false);
  const v1::StatusRequest request;
  v1::StatusReply status;
  v1::ListJobsReply jobs;
  for (const absl::Status& answer :
       {proto::FromGrpc(for_others.Status(nullptr, &request, &status)),
        ListJobs(for_others, pool_, &jobs), RemoveJob(for_others, pool_, "job"),
        CreateSnapshot(for_others, pool_), DeleteSnapshot(for_others, pool_)}) {
    EXPECT_EQ(ErrorIdOf(answer), ErrorId::kRefused) << answer;
  }
}

TEST_F(ControlServiceTest, PoolsThatAreNotTheDaemonsOrNoneAreRefusedByEveryCall) {
  v1::ListJobsReply jobs;
  for (const absl::Status& answer :
       {ListJobs(service_, "/tmp", &jobs), RemoveJob(service_, "/tmp", "job"),
        CreateSnapshot(service_, "/tmp"), DeleteSnapshot(service_, "/tmp")}) {
    EXPECT_EQ(ErrorIdOf(answer), ErrorId::kRefused) << answer;
  }
  ControlService anywhere(&sessions_, &jobs_, {}, /*serves_tools=*/true,
                          /*is_private=*/false);
  const std::string twice = pool_ + "," + pool_;
  EXPECT_EQ(ErrorIdOf(CreateSnapshot(service_, twice)), ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf(CreateSnapshot(anywhere, twice)), ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf(DeleteSnapshot(anywhere, "")), ErrorId::kBadValue);
  EXPECT_FALSE(ListJobs(anywhere, pool_ + "/missing", &jobs).ok());
}

TEST_F(ControlServiceTest, ADamagedStoreIsListedWithItsDamage) {
  std::ofstream(pool_ + "/broken.offload") << "no store";
  v1::ListJobsReply jobs;
  ASSERT_TRUE(ListJobs(service_, pool_, &jobs).ok());
  ASSERT_EQ(jobs.jobs_size(), 1);
  EXPECT_EQ(jobs.jobs(0).job(), "broken");
  EXPECT_FALSE(jobs.jobs(0).damage().empty());
}

TEST_F(ControlServiceTest, AJobThatIsNotThereCannotBeRemoved) {
  EXPECT_FALSE(RemoveJob(service_, pool_, "job").ok());
  EXPECT_EQ(ErrorIdOf(RemoveJob(service_, pool_, "../job")), ErrorId::kBadValue);
}

TEST_F(ControlServiceTest, StatusAsksAllJobsAndWaitsForThoseThatAreBusyTogether) {
  const std::shared_ptr<Job> busy = Take("busy"), opening = Take("opening"), drained = Take("over");
  Halt(*busy);
  std::promise<void> over;
  drained->loop().Post([&] { drained->Shutdown([&over] { over.set_value(); }); });
  over.get_future().wait();
  const v1::StatusReply reply = Status();
  Go();
  EXPECT_EQ(reply.pid(), static_cast<uint32_t>(getpid()));
  ASSERT_EQ(reply.jobs_size(), 2) << "not the one that has drained";
  EXPECT_EQ(reply.jobs(0).job(), "busy");
  EXPECT_EQ(reply.jobs(0).phase(), "busy");
  EXPECT_EQ(reply.jobs(0).client_pid(), static_cast<uint32_t>(getpid()));
  EXPECT_EQ(reply.jobs(1).job(), "opening");
  EXPECT_EQ(reply.jobs(1).phase(), "opening");
}

TEST_F(ControlServiceTest, SnapshotsAreOfJobsThatAreOpenHere) {
  EXPECT_EQ(ErrorIdOf(CreateSnapshot(service_, pool_)), ErrorId::kSnapshot);
  EXPECT_EQ(ErrorIdOf(DeleteSnapshot(service_, pool_)), ErrorId::kSnapshot);
}

TEST_F(ControlServiceTest, ASnapshotOfAJobThatIsJustBeingOpenedIsRefused) {
  const std::shared_ptr<Job> job = Take("job");
  EXPECT_EQ(ErrorIdOf(DeleteSnapshot(service_, pool_)), ErrorId::kSnapshot);
  Halt(*job);
  std::future<absl::Status> created =
      std::async(std::launch::async, [&] { return CreateSnapshot(service_, pool_); });
  // Longer than it waits for progress, which is none yet.
  EXPECT_EQ(created.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  Go();
  EXPECT_EQ(ErrorIdOf(created.get()), ErrorId::kSnapshot);
}

}  // namespace
}  // namespace offload::daemon

// The daemon of a node, which several jobs share, and how it ends.

#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/grpc_status.h"
#include "tests/node_daemon.h"
#include "tests/rank_calls.h"
#include "tests/raw_rank.h"
#include "tests/spine_fixture.h"

namespace offload {
namespace {

class NodeDaemonTest : public SpineFixture {
 protected:
  // A job of the node's daemon whose step cannot end, since a weight is used for ever.
  static void BeginEndlessStep(Job& job) {
    ASSERT_NO_FATAL_FAILURE(job.Open());
    ASSERT_TRUE(job.session().Acquire(0).ok());
    job.Step();
  }
};

TEST_F(NodeDaemonTest, NodeDaemonServesTwoJobsAndRefusesASecondRunOfOne) {
  NodeDaemon node;
  Job first(pool_, "first", {.dtype = Dtype::kFloat32});
  Job second(pool_, "second", {.dtype = Dtype::kBFloat16, .spill = true});
  for (Job* job : {&first, &second}) {
    job->UseNodeDaemon();
    ASSERT_NO_FATAL_FAILURE(job->Open());
    EXPECT_FALSE(job->session().daemon_is_private());
  }
  EXPECT_EQ(first.session().daemon_pid(), second.session().daemon_pid());
  for (int step = 0; step < 2; ++step) {
    for (Job* job : {&first, &second}) {
      ASSERT_NO_FATAL_FAILURE(job->Step());
      ASSERT_NO_FATAL_FAILURE(job->Forward());
    }
  }
  {
    auto session = client::Session::Connect({.allow_private = false});
    ASSERT_TRUE(session.ok()) << session.status();
    // The folder by another name is the same folder.
    const auto info =
        (*session)->OpenJob({.job = "first", .pool = pool_ + "/.", .ram_bytes = kRamBytes});
    EXPECT_EQ(ErrorIdOf(info.status()), ErrorId::kStoreLocked) << info.status();
    EXPECT_NE(info.status().message().find(absl::StrCat("process ", getpid())),
              absl::string_view::npos)
        << info.status();
  }
  // A run that follows at once finds the job free, however the one before ended.
  first.Leave();
  second.Close();
  for (Job* job : {&first, &second}) {
    ASSERT_NO_FATAL_FAILURE(job->Open());
    EXPECT_EQ(job->info().step, 2u);
    ASSERT_NO_FATAL_FAILURE(job->ExpectEqual());
    job->Close();
  }
  EXPECT_EQ(node.Terminate(), 0);
}

TEST_F(NodeDaemonTest, StoppedRankCannotKeepATerminatedDaemonAlive) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  job.UseNodeDaemon();
  {
    NodeDaemon node({"--drain-timeout", "0.2"});
    ASSERT_NO_FATAL_FAILURE(BeginEndlessStep(job));
    EXPECT_EQ(node.Terminate(), 1);
    EXPECT_EQ(ErrorIdOf(job.session().WaitDurable().status()), ErrorId::kDaemonLost);
    job.Leave();
  }
  NodeDaemon node;
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 0u);
  job.ReturnToStep(0);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
  EXPECT_EQ(node.Terminate(), 0);
}

TEST_F(NodeDaemonTest, WhileItDrainsItRefusesRanksAndASecondSignalEndsItAtOnce) {
  NodeDaemon node;
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  job.UseNodeDaemon();
  ASSERT_NO_FATAL_FAILURE(BeginEndlessStep(job));
  node.Signal();
  absl::Status status;
  while (status.ok()) status = client::Session::Connect({.allow_private = false}).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kDaemonLost) << status;
  EXPECT_NE(status.message().find("shutting down"), absl::string_view::npos) << status;
  EXPECT_EQ(node.Terminate(), 1);
  job.Leave();
}

// Its session ends before those that have something to bring to an end, and its token with it.
TEST_F(NodeDaemonTest, WhoAsksWhileItDrainsIsToldThatItEnds) {
  NodeDaemon node;
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  job.UseNodeDaemon();
  ASSERT_NO_FATAL_FAILURE(BeginEndlessStep(job));
  auto rank = tests::RawRank::Greet(node.socket_path());
  ASSERT_TRUE(rank.ok()) << rank.status();
  node.Signal();
  while (rank->IsAlive()) usleep(1000);
  for (int i = 0; i < 50; ++i) {
    for (const auto call : {tests::WaitDurable, tests::CloseJob}) {
      grpc::ClientContext context;
      proto::AddToken(context, rank->token());
      const absl::Status status = call(rank->stub(), context);
      ASSERT_EQ(ErrorIdOf(status), ErrorId::kDaemonLost) << status;
      ASSERT_NE(status.message().find("SIGTERM"), absl::string_view::npos) << status;
    }
    usleep(1000);
  }
  EXPECT_EQ(node.Terminate(), 1);
  job.Leave();
}

TEST_F(NodeDaemonTest, PrivateDaemonServesNobodyButTheProcessThatStartedIt) {
  NodeDaemon daemon({"--private", "--parent-pid", "1"});
  const auto session = client::Session::Connect({.allow_private = false});
  EXPECT_EQ(ErrorIdOf(session.status()), ErrorId::kRefused) << session.status();
}

}  // namespace
}  // namespace offload

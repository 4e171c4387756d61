#include "offloadd/session.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <future>

#include "base/error.h"
#include "base/failing_call.h"
#include "gtest/gtest.h"
#include "offloadd/session_fixture.h"

namespace offload::daemon {
namespace {

// What the daemon says before it closes.
absl::Status Refusal(const SessionFixture& session) {
  pollfd watched{.fd = session.rank(), .events = POLLIN};
  EXPECT_EQ(poll(&watched, 1, 30'000), 1);
  return proto::ReasonOfEnd(session.rank());
}

void ExpectError(const absl::Status& status, ErrorId id, const std::string& text) {
  EXPECT_EQ(ErrorIdOf(status), id) << status;
  EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
}

// ---- The handshake -----------------------------------------------------------------------------

TEST(SessionTest, ASecondHelloEndsTheSession) {
  SessionFixture session;
  session.Start();
  EXPECT_TRUE(proto::Greet(session.rank()).ok());
  ExpectError(proto::Greet(session.rank()).status(), ErrorId::kProtocol, "second time");
  session.WaitForEnd();
}

TEST(SessionTest, MemoryIsThereOnlyAfterOpenJob) {
  SessionFixture session;
  session.Start();
  ExpectError(proto::RequestMemory(session.rank(), session->token()).status(), ErrorId::kProtocol,
              "Map before OpenJob");
  session.WaitForEnd();
}

TEST(SessionTest, MemoryIsForTheSessionsOwnTokenOnly) {
  SessionFixture session;
  session.Start();
  ExpectError(proto::RequestMemory(session.rank(), proto::Token{}).status(), ErrorId::kRefused,
              "token");
  session.WaitForEnd();
}

TEST(SessionTest, MappedBeforeMemoryEndsTheSession) {
  SessionFixture session;
  session.Start();
  ExpectError(proto::ConfirmMapped(session.rank()), ErrorId::kProtocol, "Mapped before Memory");
  session.WaitForEnd();
}

TEST(SessionTest, ARankThatSaysNothingIsToldAndLeft) {
  SessionFixture session({.id = 1, .handshake_timeout_seconds = 0.01});
  session.Start();
  ExpectError(Refusal(session), ErrorId::kRefused, "no handshake message");
  session.WaitForEnd();
}

TEST(SessionTest, ARankThatClosesBeforeItsWelcomeEndsItsSession) {
  SessionFixture session;
  proto::HelloMessage hello;
  ASSERT_EQ(send(session.rank(), &hello, sizeof(hello), 0), ssize_t{sizeof(hello)});
  session.LeaveRank();
  session.Start();
  session.WaitForEnd();
}

TEST(SessionTest, ARankWhoseProcessEndsIsGoneThoughItsSocketIsOpen) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  SessionFixture session({.id = 1}, [child](proto::Peer& peer) {
    peer.pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
  });
  EXPECT_FALSE(session->IsLeaving());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(session->IsLeaving());
  session.Start();
  session.WaitForEnd();
}

TEST(SessionTest, WithoutTokenOrDescriptorsThereIsNoSession) {
  for (const char* call : {"getrandom", "epoll_create1", "eventfd", "epoll_ctl"}) {
    const FailingCall failing(call, EMFILE);
    const auto session = Session::Create(UniqueFd(), {}, {}, [](uint64_t) {});
    EXPECT_FALSE(session.ok()) << call;
    EXPECT_EQ(failing.failures(), 1) << call;
  }
}

TEST(SessionTest, OneThatNeverStartsEndsWithoutAThread) {
  const SessionFixture session;
  EXPECT_EQ(session->client_pid(), getpid());
}

// ---- Calls -------------------------------------------------------------------------------------

TEST(SessionTest, MoreCallsThanTheLimitAreRefusedUntilOneEnds) {
  const SessionFixture session;
  for (int i = 0; i < kLimits.calls_per_session_max; ++i) EXPECT_TRUE(session->BeginCall());
  EXPECT_FALSE(session->BeginCall());
  EXPECT_FALSE(session->BeginCall());
  session->EndCall();
  EXPECT_TRUE(session->BeginCall());
}

TEST(SessionTest, MoreStreamMemoryThanTheLimitIsRefusedUntilSomeIsReturned) {
  const SessionFixture session;
  EXPECT_TRUE(session->TakeStreamMemory(kLimits.stream_bytes_max - 10));
  EXPECT_FALSE(session->TakeStreamMemory(11));
  EXPECT_TRUE(session->TakeStreamMemory(10));
  session->ReturnStreamMemory(kLimits.stream_bytes_max);
  EXPECT_TRUE(session->TakeStreamMemory(kLimits.stream_bytes_max));
}

TEST(SessionTest, JobsOfOtherUsersCarryTheirNumber) {
  EXPECT_EQ(SessionFixture()->StoredName("job"), "job");
  const SessionFixture other({.id = 1}, [](proto::Peer& peer) { peer.uid = geteuid() + 4711; });
  EXPECT_EQ(other->StoredName("job"), "u" + std::to_string(geteuid() + 4711) + ".job");
  EXPECT_EQ(other->StoredName("../job"), "../job") << "a bad name stays one";
}

// ---- The end -----------------------------------------------------------------------------------

TEST(SessionTest, ASessionWithoutJobEndsAtOnceHoweverOftenItIsTold) {
  SessionFixture session;
  session.Start();
  session.Halt();
  session->Shutdown();
  session->Shutdown();
  EXPECT_TRUE(session->IsLeaving());
  session.Go();
  session.WaitForEnd();
}

std::shared_ptr<Job> MakeJob() {
  auto job = Job::Create({.name = "job", .store = "pool/job"});
  EXPECT_TRUE(job.ok()) << job.status();
  return *std::move(job);
}

TEST(SessionTest, AnEndingSessionJoinsNoJob) {
  SessionFixture session;
  session.Start();
  session->Shutdown();
  EXPECT_EQ(ErrorIdOf(session->JoinJob(MakeJob())), ErrorId::kDaemonLost);
  EXPECT_EQ(session->job(), nullptr);
}

TEST(SessionTest, ASessionBelongsToOneJobUntilThatCouldNotBeOpened) {
  const SessionFixture session;
  const std::shared_ptr<Job> job = MakeJob();
  ASSERT_TRUE(session->JoinJob(job).ok());
  EXPECT_EQ(ErrorIdOf(session->JoinJob(MakeJob())), ErrorId::kProtocol);
  EXPECT_EQ(session->job(), job);
  session->DropJob();
  EXPECT_TRUE(session->JoinJob(MakeJob()).ok());
}

TEST(SessionTest, ASessionDrainsItsJobBeforeItEnds) {
  SessionFixture session;
  const std::shared_ptr<Job> job = MakeJob();
  ASSERT_TRUE(session->JoinJob(job).ok());
  session.Start();
  session->Shutdown();
  session.WaitForEnd();
  EXPECT_EQ(job->phase(), JobPhase::kDrained);
  EXPECT_TRUE(job->IsLeaving());
}

// Its job has let nobody in for it: there is nothing to wait for.
TEST(SessionTest, ARankThatIsGoneBeforeItsJobLetItInLeavesTheJobAsItIs) {
  SessionFixture session;
  const std::shared_ptr<Job> job = MakeJob();
  ASSERT_TRUE(session->JoinJob(job).ok());
  session.Start();
  session.LeaveRank();
  session.WaitForEnd();
  EXPECT_EQ(job->phase(), JobPhase::kOpening);
}

}  // namespace
}  // namespace offload::daemon

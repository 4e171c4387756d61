// What the daemon answers to ranks that call it without right, out of order, beyond its limits, or
// that leave in the middle of a call.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/failing_call.h"
#include "base/unique_fd.h"
#include "kernels/square_root.h"
#include "offloadd/limits.h"
#include "proto/ring.h"
#include "tests/in_process_daemon.h"
#include "tests/rank_calls.h"
#include "tests/raw_rank.h"

namespace {

std::atomic<bool> daemon_ends_behind_a_rename{false};

}  // namespace

// That of the C library, behind which the daemon of this process may be told to end.
extern "C" int renameat2(int from, const char* old_name, int to, const char* new_name,
                         unsigned flags) noexcept {
  using Function = int(int, const char*, int, const char*, unsigned);
  static auto* const next = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, "renameat2"));
  const int result = next(from, old_name, to, new_name, flags);
  if (daemon_ends_behind_a_rename.exchange(false)) {
    kill(getpid(), SIGTERM);
    usleep(300'000);  // until its jobs know
  }
  return result;
}

namespace offload::tests {
namespace {

using daemon::kLimits;

[[maybe_unused]] const bool termination_is_blocked = BlockTermination();

using AnyCall = std::function<absl::Status(Stub&, grpc::ClientContext&)>;

// Those that need an open job.
const std::pair<const char*, AnyCall> kJobCalls[] = {
    {"DeclareTensors", [](auto& stub, auto& context) { return DeclareTensors(stub, context, {}); }},
    {"ReserveScratch", [](auto& stub, auto& context) { return ReserveScratch(stub, context, 0); }},
    {"Seal", [](auto& stub, auto& context) { return Seal(stub, context, {}); }},
    {"Publish", [](auto& stub, auto& context) { return Publish(stub, context, ""); }},
    {"SetSchedule", [](auto& stub, auto& context) { return SetSchedule(stub, context, {}); }},
    {"Step", [](auto& stub, auto& context) { return Step(stub, context, {}); }},
    {"WaitDurable", [](auto& stub, auto& context) { return WaitDurable(stub, context); }},
    {"Checkpoint", [](auto& stub, auto& context) { return Checkpoint(stub, context); }},
    {"EndLoad", [](auto& stub, auto& context) { return EndLoad(stub, context); }},
    {"ExplainFailure",
     [](auto& stub, auto& context) { return ExplainFailure(stub, context, 1).status(); }},
    {"SetSquareRoots", [](auto& stub, auto& context) { return SetSquareRoots(stub, context, {}); }},
};

class BorderTest : public InProcessDaemonTest {
 protected:
  BorderTest() { StartDaemon(); }

  RawRank Greeted() const {
    auto rank = RawRank::Greet(socket_);
    EXPECT_TRUE(rank.ok()) << rank.status();
    return *std::move(rank);
  }
  // With an open job, its memory sent.
  RawRank Opened(const std::string& job = "job") const {
    RawRank rank = Greeted();
    const absl::Status status = rank.OpenJob(job, pool_);
    EXPECT_TRUE(status.ok()) << status;
    return rank;
  }
  // As far as steps are possible.
  RawRank Published() const {
    RawRank rank = Opened();
    EXPECT_TRUE(rank.Map().ok());
    EXPECT_TRUE(rank.Seal().ok());
    const absl::Status status =
        Ask(rank, [](auto& stub, auto& context) { return Publish(stub, context, "begin"); });
    EXPECT_TRUE(status.ok()) << status;
    return rank;
  }
  // With the rank's token.
  static absl::Status Ask(RawRank& rank, const AnyCall& call) {
    grpc::ClientContext context;
    proto::AddToken(context, rank.token());
    return call(rank.stub(), context);
  }
  v1::OpenJobRequest GoodRequest() const {
    v1::OpenJobRequest request;
    request.set_job("job");
    request.set_pool(pool_);
    request.set_ram_bytes(RawRank::kRamBytes);
    return request;
  }
  static void ExpectError(const absl::Status& status, ErrorId id, const std::string& text = "") {
    EXPECT_EQ(ErrorIdOf(status), id) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status << " for " << text;
  }
};

// ---- Without right -----------------------------------------------------------------------------

TEST_F(BorderTest, EveryCallWithoutAnAnsweringTokenIsRefused) {
  RawRank rank = Greeted();
  std::vector<std::pair<const char*, AnyCall>> calls(std::begin(kJobCalls), std::end(kJobCalls));
  calls.emplace_back("OpenJob", [this](auto& stub, auto& context) {
    return OpenJob(stub, context, GoodRequest());
  });
  calls.emplace_back("CloseJob", [](auto& stub, auto& context) { return CloseJob(stub, context); });
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    grpc::ClientContext without, forged, twice;
    ExpectError(call(rank.stub(), without), ErrorId::kRefused, "token");
    proto::AddToken(forged, proto::Token{});
    ExpectError(call(rank.stub(), forged), ErrorId::kRefused, "token");
    proto::AddToken(twice, rank.token());
    proto::AddToken(twice, rank.token());
    ExpectError(call(rank.stub(), twice), ErrorId::kRefused, "token");
  }
}

TEST_F(BorderTest, ATokenDiesWithItsSession) {
  RawRank rank = Opened();
  ASSERT_TRUE(Ask(rank, kJobCalls[0].second).ok());
  shutdown(rank.socket(), SHUT_RDWR);
  absl::Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    status = Ask(rank, kJobCalls[0].second);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(ErrorIdOf(status) == ErrorId::kRefused || ErrorIdOf(status) == ErrorId::kSessionEnded)
      << status;
}

// ---- Out of order ------------------------------------------------------------------------------

TEST_F(BorderTest, EveryCallBeforeOpenJobIsRefused) {
  RawRank rank = Greeted();
  for (const auto& [name, call] : kJobCalls) {
    SCOPED_TRACE(name);
    ExpectError(Ask(rank, call), ErrorId::kProtocol, "a call before OpenJob");
  }
  EXPECT_TRUE(Ask(rank, CloseJob).ok()) << "there is nothing to close";
}

TEST_F(BorderTest, ASecondOpenJobIsRefusedAndTheFirstJobStaysTaken) {
  RawRank rank = Opened();
  ExpectError(rank.OpenJob("job", pool_), ErrorId::kProtocol, "second time");
  ExpectError(rank.OpenJob("other", pool_), ErrorId::kProtocol, "second time");
  RawRank second = Greeted();
  ExpectError(second.OpenJob("job", pool_), ErrorId::kStoreLocked, "is in use by process");
  EXPECT_TRUE(second.OpenJob("other", pool_).ok());
}

TEST_F(BorderTest, MemoryIsSentOnce) {
  RawRank rank = Opened();
  ExpectError(proto::RequestMemory(rank.socket(), rank.token()).status(), ErrorId::kProtocol,
              "for the second time");
}

TEST_F(BorderTest, AJobIsSealedAfterItsMemoryIsMappedAndOnce) {
  RawRank rank = Opened();
  ExpectError(rank.Seal(), ErrorId::kProtocol, "before the memory is mapped");
  for (const char* name :
       {"Publish", "SetSchedule", "Step", "WaitDurable", "Checkpoint", "EndLoad"}) {
    for (const auto& [called, call] : kJobCalls) {
      if (std::string(called) == name) ExpectError(Ask(rank, call), ErrorId::kProtocol, name);
    }
  }
}

TEST_F(BorderTest, WhatIsDoneOnceIsRefusedAfterIt) {
  RawRank rank = Opened();
  ASSERT_TRUE(rank.Map().ok());
  ASSERT_TRUE(rank.Seal().ok());
  ExpectError(rank.Seal(), ErrorId::kProtocol, "DeclareTensors after Seal");
  ExpectError(Ask(rank, kJobCalls[2].second), ErrorId::kProtocol, "Seal for the second time");
  ASSERT_TRUE(Ask(rank, CloseJob).ok());
  ExpectError(Ask(rank, kJobCalls[3].second), ErrorId::kProtocol, "Publish");
  ExpectError(Ask(rank, EndLoad), ErrorId::kProtocol, "EndLoad");
}

TEST_F(BorderTest, StepsComeInTheirOrderAndNotTwice) {
  RawRank rank = Published();
  const auto step = [&](uint64_t number) {
    v1::StepRequest message;
    message.set_step(number);
    return Ask(rank, [&](auto& stub, auto& context) { return Step(stub, context, {message}); });
  };
  ExpectError(Ask(rank, kJobCalls[5].second), ErrorId::kProtocol, "a step without messages");
  ExpectError(step(2), ErrorId::kProtocol, "step 2 after step 0");
  EXPECT_TRUE(step(1).ok());
  ExpectError(step(1), ErrorId::kProtocol, "step 1 after step 1");
}

TEST_F(BorderTest, SquareRootsAreOneTableOfItsSize) {
  RawRank rank = Opened();
  const auto say = [&](const std::vector<std::string>& parts) {
    std::vector<v1::SetSquareRootsRequest> messages(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) messages[i].set_part(parts[i]);
    return Ask(rank,
               [&](auto& stub, auto& context) { return SetSquareRoots(stub, context, messages); });
  };
  const std::string half(kernels::SquareRoots::kBytes / 2, '\x11');
  ExpectError(say({}), ErrorId::kProtocol, "of a wrong size");
  ExpectError(say({half}), ErrorId::kProtocol, "of a wrong size");
  ExpectError(say({half, half, half}), ErrorId::kProtocol, "of a wrong size");
  EXPECT_TRUE(say({half, half}).ok());
  EXPECT_TRUE(say({half, half}).ok());
  const std::string other(half.size(), '\x22');
  ExpectError(say({half, other}), ErrorId::kRanksDiffer, "different square roots");
}

TEST_F(BorderTest, ARefusedOpenJobLeavesTheSessionAsItWas) {
  RawRank rank = Greeted();
  const auto expect = [&](ErrorId id, const std::function<void(v1::OpenJobRequest&)>& spoil) {
    v1::OpenJobRequest request = GoodRequest();
    spoil(request);
    ExpectError(
        Ask(rank, [&](auto& stub, auto& context) { return OpenJob(stub, context, request); }), id);
  };
  expect(ErrorId::kRefused, [](auto& request) { request.set_pool("/tmp"); });
  expect(ErrorId::kBadValue, [&](auto& request) { request.set_pool(pool_ + "," + pool_); });
  expect(ErrorId::kBadValue, [](auto& request) { request.set_job("../job"); });
  expect(ErrorId::kBadValue, [](auto& request) { request.set_job(""); });
  expect(ErrorId::kBadValue, [](auto& request) { request.set_io_engine("abacus"); });
  expect(ErrorId::kBadValue, [](auto& request) { request.set_durability("never"); });
  expect(ErrorId::kBadValue, [](auto& request) { request.set_generations(1u << 20); });
  expect(ErrorId::kBadValue,
         [](auto& request) { request.set_ram_bytes(kLimits.ram_bytes_max + 1); });
  expect(ErrorId::kBadValue,
         [](auto& request) { request.set_update_threads(kLimits.update_threads_max + 1); });
  expect(ErrorId::kBudgetTooSmall, [](auto& request) { request.set_ram_bytes(1 << 20); });
  EXPECT_TRUE(rank.OpenJob("job", pool_).ok());
}

// ---- Beyond the limits -------------------------------------------------------------------------

// Bytes of a client become many more in memory: this is what is counted.
template <typename Request>
std::vector<Request> MoreThanAStreamMayTake(const Request& message) {
  const uint64_t bytes = message.SpaceUsedLong();
  return std::vector<Request>(kLimits.stream_bytes_max / bytes + 2, message);
}

TEST_F(BorderTest, StreamsThatTakeTooMuchMemoryAreRefusedAndItIsReturned) {
  RawRank rank = Opened();
  ASSERT_TRUE(rank.Map().ok());  // which may not wait for slow calls
  constexpr int kEntries = 1 << 20;
  v1::DeclareTensorsRequest tensors;
  for (int i = 0; i < kEntries / 2; ++i) tensors.add_tensors();
  v1::SealRequest plan;
  plan.mutable_gradient_offset()->Resize(kEntries, 0);
  v1::SetScheduleRequest schedule;
  schedule.mutable_tensors()->Resize(kEntries, 0);
  v1::StepRequest step;
  step.mutable_update_count()->Resize(kEntries, 0);
  const std::pair<const char*, AnyCall> calls[] = {
      {"DeclareTensors",
       [&](auto& stub, auto& context) {
         return DeclareTensors(stub, context, MoreThanAStreamMayTake(tensors));
       }},
      {"Seal", [&](auto& stub,
                   auto& context) { return Seal(stub, context, MoreThanAStreamMayTake(plan)); }},
      {"SetSchedule",
       [&](auto& stub, auto& context) {
         return SetSchedule(stub, context, MoreThanAStreamMayTake(schedule));
       }},
      {"Step", [&](auto& stub,
                   auto& context) { return Step(stub, context, MoreThanAStreamMayTake(step)); }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    ExpectError(Ask(rank, call), ErrorId::kProtocol, "streams of more than 268435456 bytes");
  }
  EXPECT_TRUE(rank.Seal().ok()) << "the session lives";
}

TEST_F(BorderTest, ACancelledStreamReturnsItsMemory) {
  RawRank rank = Opened();
  ASSERT_TRUE(rank.Map().ok());
  v1::SetScheduleRequest schedule;
  schedule.mutable_tensors()->Resize(1 << 20, 0);
  constexpr int kMessages = 25;  // 4 to 8 MiB each where they are kept: three times are too much
  for (int round = 0; round < 3; ++round) {
    grpc::ClientContext context;
    proto::AddToken(context, rank.token());
    v1::Empty reply;
    const auto writer = rank.stub().SetSchedule(&context, &reply);
    for (int i = 0; i < kMessages && writer->Write(schedule); ++i) continue;
    context.TryCancel();
    EXPECT_FALSE(writer->Finish().ok());
  }
  absl::Status status;
  const std::vector<v1::SetScheduleRequest> most(kMessages, schedule);
  for (int i = 0; i < 100; ++i) {  // until the last one is over
    status = Ask(rank, [&](auto& stub, auto& context) { return SetSchedule(stub, context, most); });
    if (status.message().find("streams of") == absl::string_view::npos) break;
  }
  ExpectError(status, ErrorId::kProtocol, "SetSchedule before Seal");
}

TEST_F(BorderTest, MessagesThatAreTooLargeAreRefused) {
  RawRank rank = Published();
  const std::string state(kLimits.message_bytes_max + 1, 'x');
  EXPECT_TRUE(absl::IsResourceExhausted(
      Ask(rank, [&](auto& stub, auto& context) { return Publish(stub, context, state); })));
}

TEST_F(BorderTest, WhatAJobKeepsForItsTrainerIsBounded) {
  RawRank rank = Opened();
  ASSERT_TRUE(rank.Map().ok());
  ASSERT_TRUE(rank.Seal().ok());
  const std::string state(kLimits.trainer_state_bytes_max + 1, 'x');
  ExpectError(Ask(rank, [&](auto& stub, auto& context) { return Publish(stub, context, state); }),
              ErrorId::kProtocol, "too large");
  ExpectError(Ask(rank,
                  [&](auto& stub, auto& context) {
                    return ReserveScratch(stub, context, kLimits.scratch_bytes_max + 1);
                  }),
              ErrorId::kBadValue, "scratch space");
  v1::SetScheduleRequest part;
  part.mutable_tensors()->Resize(1 << 20, 0);
  std::vector<v1::SetScheduleRequest> schedule(kLimits.schedule_touches_max >> 20, part);
  const auto set_schedule = [&](auto& stub, auto& context) {
    return SetSchedule(stub, context, schedule);
  };
  EXPECT_TRUE(Ask(rank, set_schedule).ok());
  schedule.emplace_back().add_tensors(0);
  ExpectError(Ask(rank, set_schedule), ErrorId::kProtocol, "too long");
  schedule.back().set_first(true);  // forgets what came before
  EXPECT_TRUE(Ask(rank, set_schedule).ok());
  schedule.back().set_tensors(0, 1);
  ExpectError(Ask(rank, set_schedule), ErrorId::kProtocol, "a schedule with tensor 1");
}

TEST_F(BorderTest, APlanWithTooManyBlocksIsRefused) {
  RawRank rank = Opened();
  ASSERT_TRUE(rank.Map().ok());
  v1::SealRequest plan;
  *plan.mutable_optimizer() = RawRank::PlainSgd();
  plan.set_pipeline_blocks(kLimits.pipeline_blocks_max + 1);
  ExpectError(Ask(rank, [&](auto& stub, auto& context) { return Seal(stub, context, {plan}); }),
              ErrorId::kProtocol, "4097 pipeline blocks");
}

TEST_F(BorderTest, TheTextsOfTheLatestFailuresAreKept) {
  RawRank rank = Published();
  ASSERT_TRUE(Ask(rank, CloseJob).ok());  // what comes now fails
  proto::SubmissionProducer ring(rank.entries(), &rank.header()->submission_tail,
                                 &rank.header()->submission_head);
  for (uint64_t tag = 1; tag <= kLimits.failure_texts_max + 1; ++tag) {
    while (ring.Room().value_or(0) == 0) std::this_thread::yield();
    ring.Push(RawRank::GoodEntry(tag));
    ring.Publish();
    rank.RingBell();
    while (rank.header()->completion_tail.load() < tag) std::this_thread::yield();
    rank.header()->completion_head.store(static_cast<uint32_t>(tag));
  }
  const auto text = [&](uint64_t tag) {
    grpc::ClientContext context;
    proto::AddToken(context, rank.token());
    return ExplainFailure(rank.stub(), context, tag).value_or("no answer");
  };
  EXPECT_EQ(text(1), "");
  EXPECT_NE(text(2), "");
  EXPECT_NE(text(kLimits.failure_texts_max + 1), "");
}

TEST_F(BorderTest, AProcessHasSoManySessionsAndNoMore) {
  std::vector<RawRank> ranks;
  for (int i = 0; i < kLimits.sessions_per_process_max; ++i) ranks.push_back(Greeted());
  ExpectError(RawRank::Greet(socket_).status(), ErrorId::kRefused, "as many sessions");
  for (const RawRank& rank : ranks) EXPECT_TRUE(rank.IsAlive());
}

// ---- Who leaves, and what the system does not give ---------------------------------------------

class LockedStoreTest : public BorderTest {
 protected:
  LockedStoreTest() {
    {
      RawRank rank = Published();
      EXPECT_TRUE(Ask(rank, CloseJob).ok());
    }
    lock_.reset(open((pool_ + "/job.offload").c_str(), O_RDWR | O_CLOEXEC));
    EXPECT_EQ(flock(lock_.get(), LOCK_EX), 0);
  }
  // OpenJob, which waits for the lock by now.
  std::future<absl::Status> OpenWaiting(RawRank& rank) const {
    std::future<absl::Status> opened =
        std::async(std::launch::async, [&] { return rank.OpenJob("job", pool_); });
    EXPECT_EQ(opened.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
    return opened;
  }

  UniqueFd lock_;
};

TEST_F(LockedStoreTest, ARankThatLeavesWhileItsStoreIsLockedIsNotWaitedFor) {
  RawRank rank = Greeted();
  std::future<absl::Status> opened = OpenWaiting(rank);
  shutdown(rank.socket(), SHUT_RDWR);
  EXPECT_EQ(opened.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_FALSE(opened.get().ok());
}

TEST_F(LockedStoreTest, ADaemonThatIsToldToEndDoesNotWaitForALock) {
  RawRank rank = Greeted();
  std::future<absl::Status> opened = OpenWaiting(rank);
  StopDaemon();
  EXPECT_FALSE(opened.get().ok());
}

TEST_F(BorderTest, WithoutADoorbellOrASealTheSessionEndsAndSaysWhy) {
  {
    RawRank rank = Greeted();
    const FailingCall failing("socketpair", EMFILE);
    EXPECT_TRUE(absl::IsResourceExhausted(rank.OpenJob("first", pool_)));
    EXPECT_EQ(failing.failures(), 1);
  }
  RawRank rank = Opened("second");
  const FailingCall failing("fcntl", EPERM, {.after = 2});  // the rank asks for two memories' seals
  ExpectError(rank.Map(), ErrorId::kSharedMemory, "F_ADD_SEALS");
}

TEST_F(BorderTest, ARankThatCannotBeAnsweredHasNoJob) {
  RawRank rank = Greeted();
  for (const char* call : {"memfd_create", "ftruncate", "fallocate"}) {
    const int of_the_scratch_file = std::string(call) == "fallocate" ? 1 : 0;
    const FailingCall failing(call, ENOMEM, {.after = of_the_scratch_file});
    ExpectError(rank.OpenJob("job", pool_), ErrorId::kSharedMemory, call);
  }
  EXPECT_TRUE(rank.OpenJob("job", pool_).ok());
}

// What is written over is not what somebody has removed by hand.
TEST_F(BorderTest, AJobThatEndsBehindItsNewLayoutLeavesNothingOfTheOldOne) {
  {
    RawRank rank = Published();
    ASSERT_TRUE(Ask(rank, CloseJob).ok());
  }
  RawRank rank = Opened();
  ASSERT_TRUE(rank.Map().ok());
  daemon_ends_behind_a_rename = true;
  ExpectError(rank.Seal(/*trainable=*/true), ErrorId::kDaemonLost, "SIGTERM");
  ASSERT_FALSE(daemon_ends_behind_a_rename.exchange(false));
  WaitForDaemon();
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(pool_))
    names.push_back(entry.path().filename());
  EXPECT_EQ(names, std::vector<std::string>{"job.offload"});
}

// ---- Tools -------------------------------------------------------------------------------------

TEST_F(BorderTest, ToolsSeeAJobKeepAndForgetItsSnapshotAndRemoveItWhenItIsClosed) {
  const auto tool = Tool();
  v1::RemoveJobRequest remove;
  remove.set_job("job");
  const auto remove_job = [&] {
    grpc::ClientContext context;
    v1::Empty reply;
    return Call(*tool, &Stub::RemoveJob, context, remove, &reply);
  };
  const auto snapshot = [&](const std::string& name, bool may_grow) {
    grpc::ClientContext context;
    v1::CreateSnapshotRequest request;
    request.set_job("job");
    request.set_name(name);
    request.set_may_grow(may_grow);
    const auto reader = tool->CreateSnapshot(&context, request);
    v1::CreateSnapshotProgress progress;
    while (reader->Read(&progress)) continue;
    const absl::Status status = proto::FromGrpc(reader->Finish());
    EXPECT_EQ(progress.done(), status.ok());
    return status;
  };
  {
    RawRank rank = Published();
    grpc::ClientContext status_context, list_context, delete_context;
    v1::StatusReply status;
    ASSERT_TRUE(Call(*tool, &Stub::Status, status_context, v1::StatusRequest(), &status).ok());
    ASSERT_EQ(status.jobs_size(), 1);
    EXPECT_EQ(status.jobs(0).job(), "job");
    v1::ListJobsReply jobs;
    ASSERT_TRUE(Call(*tool, &Stub::ListJobs, list_context, v1::ListJobsRequest(), &jobs).ok());
    ASSERT_EQ(jobs.jobs_size(), 1);
    EXPECT_TRUE(jobs.jobs(0).in_use());
    EXPECT_TRUE(jobs.jobs(0).damage().empty());
    ExpectError(remove_job(), ErrorId::kStoreLocked);
    ExpectError(snapshot("kept", false), ErrorId::kSnapshot, "have to grow");
    EXPECT_TRUE(snapshot("kept", true).ok());
    ExpectError(snapshot("kept", true), ErrorId::kSnapshot, "has a snapshot");
    ExpectError(snapshot("../kept", true), ErrorId::kSnapshot);
    v1::DeleteSnapshotRequest forget;
    forget.set_job("job");
    forget.set_name("kept");
    v1::Empty reply;
    EXPECT_TRUE(Call(*tool, &Stub::DeleteSnapshot, delete_context, forget, &reply).ok());
    ASSERT_TRUE(Ask(rank, CloseJob).ok());
    ExpectError(snapshot("late", true), ErrorId::kSnapshot, "not open");
  }
  absl::Status removed = remove_job();
  for (int i = 0; i < 1000 && !removed.ok(); ++i) {  // until the session has let go
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    removed = remove_job();
  }
  EXPECT_TRUE(removed.ok()) << removed;
}

// What jobs do off their loops is beside the answers; for the thread sanitizer.
TEST_F(BorderTest, ToolsMayAskWhileJobsAreOpenedFormattedAndLaidOutAnew) {
  std::atomic<bool> is_over = false;
  std::thread asks([&] {
    const auto tool = Tool();
    while (!is_over) {
      grpc::ClientContext status_context, report_context;
      v1::StatusReply status;
      EXPECT_TRUE(Call(*tool, &Stub::Status, status_context, v1::StatusRequest(), &status).ok());
      v1::ReportRequest request;
      request.set_job("job");
      const auto reader = tool->Report(&report_context, request);
      v1::ReportPart part;
      while (reader->Read(&part)) continue;
      reader->Finish();  // there may be no such job
    }
  });
  for (int i = 0; i < 4; ++i) {
    {
      RawRank rank = Published();
      EXPECT_TRUE(Ask(rank, [](auto& stub, auto& context) {
                    return ReserveScratch(stub, context, 8 << 20);
                  }).ok());
      EXPECT_TRUE(Ask(rank, CloseJob).ok());
    }
    {
      RawRank rank = Opened();
      EXPECT_TRUE(rank.Map().ok());
      EXPECT_TRUE(rank.Seal(/*trainable=*/true).ok());
      EXPECT_TRUE(Ask(rank, CloseJob).ok());
    }
    for (const auto& entry : std::filesystem::directory_iterator(pool_))
      std::filesystem::remove(entry.path());
  }
  is_over = true;
  asks.join();
}

}  // namespace
}  // namespace offload::tests

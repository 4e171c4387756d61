#include "client/session.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "base/detached_process.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "proto/daemon_rings.h"
#include "proto/doorbell.h"
#include "proto/grpc_status.h"
#include "proto/handshake.h"
#include "proto/offload.grpc.pb.h"
#include "proto/shared_memory.h"

namespace offload::client {
namespace {

namespace v1 = proto::v1;
using proto::RingOperation;
using proto::SubmissionEntry;

constexpr uint64_t kSlabBytes = 1 << 20;
constexpr uint64_t kRegionBytes = proto::kRegionFixedBytes + (1 << 20);
constexpr uint64_t kPinsOffset = proto::kRegionFixedBytes;
constexpr uint64_t kBufferOffset = proto::kRegionFixedBytes + 4096;
constexpr uint64_t kWeights = 8192;  // of tensor 0 in the slab

// A daemon in this process: one session, no store. Tests tell it what to do with submissions.
class FakeDaemon final : public v1::Control::Service {
 public:
  // Returns the completion's value and status, or nothing to leave the operation unanswered.
  using Answer = std::function<std::optional<std::pair<uint64_t, absl::Status>>(
      FakeDaemon&, const SubmissionEntry&)>;

  // Listens in a new directory, or in one that is there.
  explicit FakeDaemon(std::string directory = "") : directory_(std::move(directory)) {
    char name[] = "/tmp/offloadd-test-XXXXXX";
    if (directory_.empty()) directory_ = ::mkdtemp(name);
    auto listener = proto::ListenForRanks(socket_path());
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(proto::ControlAddress(control_path()),
                             grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    auto slab = proto::SharedMemory::Create("slab", kSlabBytes);
    auto region = proto::SharedMemory::Create("region", kRegionBytes);
    EXPECT_TRUE(slab.ok() && region.ok());
    slab_ = *std::move(slab);
    region_ = *std::move(region);
    EXPECT_TRUE(slab_.Allocate(0, kSlabBytes).ok() && region_.Allocate(0, kRegionBytes).ok());
    proto::InitializeSlab(slab_.data());
    proto::InitializeRegion(region_.data());
    EXPECT_TRUE(slab_.SealForWriting().ok());
    catalogue_ =
        *proto::BuildCatalogue({{.name = "a", .shape = {64}}, {.name = "b", .shape = {64}}});
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeDaemon() override {
    Die();
    server_->Shutdown(std::chrono::system_clock::now());
    WaitForSession();
    ::unlink(socket_path().c_str());
    ::unlink(control_path().c_str());
    ::rmdir(directory_.c_str());
  }

  std::string socket_path() const { return directory_ + "/offloadd.sock"; }
  std::string control_path() const { return directory_ + "/control.sock"; }
  // Returns when the one session has ended.
  void WaitForSession() {
    if (thread_.joinable()) thread_.join();
  }
  // Called when the bell was rung, on the thread that serves the rings.
  void SetOnBell(std::function<void(proto::DaemonRings&)> on_bell) {
    absl::MutexLock lock(&mutex_);
    on_bell_ = std::move(on_bell);
  }
  void SetAnswer(Answer answer) {
    absl::MutexLock lock(&mutex_);
    answer_ = std::move(answer);
  }
  // Ends as kill -9 does, without a word, or with a reason.
  void Die(absl::Status reason = absl::OkStatus()) {
    if (dead_.exchange(true)) return;
    {
      absl::MutexLock lock(&mutex_);
      if (!reason.ok()) proto::SendRefusal(session_, reason).IgnoreError();
      if (session_ >= 0) ::shutdown(session_, SHUT_RDWR);
    }
    ::shutdown(listener_.get(), SHUT_RDWR);
  }
  proto::TensorWord& word(uint32_t tensor) {
    return reinterpret_cast<proto::TensorWord*>(slab_.data() + proto::kTensorWordsOffset)[tensor];
  }
  proto::PinWord& pin(uint32_t tensor) {
    return reinterpret_cast<proto::PinWord*>(region_.data() + kPinsOffset)[tensor];
  }
  proto::SlabHeader* slab_header() { return reinterpret_cast<proto::SlabHeader*>(slab_.data()); }
  std::byte* slab() { return slab_.data(); }
  std::byte* region() { return region_.data(); }
  int submissions() const { return submissions_.load(); }
  std::map<uint64_t, std::string> explanations;

 private:
  bool TokenIsRight(const grpc::ServerContext* context) const {
    const auto token = proto::TokenOf(*context);
    return token.has_value() && proto::TokensEqual(*token, token_);
  }
  grpc::Status OpenJob(grpc::ServerContext* context, const v1::OpenJobRequest* request,
                       v1::OpenJobReply* reply) override {
    if (!TokenIsRight(context)) {
      return proto::ToGrpc(MakeError(ErrorId::kRefused, "wrong token"));
    }
    if (request->ram_bytes() == 0) {
      return proto::ToGrpc(MakeError(ErrorId::kBudgetTooSmall, "ram 0"));
    }
    reply->set_exists(true);
    reply->set_step(5);
    reply->set_trainer_state("state");
    reply->set_slab_bytes(kSlabBytes);
    reply->set_region_bytes(kRegionBytes);
    reply->set_io_engine("fake");
    return grpc::Status::OK;
  }
  grpc::Status DeclareTensors(grpc::ServerContext*,
                              grpc::ServerReader<v1::DeclareTensorsRequest>* reader,
                              v1::DeclareTensorsReply* reply) override {
    v1::DeclareTensorsRequest request;
    uint64_t count = 0;
    while (reader->Read(&request)) count += request.tensors_size();
    reply->set_tensor_count(count);
    return grpc::Status::OK;
  }
  grpc::Status Seal(grpc::ServerContext*,
                    grpc::ServerReaderWriter<v1::SealProgress, v1::SealRequest>* stream) override {
    v1::SealRequest request;
    while (stream->Read(&request)) {
    }
    v1::SealProgress progress;
    progress.set_bytes_formatted(50);
    progress.set_bytes_total(100);
    stream->Write(progress);
    progress.set_bytes_formatted(100);
    progress.set_done(true);
    stream->Write(progress);
    return grpc::Status::OK;
  }
  grpc::Status Step(grpc::ServerContext* context, grpc::ServerReader<v1::StepRequest>* reader,
                    v1::StepReply*) override {
    v1::StepRequest request;
    reader->Read(&request);
    if (request.step() ==
        404) {  // the daemon dies, its gRPC socket still open: only a cancelled call ends
      Die();
      while (!context->IsCancelled()) std::this_thread::yield();
      return grpc::Status::CANCELLED;
    }
    return grpc::Status::OK;
  }
  grpc::Status ExplainFailure(grpc::ServerContext*, const v1::ExplainFailureRequest* request,
                              v1::ExplainFailureReply* reply) override {
    absl::MutexLock lock(&mutex_);
    reply->set_text(explanations[request->tag()]);
    return grpc::Status::OK;
  }

  void Serve() {
    pollfd waiting{.fd = listener_.get(), .events = POLLIN};
    ::poll(&waiting, 1, -1);
    auto accepted = proto::AcceptRank(listener_.get());
    if (!accepted.ok() || !accepted->has_value()) return;
    UniqueFd socket = **std::move(accepted);
    {
      absl::MutexLock lock(&mutex_);
      session_ = socket.get();
    }
    auto bells = proto::Doorbell::CreatePair();
    ServeSession(socket.get(), std::move(*bells));
    absl::MutexLock lock(&mutex_);
    session_ = -1;
  }
  void ServeSession(int socket, std::pair<proto::Doorbell, proto::Doorbell> bells) {
    proto::DaemonRings rings(region_.data(), std::move(bells.first));
    rings.submissions().SetLimits(
        {.region_bytes = kRegionBytes, .scratch_bytes = 1 << 20, .catalogue = &catalogue_});
    while (!dead_) {
      auto message = proto::ReceiveFromRank(socket);
      if (!message.ok()) return;
      if (message->has_value()) Reply(socket, **message, bells.second);
      ServeRings(rings);
      if (!rings.PrepareToSleep()) continue;
      pollfd events[] = {{.fd = socket, .events = POLLIN},
                         {.fd = rings.doorbell().fd(), .events = POLLIN}};
      ::poll(events, 2, -1);
      rings.Awake();
      if (events[1].revents == 0) continue;
      rings.doorbell().Drain();
      absl::MutexLock lock(&mutex_);
      if (on_bell_) on_bell_(rings);
    }
  }
  void Reply(int socket, const proto::RankMessage& message, const proto::Doorbell& for_rank) {
    if (std::holds_alternative<proto::HelloMessage>(message)) {
      token_ = *proto::MakeToken();
      EXPECT_TRUE(proto::SendWelcome(socket, 1, token_, control_path()).ok());
    } else if (const auto* map = std::get_if<proto::MapMessage>(&message)) {
      EXPECT_TRUE(proto::TokensEqual(map->token, token_));
      EXPECT_TRUE(
          proto::SendMemory(socket, slab_.fd(), kSlabBytes, region_.fd(), kRegionBytes, for_rank)
              .ok());
    } else {
      EXPECT_TRUE(region_.SealForWriting().ok());
      EXPECT_TRUE(proto::SendReady(socket).ok());
    }
  }
  void ServeRings(proto::DaemonRings& rings) {
    for (;;) {
      const auto next = rings.Next();
      EXPECT_TRUE(next.ok()) << next.status();
      if (!next.ok() || !next->has_value()) break;
      ++submissions_;
      Answer answer;
      {
        absl::MutexLock lock(&mutex_);
        answer = answer_;
      }
      const auto result = answer ? answer(*this, **next) : std::pair(uint64_t{0}, absl::OkStatus());
      if (!result.has_value()) continue;
      if (!result->second.ok()) {
        absl::MutexLock lock(&mutex_);
        explanations[(*next)->tag] = std::string(result->second.message());
      }
      rings.Complete((*next)->tag, result->first, result->second);
    }
    rings.Publish();
  }

  std::string directory_;
  UniqueFd listener_;
  std::unique_ptr<grpc::Server> server_;
  proto::SharedMemory slab_, region_;
  proto::Catalogue catalogue_;
  proto::Token token_{};
  absl::Mutex mutex_;
  Answer answer_;
  std::function<void(proto::DaemonRings&)> on_bell_;
  int session_ = -1;
  std::atomic<bool> dead_{false};
  std::atomic<int> submissions_{0};
  std::thread thread_;
};

class SessionTest : public testing::Test {
 protected:
  SessionTest() {
    ::setenv("OFFLOADD_SOCKET", daemon_.socket_path().c_str(), 1);
    auto session = Session::Connect({});
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }
  // Opens and seals a job of two tensors; tensor 0 is resident.
  void Open() {
    const auto info = session_->OpenJob({.job = "j", .ram_bytes = 1});
    ASSERT_TRUE(info.ok()) << info.status();
    daemon_.word(0) = proto::MakeTensorWord(proto::kResident, kWeights);
    const std::vector<proto::Tensor> tensors = {{.name = "a", .shape = {64}},
                                                {.name = "b", .shape = {64}}};
    ASSERT_TRUE(session_->DeclareTensors(tensors).ok());
    const absl::Status sealed = session_->Seal(kernels::OptimizerSpec(), {}, kPinsOffset, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed;
  }
  absl::Notification asked_;  // outlives the daemon's thread, which may answer late
  FakeDaemon daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(SessionTest, OpeningTellsWhatTheDaemonHas) {
  const auto info = session_->OpenJob({.job = "j", .ram_bytes = 1});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_TRUE(info->exists);
  EXPECT_EQ(info->step, 5u);
  EXPECT_EQ(info->trainer_state, "state");
  EXPECT_EQ(session_->region_bytes(), kRegionBytes);
  EXPECT_EQ(session_->daemon_pid(), ::getpid());
  EXPECT_FALSE(session_->daemon_is_private());
}

TEST_F(SessionTest, ErrorsOfTheDaemonKeepNumberAndText) {
  const auto info = session_->OpenJob({.job = "j", .ram_bytes = 0});
  EXPECT_EQ(info.status(), MakeError(ErrorId::kBudgetTooSmall, "ram 0"));
  EXPECT_TRUE(session_->health().ok());
}

TEST_F(SessionTest, TextsThatTheDaemonCannotReadAreNamed) {
  EXPECT_EQ(session_->OpenJob({.job = "j\xff", .ram_bytes = 1}).status(),
            MakeError(ErrorId::kBadValue, "job is 'j\\xff', which is not UTF-8",
                      "Give it a name in UTF-8"));
  EXPECT_EQ(ErrorIdOf(session_->OpenJob({.job = "j", .pool = "/\xff", .ram_bytes = 1}).status()),
            ErrorId::kPoolMissing);
  EXPECT_TRUE(session_->health().ok());
}

TEST_F(SessionTest, SealReportsProgress) {
  Open();
  std::vector<uint64_t> seen;
  ASSERT_TRUE(session_
                  ->Seal(kernels::OptimizerSpec(), {}, kPinsOffset,
                         [&](uint64_t formatted, uint64_t) { seen.push_back(formatted); })
                  .ok());
  EXPECT_EQ(seen, (std::vector<uint64_t>{50, 100}));
}

TEST_F(SessionTest, AResidentTensorCostsNoMessage) {
  Open();
  const auto bytes = session_->Acquire(0);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  daemon_.slab()[kWeights] = std::byte{9};
  EXPECT_EQ(**bytes, std::byte{9});
  EXPECT_EQ(daemon_.pin(0).load(), 1u);
  ASSERT_TRUE(session_->Acquire(0).ok());
  EXPECT_EQ(daemon_.pin(0).load(), 2u);
  session_->Release(0);
  session_->Release(0);
  EXPECT_EQ(daemon_.pin(0).load(), 0u);
  EXPECT_EQ(daemon_.submissions(), 0);
}

TEST_F(SessionTest, AnAbsentTensorIsAskedForWhileItsPinIsHeld) {
  Open();
  daemon_.SetAnswer([](FakeDaemon& daemon, const SubmissionEntry& entry) {
    EXPECT_EQ(entry.operation, RingOperation::kAcquire);
    EXPECT_EQ(daemon.pin(entry.tensor).load(), 1u);
    const uint64_t word = proto::MakeTensorWord(proto::kResident, 16384);
    daemon.word(entry.tensor) = word;
    return std::optional(std::pair(word, absl::OkStatus()));
  });
  const auto bytes = session_->Acquire(1);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const std::byte* base = reinterpret_cast<const std::byte*>(&session_->slab_header());
  EXPECT_EQ(*bytes - base, 16384);
  EXPECT_EQ(daemon_.submissions(), 1);
  session_->Release(1);
}

TEST_F(SessionTest, AFailedAcquireTellsTheDaemonsTextAndHoldsNoPin) {
  Open();
  const absl::Status failure = MakeError(ErrorId::kWindowExhausted, "3 tensors of 1 GiB");
  daemon_.SetAnswer([&](FakeDaemon&, const SubmissionEntry&) {
    return std::optional(std::pair(uint64_t{0}, failure));
  });
  EXPECT_EQ(session_->Acquire(1).status(), failure);
  EXPECT_EQ(daemon_.pin(1).load(), 0u);
}

// The daemon evicts in three moves (absent, look at the pin, back if it is held) as fast as it can,
// and spoils the bytes of what it evicted. Nobody who holds the tensor may see them spoilt.
TEST_F(SessionTest, EvictionNeverTakesATensorThatSomebodyHolds) {
  Open();
  constexpr uint64_t kResidentWord = proto::MakeTensorWord(proto::kResident, kWeights);
  absl::Mutex residency;  // eviction and loading are one thread in a real daemon
  const std::atomic_ref<std::byte> weights(daemon_.slab()[kWeights]);
  weights = std::byte{1};
  daemon_.SetAnswer([&](FakeDaemon& daemon, const SubmissionEntry&) {
    absl::MutexLock lock(&residency);
    weights = std::byte{1};
    daemon.word(0) = kResidentWord;
    return std::optional(std::pair(kResidentWord, absl::OkStatus()));
  });
  std::atomic<bool> stop{false};
  std::atomic<int> evictions{0};
  std::thread evictor([&] {
    while (!stop) {
      std::this_thread::yield();  // lets the loader have the lock
      absl::MutexLock lock(&residency);
      if (daemon_.word(0) != kResidentWord) continue;
      daemon_.word(0) = proto::kAbsent;
      if (daemon_.pin(0) != 0) {
        daemon_.word(0) = kResidentWord;
      } else {
        weights = std::byte{0};
        ++evictions;
      }
    }
  });
  std::atomic<int> spoilt{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      // However the threads are scheduled, many evictions fall into these rounds.
      while (evictions < 200) {
        const auto bytes = session_->Acquire(0);
        ASSERT_TRUE(bytes.ok()) << bytes.status();
        if (weights != std::byte{1}) ++spoilt;
        session_->Release(0);
        std::this_thread::yield();  // with no pin held
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  evictor.join();
  EXPECT_EQ(spoilt.load(), 0);
  EXPECT_EQ(daemon_.pin(0).load(), 0u);
}

TEST_F(SessionTest, SeveralThreadsMayWaitForOneTensor) {
  Open();
  daemon_.SetAnswer([](FakeDaemon&, const SubmissionEntry&) {
    return std::optional(
        std::pair(proto::MakeTensorWord(proto::kResident, kWeights), absl::OkStatus()));
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { EXPECT_TRUE(session_->Acquire(1).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(daemon_.pin(1).load(), 8u);
}

TEST_F(SessionTest, ATransferIsWaitedForByItsTicket) {
  Open();
  daemon_.SetAnswer([](FakeDaemon& daemon, const SubmissionEntry& entry) {
    if (entry.operation == RingOperation::kGet) {
      daemon.region()[entry.region_offset] = std::byte{77};
      return std::optional(std::pair(uint64_t{0}, absl::OkStatus()));
    }
    return std::optional(std::pair(uint64_t{0}, MakeError(ErrorId::kIo, "sector 5")));
  });
  const Ticket get = session_->Get(0, proto::Plane::kMaster, 0, 64, kBufferOffset);
  const Ticket write = session_->ScratchWrite(0, 4096, kBufferOffset);
  EXPECT_NE(get, 0u);
  EXPECT_EQ(session_->Wait(write), MakeError(ErrorId::kIo, "sector 5"));
  EXPECT_TRUE(session_->Wait(get).ok());
  EXPECT_EQ(session_->region()[kBufferOffset], std::byte{77});
}

TEST_F(SessionTest, MoreOperationsThanMayBeInFlightAreSubmittedOneAfterTheOther) {
  Open();
  std::vector<Ticket> tickets;
  for (uint32_t i = 0; i < 3 * proto::kInFlightMax; ++i) {
    tickets.push_back(session_->Put(0, 0, 64, kBufferOffset));
  }
  for (const Ticket ticket : tickets) EXPECT_TRUE(session_->Wait(ticket).ok());
}

TEST_F(SessionTest, PrefetchNeverBlocksAndAsksOnlyForWhatIsAbsent) {
  Open();
  daemon_.SetAnswer([](FakeDaemon&, const SubmissionEntry&) {
    return std::optional<std::pair<uint64_t, absl::Status>>();
  });
  EXPECT_FALSE(session_->Prefetch(0));
  for (uint32_t i = 0; i < proto::kInFlightMax; ++i) EXPECT_TRUE(session_->Prefetch(1));
  EXPECT_FALSE(session_->Prefetch(1));
}

// The daemon has no room until tensor 0 is released, and looks again only when the bell rings.
TEST_F(SessionTest, AReleaseWakesADaemonWhoseRoomIsPinned) {
  Open();
  ASSERT_TRUE(session_->Acquire(0).ok());
  std::atomic<uint64_t> stalled{0};
  daemon_.SetAnswer([&](FakeDaemon&, const SubmissionEntry& entry) {
    stalled = entry.tag;
    return std::optional<std::pair<uint64_t, absl::Status>>();
  });
  daemon_.SetOnBell([&](proto::DaemonRings& rings) {
    if (stalled == 0 || daemon_.pin(0) != 0) return;
    rings.Complete(stalled.exchange(0), proto::MakeTensorWord(proto::kResident, kWeights),
                   absl::OkStatus());
  });
  std::thread waiter([&] { EXPECT_TRUE(session_->Acquire(1).ok()); });
  while (stalled == 0) std::this_thread::yield();
  session_->Release(0);
  waiter.join();
}

TEST_F(SessionTest, AJobThatFailedIsToldByTheNextAcquire) {
  Open();
  const absl::Status failure = MakeError(ErrorId::kStoreFailed, "flush of epoch 7");
  proto::PublishFailure(daemon_.slab_header(), failure);
  EXPECT_EQ(session_->Acquire(0).status(), failure);
  EXPECT_EQ(session_->health(), failure);
}

TEST_F(SessionTest, EveryWaitEndsWhenTheDaemonDies) {
  Open();
  daemon_.SetAnswer([this](FakeDaemon&, const SubmissionEntry&) {
    if (!asked_.HasBeenNotified()) asked_.Notify();
    return std::optional<std::pair<uint64_t, absl::Status>>();
  });
  const Ticket ticket = session_->Put(0, 0, 64, kBufferOffset);
  std::thread waiter(
      [&] { EXPECT_EQ(ErrorIdOf(session_->Acquire(1).status()), ErrorId::kDaemonLost); });
  asked_.WaitForNotification();
  daemon_.Die();
  waiter.join();
  EXPECT_EQ(ErrorIdOf(session_->Wait(ticket)), ErrorId::kDaemonLost);
  EXPECT_EQ(ErrorIdOf(session_->Acquire(0).status()), ErrorId::kDaemonLost);
  EXPECT_EQ(ErrorIdOf(session_->Wait(session_->Put(0, 0, 64, kBufferOffset))),
            ErrorId::kDaemonLost);
  EXPECT_EQ(ErrorIdOf(session_->WaitDurable().status()), ErrorId::kDaemonLost);
  EXPECT_EQ(ErrorIdOf(session_->health()), ErrorId::kDaemonLost);
}

// What a step says that has no room in the region.
StepCommand LongStep(uint64_t step) {
  return {.step = step,
          .has_trainer_state = true,
          .trainer_state = std::string(proto::kStepCommandBytes, 's')};
}

TEST_F(SessionTest, ACallWithoutTimeLimitEndsWhenTheDaemonDies) {
  Open();
  EXPECT_EQ(ErrorIdOf(session_->Step(LongStep(404))), ErrorId::kDaemonLost);
}

// What the daemon reads of a command in the region.
v1::StepRequest CommandOf(FakeDaemon& daemon, const SubmissionEntry& entry) {
  v1::StepRequest request;
  EXPECT_TRUE(request.ParseFromArray(daemon.region() + proto::kStepCommandOffset,
                                     static_cast<int>(entry.element_count)));
  return request;
}

TEST_F(SessionTest, AStepGoesByTheRingWhenItIsShort) {
  Open();
  std::vector<v1::StepRequest> seen;  // written before the answer, read after it
  daemon_.SetAnswer([&](FakeDaemon& daemon, const SubmissionEntry& entry) {
    EXPECT_EQ(entry.operation, proto::RingOperation::kStep);
    seen.push_back(CommandOf(daemon, entry));
    return std::optional(std::pair(uint64_t{6}, absl::OkStatus()));
  });
  StepCommand step{.step = 7, .groups = {kernels::OptimizerSpec()}};
  step.updates = {{.tensor = 1, .group = 0, .update_count = 3, .gradient_scale = 0.5}};
  ASSERT_TRUE(session_->Step(step).ok());
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].step(), 7u);
  EXPECT_EQ(seen[0].tensor_count(), 1u);
  EXPECT_EQ(seen[0].tensors(0), 1u);
  EXPECT_EQ(seen[0].update_count(0), 3u);
  EXPECT_EQ(seen[0].gradient_scale(0), 0.5);
  EXPECT_EQ(seen[0].groups(0).name(), kernels::OptimizerSpec().name());
  ASSERT_TRUE(session_->Step(LongStep(8)).ok());
  EXPECT_EQ(seen.size(), 1u);
}

TEST_F(SessionTest, ARefusedStepHasItsText) {
  Open();
  const absl::Status refusal = MakeError(ErrorId::kRanksDiffer, "step 7");
  daemon_.SetAnswer([&](FakeDaemon&, const SubmissionEntry&) {
    return std::optional(std::pair(uint64_t{0}, refusal));
  });
  EXPECT_EQ(session_->Step({.step = 7}), refusal);
  EXPECT_TRUE(session_->health().ok());
}

TEST_F(SessionTest, AStepThatIsNotAnsweredEndsWhenTheDaemonDies) {
  Open();
  daemon_.SetAnswer([this](FakeDaemon&, const SubmissionEntry&) {
    asked_.Notify();
    return std::optional<std::pair<uint64_t, absl::Status>>();
  });
  std::thread waiter(
      [&] { EXPECT_EQ(ErrorIdOf(session_->Step({.step = 7})), ErrorId::kDaemonLost); });
  asked_.WaitForNotification();
  daemon_.Die();
  waiter.join();
}

// The thread that waits for a step takes completions, too: those of others are theirs all the same.
TEST_F(SessionTest, WaitsBesideAStepEnd) {
  Open();
  daemon_.SetAnswer([](FakeDaemon&, const SubmissionEntry& entry) {
    const uint64_t word = proto::MakeTensorWord(proto::kResident, kWeights);
    return std::optional(std::pair(
        entry.operation == proto::RingOperation::kAcquire ? word : uint64_t{0}, absl::OkStatus()));
  });
  std::thread other([&] {
    for (int i = 0; i < 2000; ++i) EXPECT_TRUE(session_->Acquire(1).ok());
  });
  for (uint64_t step = 1; step <= 2000; ++step) EXPECT_TRUE(session_->Step({.step = step}).ok());
  other.join();
}

TEST_F(SessionTest, AnAnnouncementIsReadBeforeTheNextCommandIsWritten) {
  Open();
  absl::Notification may_read;
  std::vector<uint64_t> seen;
  daemon_.SetAnswer([&](FakeDaemon& daemon, const SubmissionEntry& entry) {
    if (entry.operation == proto::RingOperation::kBeginStep) may_read.WaitForNotification();
    seen.push_back(CommandOf(daemon, entry).step());
    return std::optional(std::pair(uint64_t{0}, absl::OkStatus()));
  });
  ASSERT_TRUE(session_->BeginStep({.step = 7}).ok());  // does not wait
  std::thread step([&] { EXPECT_TRUE(session_->Step({.step = 8}).ok()); });
  may_read.Notify();
  step.join();
  EXPECT_EQ(seen, (std::vector<uint64_t>{7, 8}));
}

TEST_F(SessionTest, AForkedChildTakesNoStep) {
  Open();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool dead = ErrorIdOf(session_->Step({.step = 7})) == ErrorId::kSessionEnded &&
                      ErrorIdOf(session_->BeginStep({.step = 7})) == ErrorId::kSessionEnded;
    session_.reset();
    ::_exit(dead ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(SessionTest, TheReasonThatADaemonGivesIsTheSessions) {
  Open();
  const absl::Status reason = MakeError(ErrorId::kProtocol, "tensor 9");
  daemon_.Die(reason);
  EXPECT_EQ(session_->Wait(session_->Put(0, 0, 64, kBufferOffset)), reason);
}

TEST_F(SessionTest, AForkedChildHasADeadSessionAndTheParentGoesOn) {
  Open();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool dead = ErrorIdOf(session_->Acquire(0).status()) == ErrorId::kSessionEnded &&
                      ErrorIdOf(session_->Wait(session_->Put(0, 0, 64, kBufferOffset))) ==
                          ErrorId::kSessionEnded &&
                      ErrorIdOf(session_->WaitDurable().status()) == ErrorId::kSessionEnded &&
                      !session_->Prefetch(1);
    session_.reset();
    ::_exit(dead ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(session_->Acquire(0).ok());
  EXPECT_TRUE(session_->Wait(session_->Put(0, 0, 64, kBufferOffset)).ok());
}

class ConnectTest : public testing::Test {
 protected:
  ConnectTest() {
    ::unsetenv("OFFLOADD_SOCKET");
    ::unsetenv("OFFLOADD_BINARY");
  }
  static absl::Status Error(const ConnectOptions& options) {
    return Session::Connect(options).status();
  }
};

TEST_F(ConnectTest, ASocketThatWasNamedIsNotReplacedByAPrivateDaemon) {
  ::setenv("OFFLOADD_SOCKET", "/tmp/offloadd-nobody.sock", 1);
  const absl::Status status = Error({});
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kDaemonStart);
  EXPECT_NE(status.message().find("offloadd-nobody"), absl::string_view::npos) << status;
}

TEST_F(ConnectTest, AProgramThatIsNotThereIsNamed) {
  ::setenv("OFFLOADD_BINARY", "/nonexistent/offloadd", 1);
  const absl::Status status = Error({.only_private = true});
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kDaemonStart);
  EXPECT_NE(status.message().find("/nonexistent/offloadd"), absl::string_view::npos) << status;
}

TEST_F(ConnectTest, APrivateDaemonThatEndsAtOnceIsToldWithItsExitStatus) {
  ::setenv("OFFLOADD_BINARY", "/bin/false", 1);
  const absl::Status status = Error({.only_private = true});
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kDaemonStart);
  EXPECT_NE(status.message().find("exit status 1"), absl::string_view::npos) << status;
}

TEST_F(ConnectTest, ClosedStreamsAreOpenedBeforeAnythingElse) {
  ::setenv("OFFLOADD_BINARY", "/bin/false", 1);
  const auto connect = [] {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(stream);
    const absl::Status status = Error({.only_private = true});
    const bool is_told = status.message().find("exit status 1") != absl::string_view::npos;
    struct stat null = {}, here = {};
    ::stat("/dev/null", &null);
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      if (::fstat(stream, &here) != 0 || here.st_ino != null.st_ino) ::_exit(1);
    }
    ::_exit(is_told ? 0 : 2);
  };
  EXPECT_EXIT(connect(), testing::ExitedWithCode(0), "");
}

// This program itself is the private daemon (main() below).
class PrivateDaemonTest : public ConnectTest {
 protected:
  PrivateDaemonTest() {
    ::setenv("OFFLOADD_BINARY", "/proc/self/exe", 1);
    char name[] = "/tmp/offloadd-test-XXXXXX";
    runtime_directory_ = ::mkdtemp(name);
    ::setenv("XDG_RUNTIME_DIR", runtime_directory_.c_str(), 1);
    auto session = Session::Connect({.only_private = true});
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }
  // Fails when something was left in it.
  ~PrivateDaemonTest() override {
    session_.reset();
    EXPECT_EQ(::rmdir(runtime_directory_.c_str()), 0) << ErrnoText(errno);
  }
  std::string runtime_directory_;
  std::unique_ptr<Session> session_;
};

TEST_F(PrivateDaemonTest, IsStartedUsedAndEndsWithTheSession) {
  EXPECT_TRUE(session_->daemon_is_private());
  const pid_t pid = session_->daemon_pid();
  EXPECT_NE(pid, ::getpid());
  EXPECT_NE(::getpgid(pid), ::getpgid(0));  // Ctrl-C does not reach it
  EXPECT_TRUE(session_->OpenJob({.job = "j", .ram_bytes = 1}).ok());
  EXPECT_TRUE(session_->Wait(session_->Put(0, 0, 64, kBufferOffset)).ok());
  session_.reset();
  EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(PrivateDaemonTest, IsNotAmongTheChildrenThatATrainerWaitsFor) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  EXPECT_EQ(::wait(nullptr), child);
  errno = 0;
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  EXPECT_EQ(::kill(session_->daemon_pid(), 0), 0) << "it lives";
}

TEST_F(PrivateDaemonTest, LeavesNothingToReapToATrainerThatGetsOrphans) {
  session_.reset();
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
  auto session = Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  session->reset();
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  ::prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
}

// A timer of the trainer's interrupts calls that wait, sooner than they end.
class Timer {
 protected:
  Timer() {
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    ::sigaction(SIGALRM, &action, nullptr);
    Set(1000);
  }
  ~Timer() { Set(0); }

 private:
  static void Set(suseconds_t microseconds) {
    const itimerval every{.it_interval = {0, microseconds}, .it_value = {0, microseconds}};
    ::setitimer(ITIMER_REAL, &every, nullptr);
  }
};
class TimerTest : private Timer, public PrivateDaemonTest {};

TEST_F(TimerTest, APrivateDaemonIsStartedAndUsedBesideATimer) {
  EXPECT_TRUE(session_->daemon_is_private());
  EXPECT_TRUE(session_->OpenJob({.job = "j", .ram_bytes = 1}).ok());
  EXPECT_TRUE(session_->Wait(session_->Put(0, 0, 64, kBufferOffset)).ok());
}

TEST_F(PrivateDaemonTest, IsToldToHaveBeenKilled) {
  ASSERT_TRUE(session_->OpenJob({.job = "j", .ram_bytes = 1}).ok());
  ASSERT_EQ(::kill(session_->daemon_pid(), SIGKILL), 0);
  absl::Status status;
  while (status.ok()) status = session_->Wait(session_->Put(0, 0, 64, kBufferOffset));
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kDaemonLost);
  EXPECT_NE(status.message().find("signal 9"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("dmesg"), absl::string_view::npos) << status;
}

TEST_F(PrivateDaemonTest, EndsAlsoWhenAForkedChildKeepsTheSocketOpen) {
  int release[2];
  ASSERT_EQ(::pipe(release), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(release[1]);
    ::_exit(::read(release[0], &byte, 1) == 0 ? 0 : 1);
  }
  session_.reset();  // returns while the child lives
  ::close(release[1]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ::close(release[0]);
}

}  // namespace

int RunAsDaemon(const std::string& socket_path) {
  FakeDaemon daemon(socket_path.substr(0, socket_path.rfind('/')));
  daemon.WaitForSession();
  return 0;
}

}  // namespace offload::client

// As `offloadd --private --socket PATH …` when it is started so, else the tests.
int main(int argc, char** argv) {
  std::string socket_path;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) == "--detach") offload::Detach(std::stoi(argv[i + 1]));
    if (std::string(argv[i]) == "--socket") socket_path = argv[i + 1];
  }
  if (!socket_path.empty()) return offload::client::RunAsDaemon(socket_path);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

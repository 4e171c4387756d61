#include "offloadd/session.h"

#include <poll.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "proto/shared_memory.h"
#include "spdlog/spdlog.h"
#include "swap/store.h"

namespace offload::daemon {

absl::StatusOr<std::shared_ptr<Session>> Session::Create(UniqueFd socket, proto::Peer peer,
                                                         Options options,
                                                         std::function<void(uint64_t id)> ended) {
  OFFLOAD_ASSIGN_OR_RETURN(const proto::Token token, proto::MakeToken());
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<EventLoop> loop, EventLoop::Create());
  return std::shared_ptr<Session>(new Session(std::move(socket), std::move(peer),
                                              std::move(options), std::move(loop), token,
                                              std::move(ended)));
}

void Session::Start() {
  thread_ = std::thread([this] { Run(); });
}

Session::Session(UniqueFd socket, proto::Peer peer, Options options,
                 std::unique_ptr<EventLoop> loop, proto::Token token,
                 std::function<void(uint64_t)> ended)
    : socket_(std::move(socket)),
      peer_(std::move(peer)),
      options_(std::move(options)),
      token_(token),
      ended_(std::move(ended)),
      loop_(std::move(loop)) {}

Session::~Session() {
  if (thread_.joinable()) thread_.join();
}

void Session::Run() {
  prctl(PR_SET_NAME, "session");
  handshake_deadline_seconds_ = Clock::Real().NowSeconds() + options_.handshake_timeout_seconds;
  loop_->Watch(socket_.get(), [this] { ReadSocket(); });
  loop_->Watch(peer_.pidfd.get(), [this] { End("its process has ended"); });
  loop_->SetTurn([this] { return WatchHandshake(); });
  loop_->Run();
  DropJob();
  socket_.reset();
  ended_(options_.id);
}

int Session::WatchHandshake() {
  if (handshake_deadline_seconds_ == 0 || ending_) return -1;
  const double left_seconds = handshake_deadline_seconds_ - Clock::Real().NowSeconds();
  if (left_seconds > 0) return static_cast<int>(std::min(left_seconds, 60.0) * 1e3) + 1;
  proto::SendRefusal(
      socket_.get(),
      MakeError(ErrorId::kRefused, absl::StrCat("no handshake message came within ",
                                                options_.handshake_timeout_seconds, " s")))
      .IgnoreError();
  End("it is too slow with the handshake");
  return 0;
}

std::string Session::StoredName(const std::string& name) const {
  // A bad name stays one.
  if (proto::IsTrusted(peer_) || !IsValidJobName(name)) return name;
  return absl::StrCat("u", peer_.uid, ".", name);
}

bool Session::BeginCall() {
  if (calls_.fetch_add(1) < kLimits.calls_per_session_max) return true;
  EndCall();
  return false;
}

bool Session::TakeStreamMemory(uint64_t bytes) {
  if (stream_bytes_.fetch_add(bytes) + bytes <= kLimits.stream_bytes_max) return true;
  ReturnStreamMemory(bytes);
  return false;
}

// The loop may not have looked yet: the rank's process is asked about.
bool Session::IsLeaving() const {
  if (leaving_.load(std::memory_order_acquire)) return true;
  pollfd watched{.fd = peer_.pidfd.get(), .events = POLLIN};
  return poll(&watched, 1, 0) > 0;
}

// ---- The job -----------------------------------------------------------------------------------

std::shared_ptr<Job> Session::job() const {
  std::lock_guard<std::mutex> lock(job_mutex_);
  return job_;
}

absl::Status Session::Ended() const {
  return daemon_ends_.load(std::memory_order_acquire)
             ? DaemonEnds()
             : MakeError(ErrorId::kSessionEnded, "the session is closed");
}

absl::Status Session::JoinJob(std::shared_ptr<Job> job) {
  std::lock_guard<std::mutex> lock(job_mutex_);
  if (leaving_) return Ended();
  if (job_ != nullptr) return MakeError(ErrorId::kProtocol, "OpenJob for the second time");
  job_ = std::move(job);
  return absl::OkStatus();
}

void Session::DropJob() {
  std::shared_ptr<Job> job;  // is destroyed, if this was the last one, outside the lock
  std::lock_guard<std::mutex> lock(job_mutex_);
  job = std::exchange(job_, nullptr);
}

Rank::Member Session::MemberOfJob() {
  return {.session = id(),
          .pid = client_pid(),
          // The job calls it only while the session waits for the job.
          .end_session = [this] {
            loop_->Post([this] {
              if (!ending_) End("it has broken the protocol");
            });
          }};
}

void Session::LeaveJob(const std::function<void(Job&, std::function<void()>)>& leave) {
  std::shared_ptr<Job> job;
  {
    std::lock_guard<std::mutex> lock(job_mutex_);
    leaving_.store(true, std::memory_order_release);
    job = job_;
  }
  // Only the first one that is answered may end the loop: the session is gone then.
  const bool is_first = !std::exchange(ending_, true);
  if (job == nullptr) return loop_->Stop();
  // The session keeps the job until it is let go, so the loop is there to answer.
  job->loop().Post([this, is_first, leave, raw = job.get()] {
    leave(
        *raw, is_first ? std::function<void()>([this] { loop_->Stop(); }) : [] {});
  });
}

void Session::Shutdown() {
  daemon_ends_.store(true, std::memory_order_release);
  leaving_.store(true, std::memory_order_release);
  loop_->Post([this] {
    if (ending_) return;
    LeaveJob([](Job& job, std::function<void()> done) { job.EndWithDaemon(std::move(done)); });
  });
}

// Also of a session that is told to end already: its job must not wait for this rank.
void Session::End(std::string_view reason) {
  spdlog::debug("session {} of process {} ends: {}", options_.id, peer_.pid, reason);
  loop_->Unwatch(socket_.get());
  loop_->Unwatch(peer_.pidfd.get());
  socket_.reset();  // a rank that is still there sees it
  LeaveJob([id = id(), how = std::string(reason)](Job& job, std::function<void()> done) {
    job.Leave(id, how, std::move(done));
  });
}

// ---- The handshake -----------------------------------------------------------------------------

void Session::ReadSocket() {
  for (;;) {
    absl::StatusOr<std::optional<proto::RankMessage>> message =
        proto::ReceiveFromRank(socket_.get());
    absl::Status status = message.status();
    if (status.ok() && !message->has_value()) return;
    if (status.ok()) status = Handle(**message);
    if (status.ok()) continue;
    if (ErrorIdOf(status) == ErrorId::kSessionEnded) return End("it has closed its connection");
    proto::SendRefusal(socket_.get(), status).IgnoreError();
    return End(ToStd(status.message()));
  }
}

absl::Status Session::Handle(const proto::RankMessage& message) {
  if (std::holds_alternative<proto::HelloMessage>(message)) {
    if (greeted_) return MakeError(ErrorId::kProtocol, "Hello for the second time");
    greeted_ = true;
    handshake_deadline_seconds_ = 0;
    return proto::SendWelcome(socket_.get(), options_.id, token_, options_.control_path);
  }
  if (const auto* map = std::get_if<proto::MapMessage>(&message)) {
    if (!proto::TokensEqual(map->token, token_))
      return MakeError(ErrorId::kRefused, "the token is not this session's");
    return SendMemory();
  }
  if (!doorbell_.has_value()) return MakeError(ErrorId::kProtocol, "Mapped before Memory");
  handshake_deadline_seconds_ = 0;
  OFFLOAD_RETURN_IF_ERROR(Attach(*std::exchange(doorbell_, std::nullopt)));
  return proto::SendReady(socket_.get());
}

absl::Status Session::SendMemory() {
  using Memory = absl::StatusOr<std::pair<proto::SharedMemory*, proto::SharedMemory*>>;
  const absl::Status too_early =
      MakeError(ErrorId::kProtocol, "Map before OpenJob or for the second time");
  const std::shared_ptr<Job> job = this->job();
  if (job == nullptr || memory_sent_) return too_early;
  // They stay until the job goes.
  const Memory memory = job->loop().Call<Memory>([&](const std::function<void(Memory)>& answer) {
    Rank* const rank = job->FindRank(id());
    if (rank == nullptr || job->phase() == JobPhase::kOpening) return answer(too_early);
    answer(std::pair(&job->slab_memory(), &rank->region()));
  });
  if (!memory.ok()) return memory.status();
  const auto& [slab, region] = *memory;
  OFFLOAD_ASSIGN_OR_RETURN(auto bells, proto::Doorbell::CreatePair());
  memory_sent_ = true;
  handshake_deadline_seconds_ = Clock::Real().NowSeconds() + options_.handshake_timeout_seconds;
  doorbell_ = std::move(bells.first);
  return proto::SendMemory(socket_.get(), slab->fd(), slab->size_bytes(), region->fd(),
                           region->size_bytes(), bells.second);
}

absl::Status Session::Attach(proto::Doorbell doorbell) {
  const std::shared_ptr<Job> job = this->job();
  return job->loop().Call<absl::Status>([&](const std::function<void(absl::Status)>& answer) {
    answer(job->Map(*job->FindRank(id()), std::move(doorbell)));
  });
}

}  // namespace offload::daemon

#include "offloadd/session.h"

#include <poll.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"
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
  loop_->Watch(peer_.pidfd.get(), [this] { End("the process has ended"); });
  loop_->SetTurn([this] { return Turn(); });
  loop_->Run();
  job_.reset();
  socket_.reset();
  ended_(options_.id);
}

int Session::Turn() {
  int timeout_ms = WatchHandshake(job_ != nullptr ? job_->Turn() : -1);
  if (!ending_ && job_ != nullptr && job_->rank_at_fault()) {
    End("it broke the protocol");
    timeout_ms = 0;  // nothing else would make the job's next turn, which drains it
  }
  if (ending_ && (job_ == nullptr || job_->drained())) {
    loop_->Stop();
    return 0;
  }
  return timeout_ms;
}

int Session::WatchHandshake(int timeout_ms) {
  if (handshake_deadline_seconds_ == 0 || ending_) return timeout_ms;
  const double left_seconds = handshake_deadline_seconds_ - Clock::Real().NowSeconds();
  if (left_seconds > 0) {
    const int left_ms = static_cast<int>(std::min(left_seconds, 60.0) * 1e3) + 1;
    return timeout_ms < 0 ? left_ms : std::min(timeout_ms, left_ms);
  }
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
  if (proto::IsTrusted(peer_) || !swap::IsValidJobName(name)) return name;
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

// The loop may be busy with a lock or a format, so this is not its own view: the rank's process is
// asked about.
bool Session::IsLeaving() const {
  if (leaving_.load(std::memory_order_acquire)) return true;
  pollfd watched{.fd = peer_.pidfd.get(), .events = POLLIN};
  return poll(&watched, 1, 0) > 0;
}

void Session::Shutdown() {
  leaving_.store(true, std::memory_order_release);
  loop_->Post([this] {
    if (ending_) return;
    ending_ = true;
    if (job_ != nullptr) job_->Close([](absl::Status) {});
  });
}

void Session::End(std::string_view reason) {
  spdlog::debug("session {} of process {} ends: {}", options_.id, peer_.pid, reason);
  loop_->Unwatch(socket_.get());
  loop_->Unwatch(peer_.pidfd.get());
  socket_.reset();  // a rank that is still there sees it
  ending_ = true;
  leaving_.store(true, std::memory_order_release);
  if (job_ != nullptr) job_->RankGone();
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
    if (ErrorIdOf(status) != ErrorId::kSessionEnded)
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
  OFFLOAD_RETURN_IF_ERROR(job_->region_memory().SealForWriting());
  job_->AttachRings(*std::exchange(doorbell_, std::nullopt));
  return proto::SendReady(socket_.get());
}

absl::Status Session::SendMemory() {
  if (job_ == nullptr || memory_sent_)
    return MakeError(ErrorId::kProtocol, "Map before OpenJob or for the second time");
  OFFLOAD_ASSIGN_OR_RETURN(auto bells, proto::Doorbell::CreatePair());
  memory_sent_ = true;
  handshake_deadline_seconds_ = Clock::Real().NowSeconds() + options_.handshake_timeout_seconds;
  doorbell_ = std::move(bells.first);
  return proto::SendMemory(socket_.get(), job_->slab_memory().fd(),
                           job_->slab_memory().size_bytes(), job_->region_memory().fd(),
                           job_->region_memory().size_bytes(), bells.second);
}

// ---- The job -----------------------------------------------------------------------------------

absl::StatusOr<proto::v1::OpenJobReply> Session::OpenJob(const proto::v1::OpenJobRequest& request) {
  if (ending_) return MakeError(ErrorId::kSessionEnded, "the session ends");
  OFFLOAD_CHECK(job_ == nullptr) << "a session that claimed two jobs";
  OFFLOAD_ASSIGN_OR_RETURN(const std::string pool, ChoosePool(options_.pools, request.pool()));
  proto::v1::OpenJobReply reply;
  OFFLOAD_ASSIGN_OR_RETURN(
      job_, Job::Open(
                loop_.get(), request, pool, [this] { return RankHasLeft(); }, &reply));
  return reply;
}

void Session::CloseJob(std::function<void(absl::Status)> done) {
  leaving_.store(true, std::memory_order_release);
  if (job_ == nullptr) return done(absl::OkStatus());
  job_->IgnorePins();
  job_->Close(std::move(done));
}

// Asked while the loop cannot look itself.
bool Session::RankHasLeft() const {
  pollfd watched{.fd = socket_.get(), .events = POLLRDHUP};
  return IsLeaving() || poll(&watched, 1, 0) > 0;
}

}  // namespace offload::daemon

#include "offloadd/daemon.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/advice.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "base/worker_pool.h"
#include "offloadd/control_service.h"
#include "offloadd/limits.h"
#include "offloadd/metrics_text.h"
#include "offloadd/status_reply.h"
#include "proto/grpc_status.h"
#include "proto/socket_directory.h"
#include "spdlog/spdlog.h"
#include "swap/store.h"

namespace offload::daemon {
namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(10);

// Once more than it is shut down: the last shutdown would wait for ever for a thread of gRPC's that
// the system had refused to start.
void KeepGrpcForTheProcess() {
  static std::once_flag kept;
  std::call_once(kept, &grpc_init);
}

}  // namespace

Daemon::Daemon(DaemonOptions options, std::unique_ptr<EventLoop> loop)
    : options_(std::move(options)),
      control_path_(std::filesystem::path(options_.socket_path).parent_path() / "control.sock"),
      ranks_path_(std::filesystem::path(options_.socket_path).parent_path() / "ranks.sock"),
      metrics_path_(std::filesystem::path(options_.socket_path).parent_path() / "metrics.sock"),
      started_seconds_(Clock::Real().NowSeconds()),
      loop_(std::move(loop)) {}

Daemon::~Daemon() {
  // No session is left, so nobody needs more than the answers that are on their way.
  for (const std::unique_ptr<grpc::Server>& server :
       {std::cref(server_), std::cref(ranks_server_)}) {
    if (server != nullptr)
      server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  }
  metrics_.reset();
  unlink(control_path_.c_str());
  if (options_.peers.admits_others()) unlink(ranks_path_.c_str());
  // The last one: from then on another daemon may start here.
  unlink(options_.socket_path.c_str());
  // The client made the directory for us; it may have been killed.
  if (options_.is_private) {
    const std::string directory = std::filesystem::path(options_.socket_path).parent_path();
    if (options_.directory_lock >= 0) {
      rmdir(directory.c_str());
    } else {
      proto::RemoveEmptySocketDirectory(directory);
    }
  }
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Create(DaemonOptions options) {
  const bool admits_others = options.peers.admits_others();
  if (admits_others && (options.is_private || options.pools.allowed.empty())) {
    return MakeError(ErrorId::kBadValue,
                     "other users are admitted by a node daemon that names its pools",
                     "Add --pool, and leave --private out");
  }
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<EventLoop> loop, EventLoop::Create());
  // The handshake socket first: it tells whether another daemon is there. The control socket is
  // ours then.
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd listener,
                           proto::ListenForRanks(options.socket_path, admits_others ? 0666 : 0600));
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(options), std::move(loop)));
  daemon->listener_ = std::move(listener);
  OFFLOAD_RETURN_IF_ERROR(daemon->WatchSignals());
  OFFLOAD_RETURN_IF_ERROR(daemon->WatchParent());
  OFFLOAD_RETURN_IF_ERROR(daemon->ServeControls());
  OFFLOAD_RETURN_IF_ERROR(daemon->ServeMetrics());
  daemon->loop_->Watch(daemon->listener_.get(), [raw = daemon.get()] { raw->Accept(); });
  return daemon;
}

// Signals were blocked before the first thread began, so that they arrive here and nowhere else.
absl::Status Daemon::WatchSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  if (!options_.is_private) sigaddset(&signals, SIGINT);
  signals_.reset(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return absl::InternalError("signalfd: " + ErrnoText(errno));
  loop_->Watch(signals_.get(), [this] { HandleSignal(); });
  return absl::OkStatus();
}

absl::Status Daemon::WatchParent() {
  if (options_.parent_pid == 0) return absl::OkStatus();
  parent_.reset(static_cast<int>(syscall(SYS_pidfd_open, options_.parent_pid, 0)));
  if (!parent_.valid()) {
    return MakeError(ErrorId::kDaemonStart,
                     absl::StrCat("process ", options_.parent_pid, ": ", ErrnoText(errno)));
  }
  loop_->Watch(parent_.get(), [this] {
    loop_->Unwatch(parent_.get());
    parent_gone_ = true;
    StopIfDone();
  });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<grpc::Server>> Daemon::ServeControl(const std::string& path,
                                                                   mode_t mode,
                                                                   ControlService* service) {
  unlink(path.c_str());
  KeepGrpcForTheProcess();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(kLimits.message_bytes_max));
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, proto::kControlMetadataBytesMax);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  grpc::ResourceQuota quota("control");
  quota.SetMaxThreads(kLimits.call_threads_max);
  builder.SetResourceQuota(quota);
  builder.AddListeningPort(proto::ControlAddress(path), grpc::InsecureServerCredentials());
  builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  // Made under our umask, so that it never had more rights than these.
  if (server != nullptr && chmod(path.c_str(), mode) == 0) return server;
  return MakeError(ErrorId::kDaemonStart,
                   absl::StrCat("the control socket ", path, " cannot be served"));
}

absl::Status Daemon::ServeControls() {
  service_ = std::make_unique<ControlService>(&sessions_, &jobs_, options_.pools,
                                              /*serves_tools=*/true, options_.is_private);
  OFFLOAD_ASSIGN_OR_RETURN(server_, ServeControl(control_path_, 0600, service_.get()));
  if (!options_.peers.admits_others()) return absl::OkStatus();
  ranks_service_ = std::make_unique<ControlService>(&sessions_, &jobs_, options_.pools,
                                                    /*serves_tools=*/false, options_.is_private);
  OFFLOAD_ASSIGN_OR_RETURN(ranks_server_, ServeControl(ranks_path_, 0666, ranks_service_.get()));
  return absl::OkStatus();
}

absl::Status Daemon::ServeMetrics() {
  OFFLOAD_ASSIGN_OR_RETURN(metrics_,
                           MetricsServer::Start(metrics_path_, [this] { return Metrics(); }));
  return absl::OkStatus();
}

std::string Daemon::Metrics() const {
  const proto::v1::StatusReply status = MakeStatusReply(jobs_, started_seconds_);
  std::map<std::string, uint64_t> free_bytes;
  for (const proto::v1::JobStatus& job : status.jobs()) {
    const auto pools = SplitPools(job.pool());
    if (!pools.ok()) continue;
    for (const std::string& pool : *pools) {
      struct statvfs info = {};
      if (statvfs(pool.c_str(), &info) == 0)
        free_bytes[pool] = uint64_t{info.f_bavail} * info.f_frsize;
    }
  }
  return MetricsText(status, free_bytes);
}

void Daemon::Run() { loop_->Run(); }

// ---- Ranks -------------------------------------------------------------------------------------

// Whoever is refused often must not fill the log.
void Daemon::LogRefusal(const absl::Status& status) {
  // Ranks of a next launch look in until a private daemon has ended: nothing to be read.
  if (shutting_down_ && options_.is_private) return;
  constexpr int kPerSecond = 5;
  const double now = Clock::Real().NowSeconds();
  if (now - refusals_since_seconds_ >= 1) {
    if (refusals_ > kPerSecond) spdlog::warn("{} more were refused", refusals_ - kPerSecond);
    refusals_since_seconds_ = now;
    refusals_ = 0;
  }
  if (++refusals_ <= kPerSecond) spdlog::warn("a rank is refused: {}", ToStd(status.message()));
}

void Daemon::Accept() {
  for (;;) {
    absl::StatusOr<std::optional<UniqueFd>> socket = proto::AcceptRank(listener_.get());
    if (!socket.ok()) {
      // Out of descriptors: who connects still waits, and this is called again at once.
      LogRefusal(socket.status());
      return std::this_thread::sleep_for(kAcceptPause);
    }
    if (!socket->has_value()) return;
    const int fd = (*socket)->get();
    UniqueFd copy(dup(fd));  // to answer with when the session takes the socket along
    const absl::Status status = Welcome(**std::move(socket));
    if (status.ok()) continue;
    LogRefusal(status);
    if (copy.valid()) proto::SendRefusal(copy.get(), status).IgnoreError();
  }
}

absl::Status Daemon::Welcome(UniqueFd socket) {
  OFFLOAD_ASSIGN_OR_RETURN(proto::Peer peer, proto::PeerOf(socket.get()));
  OFFLOAD_RETURN_IF_ERROR(proto::CheckPeer(peer, options_.peers));
  // It ends with the process that started it, which nobody else should depend on.
  if (options_.parent_pid != 0 && options_.rank_count == 1 && peer.pid != options_.parent_pid) {
    return MakeError(ErrorId::kRefused,
                     absl::StrCat("this is the private daemon of process ", options_.parent_pid));
  }
  // As if it had ended: ranks of another launch of the same name start one of their own then.
  if (shutting_down_) return MakeError(ErrorId::kDaemonLost, "the daemon is shutting down");
  if (sessions_.size() >= static_cast<size_t>(kLimits.sessions_max)) {
    return MakeError(ErrorId::kRefused,
                     absl::StrCat("the daemon has ", kLimits.sessions_max, " sessions already"));
  }
  const bool trusted = proto::IsTrusted(peer);
  if (sessions_.CountOfProcess(peer.pid) >= static_cast<size_t>(kLimits.sessions_per_process_max) ||
      (!trusted && sessions_.CountOfUser(peer.uid) >=
                       static_cast<size_t>(kLimits.sessions_per_other_user_max))) {
    return MakeError(ErrorId::kRefused, absl::StrCat("process ", peer.pid, " of user ", peer.uid,
                                                     " has as many sessions as it may have"));
  }
  // One that found none later would end the daemon, and with it everybody's job.
  const size_t startable = CountStartableThreads(kLimits.threads_of_session);
  if (startable < kLimits.threads_of_session) {
    return MakeError(
        ErrorId::kRefused,
        absl::StrCat("the daemon can start ", startable, " further threads, and a session needs ",
                     kLimits.threads_of_session),
        kThreadsFix);
  }
  Session::Options options{.id = next_session_++,
                           .control_path = trusted ? control_path_ : ranks_path_,
                           .pools = options_.pools,
                           .handshake_timeout_seconds = options_.handshake_timeout_seconds};
  OFFLOAD_ASSIGN_OR_RETURN(
      std::shared_ptr<Session> session,
      Session::Create(std::move(socket), std::move(peer), std::move(options),
                      [this](uint64_t id) { loop_->Post([this, id] { SessionEnded(id); }); }));
  sessions_.Add(session);  // before it says the token to anybody
  ++sessions_had_;
  session->Start();
  return absl::OkStatus();
}

void Daemon::SessionEnded(uint64_t id) {
  sessions_.Remove(id);
  StopIfDone();
}

// ---- The end -----------------------------------------------------------------------------------

void Daemon::HandleSignal() {
  signalfd_siginfo info;
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (shutting_down_) _exit(1);
    spdlog::info("signal {}: draining {} sessions", info.ssi_signo, sessions_.size());
    Shutdown();
  }
}

void Daemon::Shutdown() {
  shutting_down_ = true;
  drain_deadline_seconds_ = Clock::Real().NowSeconds() + options_.drain_timeout_seconds;
  loop_->SetTurn([this] { return CheckDrain(); });
  sessions_.EndWithDaemon();
  for (const std::shared_ptr<Session>& session : sessions_.All()) session->Shutdown();
  StopIfDone();
}

// A rank that is stopped while it uses a tensor can keep a step from ending for ever.
int Daemon::CheckDrain() {
  const double left_seconds = drain_deadline_seconds_ - Clock::Real().NowSeconds();
  if (left_seconds > 0) return static_cast<int>(std::min(left_seconds, 60.0) * 1e3) + 1;
  spdlog::error("{} sessions are not drained within {} s: ending as by a crash", sessions_.size(),
                options_.drain_timeout_seconds);
  _exit(1);
}

void Daemon::StopIfDone() {
  if (sessions_.size() > 0) return;
  const bool alone = options_.is_private && (sessions_had_ >= options_.rank_count || parent_gone_);
  if (!shutting_down_ && !alone) return;
  shutting_down_ = true;  // who connects in this last moment is refused
  loop_->Stop();
}

}  // namespace offload::daemon

#include "tools/daemons.h"

#include <glob.h>
#include <grpcpp/grpcpp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/offload.grpc.pb.h"
#include "proto/pool_path.h"

namespace offload::tools {
namespace {

constexpr char kRankSocket[] = "offloadd.sock";
constexpr char kControlSocket[] = "control.sock";
constexpr size_t kDaemonsMax = 256;
constexpr double kAnswerSeconds = 5;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A socket in a directory that only this user or root can have made.
bool IsOurs(const std::string& socket) {
  struct stat info = {};
  const std::string folder = std::filesystem::path(socket).parent_path();
  if (lstat(socket.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode)) return false;
  if (lstat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) return false;
  return info.st_uid == geteuid() || info.st_uid == 0;
}

void AddUnless(std::vector<DaemonAddress>& found, DaemonAddress address) {
  for (const DaemonAddress& known : found) {
    if (known.socket == address.socket) return;
  }
  if (found.size() < kDaemonsMax && IsOurs(address.socket)) found.push_back(std::move(address));
}

void AddPrivateDaemons(std::vector<DaemonAddress>& found, const std::string& folder) {
  glob_t matches = {};
  if (glob(absl::StrCat(folder, "/offloadd-*/", kRankSocket).c_str(), 0, nullptr, &matches) == 0) {
    for (size_t i = 0; i < matches.gl_pathc; ++i) AddUnless(found, {matches.gl_pathv[i], true});
  }
  globfree(&matches);
}

// The channel's text says "failed to connect to all addresses"; people want to know where, by the
// name that they gave.
absl::Status NoAnswer(const std::string& socket, const std::string& control,
                      const absl::Status& status) {
  struct stat info = {};
  if (stat(control.c_str(), &info) != 0 ? errno == EACCES : access(control.c_str(), W_OK) != 0) {
    return MakeError(ErrorId::kDaemonStart,
                     absl::StrCat("the daemon at ", socket, " cannot be asked: ", control, ": ",
                                  ErrnoText(EACCES)),
                     "Ask as the user of that daemon, or as root");
  }
  const std::string reason = access(control.c_str(), F_OK) != 0 && errno == ENOENT
                                 ? absl::StrCat("there is no ", control)
                                 : std::string(status.message());
  return MakeError(ErrorId::kDaemonStart,
                   absl::StrCat("no daemon answers at ", socket, ": ", reason),
                   "Start offloadd, or a trainer, which starts a private one");
}

}  // namespace

std::vector<DaemonAddress> FindDaemons() {
  std::vector<DaemonAddress> found;
  const std::string chosen = Environment("OFFLOADD_SOCKET");
  const std::string runtime = Environment("XDG_RUNTIME_DIR");
  const std::string temporary = Environment("TMPDIR");
  if (!chosen.empty()) AddUnless(found, {chosen, false});
  if (!runtime.empty()) AddUnless(found, {absl::StrCat(runtime, "/offloadd/", kRankSocket), false});
  AddUnless(found, {absl::StrCat("/run/offloadd/", kRankSocket), false});
  if (!runtime.empty()) AddPrivateDaemons(found, runtime);
  if (!temporary.empty()) AddPrivateDaemons(found, temporary);
  AddPrivateDaemons(found, "/tmp");
  return found;
}

namespace {

struct Connection {
  std::string socket, control;  // the one that was named, and the one beside it that answers
  std::unique_ptr<proto::v1::Control::Stub> stub;
};

absl::StatusOr<Connection> Connect(const std::string& socket) {
  const std::filesystem::path path = std::filesystem::absolute(socket);
  const std::string control = path.parent_path() / kControlSocket;
  if (control.size() > proto::kSocketPathBytesMax) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("socket path ", control, " is longer than ",
                                                      proto::kSocketPathBytesMax, " bytes"));
  }
  const auto channel =
      grpc::CreateCustomChannel(proto::ControlAddress(control), grpc::InsecureChannelCredentials(),
                                proto::ControlChannelArguments());
  return Connection{socket, control, proto::v1::Control::NewStub(channel)};
}

void SetDeadline(grpc::ClientContext& context, double timeout_seconds) {
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1e3)));
}

// A daemon that does not answer is described by where it should have. One that ends meanwhile
// cancels what it was asked, without a word.
absl::Status Judge(const Connection& connection, const grpc::Status& said) {
  const absl::Status status = proto::FromGrpc(said);
  if (absl::IsDeadlineExceeded(status)) {
    const absl::Status late =
        MakeError(ErrorId::kDaemonStart,
                  absl::StrCat("the daemon at ", connection.socket, " did not answer in time"),
                  "Give it more (--timeout), or see whether it is stopped");
    return absl::DeadlineExceededError(late.message());
  }
  const bool ended = absl::IsCancelled(status) && !ErrorIdOf(status).has_value();
  return absl::IsUnavailable(status) || ended
             ? NoAnswer(connection.socket, connection.control, status)
             : status;
}

}  // namespace

void DaemonChoice::DefineFlags(CLI::App& app) {
  app.add_option("--socket", socket_, "of one daemon; none: all that this user can reach");
  app.add_option("--timeout", timeout_seconds_, "seconds to wait for each daemon")
      ->check(CLI::Range(0.01, 3600.0));
}

std::vector<DaemonAddress> DaemonChoice::Addresses() const {
  if (is_named()) return {{socket_, false}};
  return FindDaemons();
}

absl::StatusOr<proto::v1::StatusReply> AskStatus(const std::string& socket,
                                                 double timeout_seconds) {
  OFFLOAD_ASSIGN_OR_RETURN(const Connection connection, Connect(socket));
  grpc::ClientContext context;
  SetDeadline(context, timeout_seconds);
  proto::v1::StatusReply reply;
  OFFLOAD_RETURN_IF_ERROR(
      Judge(connection, connection.stub->Status(&context, proto::v1::StatusRequest(), &reply)));
  return reply;
}

std::vector<absl::StatusOr<TwoAnswers>> AskTwice(const std::vector<DaemonAddress>& addresses,
                                                 double timeout_seconds, double interval_seconds) {
  std::vector<absl::StatusOr<TwoAnswers>> all;
  std::vector<double> asked_seconds;
  bool have_jobs = false;
  for (const DaemonAddress& address : addresses) {
    absl::StatusOr<proto::v1::StatusReply> first = AskStatus(address.socket, timeout_seconds);
    have_jobs |= first.ok() && !first->jobs().empty();
    asked_seconds.push_back(Clock::Real().NowSeconds());
    if (first.ok()) {
      all.push_back(TwoAnswers{.reply = *std::move(first)});
    } else {
      all.push_back(first.status());
    }
  }
  if (!have_jobs) return all;
  std::this_thread::sleep_for(std::chrono::duration<double>(interval_seconds));
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].ok() || all[i]->reply.jobs().empty()) continue;
    absl::StatusOr<proto::v1::StatusReply> second = AskStatus(addresses[i].socket, timeout_seconds);
    if (!second.ok()) {
      all[i] = second.status();
      continue;
    }
    all[i]->jobs_before = std::exchange(all[i]->reply, *std::move(second)).jobs();
    all[i]->seconds = Clock::Real().NowSeconds() - asked_seconds[i];
  }
  return all;
}

Rates RatesOf(const TwoAnswers& answers, const proto::v1::JobStatus& job) {
  for (const proto::v1::JobStatus& earlier : answers.jobs_before) {
    if (earlier.job() != job.job() || earlier.pool() != job.pool()) continue;
    if (earlier.bytes_read() > job.bytes_read() || earlier.bytes_written() > job.bytes_written())
      break;
    return {static_cast<double>(job.bytes_read() - earlier.bytes_read()) / answers.seconds,
            static_cast<double>(job.bytes_written() - earlier.bytes_written()) / answers.seconds};
  }
  return {};
}

absl::StatusOr<JobReport> AskReport(const std::string& socket, const std::string& pool,
                                    const std::string& job, double timeout_seconds) {
  OFFLOAD_ASSIGN_OR_RETURN(const Connection connection, Connect(socket));
  grpc::ClientContext context;
  SetDeadline(context, timeout_seconds);
  proto::v1::ReportRequest request;
  request.set_pool(pool);
  request.set_job(job);
  const auto reader = connection.stub->Report(&context, request);
  JobReport report;
  proto::v1::ReportPart part;
  while (reader->Read(&part)) {
    if (part.has_job()) report.job = part.job();
    report.steps.insert(report.steps.end(), part.steps().begin(), part.steps().end());
    report.tensors.insert(report.tensors.end(), part.tensors().begin(), part.tensors().end());
    report.uses.insert(report.uses.end(), part.uses().begin(), part.uses().end());
  }
  OFFLOAD_RETURN_IF_ERROR(Judge(connection, reader->Finish()));
  return report;
}

std::string Printable(std::string text) {
  for (char& byte : text) {
    if (static_cast<unsigned char>(byte) < 0x20 || byte == 0x7f) byte = '?';
  }
  return text;
}

absl::StatusOr<std::string> FindDaemonOf(const std::string& pool, const std::string& job) {
  for (const DaemonAddress& address : FindDaemons()) {
    const auto reply = AskStatus(address.socket, kAnswerSeconds);
    if (!reply.ok()) continue;
    for (const proto::v1::JobStatus& known : reply->jobs()) {
      std::error_code error;
      const bool same_pool = known.pool() == proto::AbsolutePools(pool) ||
                             std::filesystem::equivalent(known.pool(), pool, error);
      if (known.job() == job && same_pool) return address.socket;
    }
  }
  return MakeError(ErrorId::kStoreLocked,
                   absl::StrCat("job ", job, " of ", pool, " is in use, and no daemon that this ",
                                "user can reach has it"),
                   "Name its daemon in OFFLOADD_SOCKET, or wait until the run ends");
}

absl::StatusOr<uint64_t> AskCreateSnapshot(
    const std::string& socket, const SnapshotName& snapshot, bool may_grow,
    const std::function<void(uint64_t, uint64_t)>& progress) {
  OFFLOAD_ASSIGN_OR_RETURN(const Connection connection, Connect(socket));
  grpc::ClientContext context;  // no deadline: growing takes as long as it takes
  proto::v1::CreateSnapshotRequest request;
  request.set_pool(proto::AbsolutePools(snapshot.pool));
  request.set_job(snapshot.job);
  request.set_name(snapshot.name);
  request.set_may_grow(may_grow);
  const auto reader = connection.stub->CreateSnapshot(&context, request);
  proto::v1::CreateSnapshotProgress message;
  while (reader->Read(&message)) {
    if (!message.done()) progress(message.bytes_formatted(), message.bytes_total());
  }
  OFFLOAD_RETURN_IF_ERROR(Judge(connection, reader->Finish()));
  return message.step();
}

absl::Status AskDeleteSnapshot(const std::string& socket, const SnapshotName& snapshot) {
  OFFLOAD_ASSIGN_OR_RETURN(const Connection connection, Connect(socket));
  grpc::ClientContext context;
  proto::v1::DeleteSnapshotRequest request;
  request.set_pool(proto::AbsolutePools(snapshot.pool));
  request.set_job(snapshot.job);
  request.set_name(snapshot.name);
  proto::v1::Empty reply;
  return Judge(connection, connection.stub->DeleteSnapshot(&context, request, &reply));
}

std::string FormatDuration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  if (whole < 60) return absl::StrFormat("%ds", whole);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
}

}  // namespace offload::tools

#include "tools/daemons.h"

#include <glob.h>
#include <grpcpp/grpcpp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/error.h"
#include "proto/grpc_status.h"
#include "proto/offload.grpc.pb.h"

namespace offload::tools {
namespace {

constexpr char kRankSocket[] = "offloadd.sock";
constexpr char kControlSocket[] = "control.sock";
constexpr size_t kDaemonsMax = 256;

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

// The channel's text says "failed to connect to all addresses"; people want to know where.
absl::Status NoAnswer(const std::string& control, const absl::Status& status) {
  return MakeError(ErrorId::kDaemonStart,
                   absl::StrCat("no daemon answers at ", control, ": ", status.message()),
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

absl::StatusOr<proto::v1::StatusReply> AskStatus(const std::string& socket,
                                                 double timeout_seconds) {
  const std::filesystem::path path = std::filesystem::absolute(socket);
  const std::string control = path.parent_path() / kControlSocket;
  if (control.size() > proto::kSocketPathBytesMax) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("socket path ", control, " is longer than ",
                                                      proto::kSocketPathBytesMax, " bytes"));
  }
  const auto channel =
      grpc::CreateCustomChannel(proto::ControlAddress(control), grpc::InsecureChannelCredentials(),
                                proto::ControlChannelArguments());
  const auto stub = proto::v1::Control::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1e3)));
  proto::v1::StatusReply reply;
  const absl::Status status =
      proto::FromGrpc(stub->Status(&context, proto::v1::StatusRequest(), &reply));
  if (status.ok()) return reply;
  return absl::IsUnavailable(status) ? NoAnswer(control, status) : status;
}

std::string FormatDuration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  if (whole < 60) return absl::StrFormat("%ds", whole);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
}

}  // namespace offload::tools

#include "offloadd/metrics_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::daemon {
namespace {

constexpr int kBacklog = 16;
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

absl::Status CannotServe(const std::string& path) {
  return MakeError(ErrorId::kDaemonStart, absl::StrCat("the metrics socket ", path,
                                                       " cannot be served: ", ErrnoText(errno)));
}

absl::StatusOr<UniqueFd> ListenAt(const std::string& path) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    return CannotServe(path);
  }
  path.copy(address.sun_path, path.size());
  unlink(path.c_str());
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return CannotServe(path);
  fchmod(listener.get(), 0600);  // the mode of the inode, whatever the umask
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), 0600) != 0 || listen(listener.get(), kBacklog) != 0) {
    return CannotServe(path);
  }
  return listener;
}

const char* ReasonOf(HttpVerdict verdict) {
  switch (verdict) {
    case HttpVerdict::kOk:
      return "200 OK";
    case HttpVerdict::kNotFound:
      return "404 Not Found";
    case HttpVerdict::kNotAllowed:
      return "405 Method Not Allowed";
    case HttpVerdict::kTooLarge:
      return "431 Request Header Fields Too Large";
    case HttpVerdict::kIncomplete:
      return "408 Request Timeout";
    case HttpVerdict::kBadRequest:
      break;
  }
  return "400 Bad Request";
}

std::string Answer(HttpVerdict verdict, std::string_view body) {
  const char* const reason = ReasonOf(verdict);
  const std::string refusal = absl::StrCat(reason, "; GET /metrics is what there is\n");
  if (verdict != HttpVerdict::kOk) body = refusal;
  return absl::StrCat("HTTP/1.1 ", reason,
                      "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8"
                      "\r\nContent-Length: ",
                      body.size(), "\r\nConnection: close\r\n\r\n", ToAbsl(body));
}

}  // namespace

HttpVerdict JudgeRequest(std::string_view head) {
  const bool is_whole = head.find("\r\n\r\n") != std::string_view::npos ||
                        head.find("\n\n") != std::string_view::npos;
  if (head.size() > MetricsServer::kRequestBytesMax) return HttpVerdict::kTooLarge;
  if (!is_whole) return HttpVerdict::kIncomplete;
  const std::string_view line = head.substr(0, head.find_first_of("\r\n"));
  const size_t method_end = line.find(' ');
  const size_t target_end = line.rfind(' ');
  if (method_end == std::string_view::npos || target_end == method_end ||
      !line.substr(target_end + 1).starts_with("HTTP/1."))
    return HttpVerdict::kBadRequest;
  if (line.substr(0, method_end) != "GET") return HttpVerdict::kNotAllowed;
  std::string_view target = line.substr(method_end + 1, target_end - method_end - 1);
  target = target.substr(0, target.find('?'));
  return target == "/metrics" ? HttpVerdict::kOk : HttpVerdict::kNotFound;
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& path, std::function<std::string()> text) {
  absl::StatusOr<UniqueFd> listener = ListenAt(path);
  if (!listener.ok()) return listener.status();
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return CannotServe(path);
  std::unique_ptr<MetricsServer> server(
      new MetricsServer(path, std::move(text), *std::move(listener), std::move(stop)));
  server->thread_ = std::thread([raw = server.get()] {
    prctl(PR_SET_NAME, "metrics");
    raw->Run();
  });
  return server;
}

MetricsServer::MetricsServer(std::string path, std::function<std::string()> text, UniqueFd listener,
                             UniqueFd stop)
    : path_(std::move(path)),
      make_text_(std::move(text)),
      listener_(std::move(listener)),
      stop_(std::move(stop)) {}

MetricsServer::~MetricsServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
  unlink(path_.c_str());
}

void MetricsServer::Run() {
  for (;;) {
    pollfd events[] = {{.fd = stop_.get(), .events = POLLIN},
                       {.fd = listener_.get(), .events = POLLIN}};
    if (poll(events, 2, -1) < 0) continue;  // EINTR
    if (events[0].revents != 0) return;
    const UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      Serve(socket.get());
    } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      std::this_thread::sleep_for(kAcceptPause);  // out of descriptors
    }
  }
}

void MetricsServer::Serve(int socket) {
  const HttpVerdict verdict = ReadRequest(socket);
  Send(socket, Answer(verdict, verdict == HttpVerdict::kOk ? Text() : ""));
}

bool MetricsServer::Await(int socket, short events, double deadline_seconds) const {
  const double left_seconds = deadline_seconds - Clock::Real().NowSeconds();
  if (left_seconds <= 0) return false;
  pollfd waiting[] = {{.fd = stop_.get(), .events = POLLIN}, {.fd = socket, .events = events}};
  const int ready = poll(waiting, 2, static_cast<int>(left_seconds * 1e3) + 1);
  return (ready > 0 || (ready < 0 && errno == EINTR)) && waiting[0].revents == 0;
}

HttpVerdict MetricsServer::ReadRequest(int socket) const {
  const double deadline = Clock::Real().NowSeconds() + kRequestSeconds;
  std::string head;
  char piece[1024];
  while (Await(socket, POLLIN, deadline)) {
    const ssize_t length = recv(socket, piece, sizeof(piece), 0);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (length <= 0) return HttpVerdict::kBadRequest;
    head.append(piece, static_cast<size_t>(length));
    const HttpVerdict verdict = JudgeRequest(head);
    if (verdict != HttpVerdict::kIncomplete) return verdict;
  }
  return HttpVerdict::kIncomplete;
}

void MetricsServer::Send(int socket, std::string_view answer) const {
  const double deadline = Clock::Real().NowSeconds() + kAnswerSeconds;
  while (!answer.empty() && Await(socket, POLLOUT, deadline)) {
    const ssize_t length = send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (length < 0) return;
    answer.remove_prefix(static_cast<size_t>(length));
  }
  shutdown(socket, SHUT_WR);
}

const std::string& MetricsServer::Text() {
  const double now = Clock::Real().NowSeconds();
  if (text_seconds_ < 0 || now - text_seconds_ >= kTextSeconds) {
    text_ = make_text_();
    text_seconds_ = Clock::Real().NowSeconds();
  }
  return text_;
}

}  // namespace offload::daemon

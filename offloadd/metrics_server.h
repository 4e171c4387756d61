// offloadd/metrics_server.h
//
// Answers HTTP at a Unix socket of the daemon's own user: GET /metrics. For collectors, and for
// curl --unix-socket.
//
// One thread serves one reader at a time, and gives each a second to ask and two to take the
// answer; a text serves all who ask within a tenth of a second. So whatever readers do, they cost
// the jobs no more than ten looks a second, the daemon one thread and one text, and each other
// three seconds.
//
// Thread safety: Start() and the destructor on one thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace offload::daemon {

// What to answer to the head of a request.
enum class HttpVerdict { kIncomplete, kOk, kBadRequest, kNotFound, kNotAllowed, kTooLarge };
HttpVerdict JudgeRequest(std::string_view head);

class MetricsServer {
 public:
  static constexpr size_t kRequestBytesMax = 8192;
  static constexpr double kRequestSeconds = 1, kAnswerSeconds = 2, kTextSeconds = 0.1;

  // Listens at `path`, which is replaced, with mode 0600. `text` is called on the server's thread.
  // OFD-1501 when the socket cannot be made.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& path,
                                                              std::function<std::string()> text);
  ~MetricsServer();  // removes the socket
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

 private:
  MetricsServer(std::string path, std::function<std::string()> text, UniqueFd listener,
                UniqueFd stop);
  void Run();
  void Serve(int socket);
  // Waits until the socket is ready or the time is over; false then, and when the server stops.
  bool Await(int socket, short events, double deadline_seconds) const;
  HttpVerdict ReadRequest(int socket) const;
  void Send(int socket, std::string_view answer) const;
  const std::string& Text();

  const std::string path_;
  const std::function<std::string()> make_text_;
  const UniqueFd listener_, stop_;
  std::string text_;
  double text_seconds_ = -1;
  std::thread thread_;
};

}  // namespace offload::daemon

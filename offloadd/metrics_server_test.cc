#include "offloadd/metrics_server.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

class MetricsServerTest : public testing::Test {
 protected:
  MetricsServerTest() {
    char name[] = "/tmp/metrics-XXXXXX";  // short: paths of sockets are limited
    folder_ = mkdtemp(name);
  }
  ~MetricsServerTest() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start(std::string text = "offloadd_clients 1\n") {
    auto server = MetricsServer::Start(path(), [this, text = std::move(text)] {
      ++texts_;
      return text;
    });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string path() const { return folder_ + "/metrics.sock"; }

  UniqueFd Connect() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {.sun_family = AF_UNIX};
    path().copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
        << ErrnoText(errno);
    return socket;
  }
  static std::string ReadAll(int socket) {
    std::string answer;
    char piece[65536];
    for (ssize_t length; (length = recv(socket, piece, sizeof(piece), 0)) > 0;)
      answer.append(piece, static_cast<size_t>(length));
    return answer;
  }
  std::string Ask(const std::string& request) const {
    const UniqueFd socket = Connect();
    EXPECT_EQ(send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    return ReadAll(socket.get());
  }

  std::string folder_;
  std::atomic<int> texts_{0};
  std::unique_ptr<MetricsServer> server_;
};

constexpr char kGet[] = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

TEST_F(MetricsServerTest, AnswersWithTheTextAndItsLength) {
  Start();
  const std::string answer = Ask(kGet);
  EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "Content-Type: text/plain; version=0.0.4"));
  EXPECT_TRUE(absl::StrContains(answer, "Content-Length: 19\r\n")) << answer;
  EXPECT_TRUE(absl::EndsWith(answer, "\r\n\r\noffloadd_clients 1\n")) << answer;
}

TEST_F(MetricsServerTest, OnlyItsUserMayReadAndTheSocketGoesWithTheServer) {
  Start();
  struct stat info = {};
  ASSERT_EQ(stat(path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(MetricsServerTest, AnAnswerLargerThanTheSocketHoldsArrivesWhole) {
  const std::string text(8 << 20, 'x');
  Start(text);
  const std::string answer = Ask(kGet);
  EXPECT_EQ(answer.size() - answer.find("\r\n\r\n") - 4, text.size());
}

TEST_F(MetricsServerTest, OtherRequestsAreRefusedAndAskNobody) {
  Start();
  EXPECT_TRUE(absl::StartsWith(Ask("GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 404"));
  EXPECT_TRUE(absl::StartsWith(Ask("POST /metrics HTTP/1.1\r\n\r\n"), "HTTP/1.1 405"));
  EXPECT_TRUE(absl::StartsWith(Ask("hello\r\n\r\n"), "HTTP/1.1 400"));
  EXPECT_EQ(texts_, 0);
}

TEST_F(MetricsServerTest, WhoNeverAsksOrNeverReadsKeepsOthersWaitingForSecondsOnly) {
  Start(std::string(8 << 20, 'x'));
  const UniqueFd silent = Connect();
  const UniqueFd slow = Connect();
  ASSERT_GT(send(slow.get(), kGet, sizeof(kGet) - 1, MSG_NOSIGNAL), 0);  // and reads nothing
  EXPECT_TRUE(absl::StartsWith(Ask(kGet), "HTTP/1.1 200"));
  EXPECT_TRUE(absl::StartsWith(ReadAll(silent.get()), "HTTP/1.1 408"));
}

TEST_F(MetricsServerTest, AnEndlessRequestIsCutOff) {
  Start();
  const UniqueFd socket = Connect();
  const std::string piece(1024, 'x');
  ssize_t sent = 0;
  for (int i = 0; i < 10000 && sent >= 0; ++i)
    sent = send(socket.get(), piece.data(), piece.size(), MSG_NOSIGNAL);
  EXPECT_LT(sent, 0) << "the server took ten megabytes";
  EXPECT_TRUE(absl::StartsWith(Ask(kGet), "HTTP/1.1 200"));
}

TEST_F(MetricsServerTest, ManyReadersShareATextForATenthOfASecond) {
  Start();
  constexpr int kReaders = 200;
  const double begin = Clock::Real().NowSeconds();
  for (int i = 0; i < kReaders; ++i) EXPECT_TRUE(absl::EndsWith(Ask(kGet), "clients 1\n"));
  const double seconds = Clock::Real().NowSeconds() - begin;
  EXPECT_LE(texts_, seconds / MetricsServer::kTextSeconds + 1);
}

TEST_F(MetricsServerTest, APathThatIsTooLongIsAnError) {
  const auto server = MetricsServer::Start("/tmp/" + std::string(200, 'x'), [] { return ""; });
  EXPECT_EQ(ErrorIdOf(server.status()), ErrorId::kDaemonStart);
}

TEST(JudgeRequestTest, SeesTheEndOfTheHead) {
  EXPECT_EQ(JudgeRequest("GET /metrics HTTP/1.1\r\n"), HttpVerdict::kIncomplete);
  EXPECT_EQ(JudgeRequest("GET /metrics HTTP/1.0\n\n"), HttpVerdict::kOk);
  EXPECT_EQ(JudgeRequest("GET /metrics?name[]=x HTTP/1.1\r\n\r\n"), HttpVerdict::kOk);
  EXPECT_EQ(JudgeRequest("GET  HTTP/1.1\r\n\r\n"), HttpVerdict::kNotFound);
  EXPECT_EQ(JudgeRequest("GET HTTP/1.1\r\n\r\n"), HttpVerdict::kBadRequest);
  EXPECT_EQ(JudgeRequest(std::string(MetricsServer::kRequestBytesMax + 1, 'x')),
            HttpVerdict::kTooLarge);
}

}  // namespace
}  // namespace offload::daemon

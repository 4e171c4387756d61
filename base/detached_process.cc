#include "base/detached_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace offload {
namespace {

// A pipe takes so few bytes whole. Nobody may read any more: then nobody wants to know.
void WriteReport(int report, int32_t number) {
  while (::write(report, &number, sizeof number) < 0 && errno == EINTR) {
  }
}

[[noreturn]] void ReportEnd(pid_t child, int report) {
  ::prctl(PR_SET_NAME, "offloadd-waits");  // for who lists processes
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
  ::close_range(0, static_cast<unsigned>(report) - 1, 0);
  ::close_range(static_cast<unsigned>(report) + 1, ~0u, 0);
  int status = 0;
  pid_t ended = -1;
  do {
    ended = ::waitpid(child, &status, 0);
  } while (ended < 0 && errno == EINTR);
  if (ended == child) WriteReport(report, status);
  ::_exit(0);
}

}  // namespace

void Detach(int report) {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGCHLD, SIG_DFL);  // ignored, it would leave no status to wait for
  const pid_t waiting = ::fork();
  if (waiting > 0) ::_exit(0);
  if (waiting == 0) {
    ::setsid();
    const pid_t child = ::fork();
    if (child > 0) ReportEnd(child, report);
    // Also where there is no child: the end of this one is not reported then.
    WriteReport(report, ::getppid());
    WriteReport(report, ::getpid());
  }
  ::close(report);
}

std::optional<int32_t> ReadReport(int report, int timeout_ms) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  pollfd readable{.fd = report, .events = POLLIN};
  int count = 0;
  do {  // a timer of the process may interrupt each of them
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    count = ::poll(&readable, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
  } while (count < 0 && errno == EINTR);
  int32_t number = 0;
  if (count <= 0 || ::read(report, &number, sizeof number) != sizeof number) return std::nullopt;
  return number;
}

}  // namespace offload

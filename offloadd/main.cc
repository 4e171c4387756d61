// offloadd: the daemon.

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/advice.h"
#include "base/detached_process.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/string_view.h"
#include "base/version.h"
#include "base/worker_pool.h"
#include "offloadd/daemon.h"
#include "offloadd/limits.h"
#include "offloadd/sandbox.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

struct Flags {
  DaemonOptions daemon;
  int report = -1;
  std::string log_level;
  std::string sandbox = "on";
};

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_flag("--private", flags.daemon.is_private,
               "Serve the process that started this one, and end with it");
  app.add_option("--socket", flags.daemon.socket_path,
                 "Path of the socket that ranks connect to; control.sock and metrics.sock are put "
                 "beside it")
      ->type_name("PATH")
      ->required();
  app.add_option("--parent-pid", flags.daemon.parent_pid,
                 "The process that a private daemon serves")
      ->type_name("N");
  app.add_option("--detach", flags.report,
                 "Be no child of the process that started this one, and write to this descriptor "
                 "which process goes on, and how it ended")
      ->type_name("N")
      ->check(CLI::Range(3, 1 << 20));
  app.add_option("--ranks", flags.daemon.rank_count,
                 "How many ranks of one launch share a private daemon")
      ->type_name("N")
      ->check(CLI::Range(1u, kLimits.ranks_max));
  app.add_option(
         "--directory-lock", flags.daemon.directory_lock,
         "A descriptor that holds the lock of the directory they meet in, until this daemon "
         "has ended")
      ->type_name("N")
      ->check(CLI::Range(3, 1 << 20));
  app.add_option("--pool", flags.daemon.pools.allowed,
                 "A directory that jobs may live in; the first one is the default (repeatable)")
      ->type_name("DIR");
  app.add_option("--allow-uid", flags.daemon.peers.uids,
                 "A user whose trainers are admitted, beside this daemon's own (repeatable)")
      ->type_name("N");
  app.add_option("--allow-gid", flags.daemon.peers.gids,
                 "A group whose members' trainers are admitted (repeatable)")
      ->type_name("N");
  app.add_option("--handshake-timeout", flags.daemon.handshake_timeout_seconds,
                 "How long a client may take with its part of the handshake")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--drain-timeout", flags.daemon.drain_timeout_seconds,
                 "How long jobs may take to end after SIGTERM")
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option(
         "--sandbox", flags.sandbox,
         "on: no capabilities, and only the system calls that serving takes; strict: another "
         "one ends the daemon; off: for debuggers")
      ->envname("OFFLOADD_SANDBOX")
      ->check(CLI::IsMember(ChoicesIn(kSandboxChoices)));
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  app.set_version_flag("--version", std::string("offloadd ") + kVersion);
}

// A private daemon says what it chose and what goes wrong: it writes into the trainer's terminal.
void SetUpLog(const Flags& flags) {
  auto logger = spdlog::stderr_logger_mt("offloadd");
  logger->set_pattern(flags.daemon.is_private ? "offloadd: %v"
                                              : "%Y-%m-%d %H:%M:%S.%e offloadd[%P] %l: %v");
  logger->set_level(spdlog::level::from_str(flags.log_level.empty() ? "info" : flags.log_level));
  spdlog::set_default_logger(logger);
}

void SetUpProcess(bool is_private) {
  umask(0077);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond a limit is an error, not the end
  std::signal(SIGXCPU, SIG_IGN);  // a trainer that handles it goes on, up to the hard limit
  // Sessions have a dozen descriptors each.
  if (rlimit files; getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  // The terminal's Ctrl-C is meant for the trainer; its end is ours, after draining.
  if (is_private) {
    setsid();
    std::signal(SIGINT, SIG_IGN);
    std::signal(SIGHUP, SIG_IGN);
  }
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  if (!is_private) sigaddset(&signals, SIGINT);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
}

constexpr rlim_t kOpenFilesMin = 40;  // with the job of one rank on one drive

// With fewer it would begin to listen, and then refuse whoever comes.
absl::Status CheckOpenFiles() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= kOpenFilesMin)
    return absl::OkStatus();
  return MakeError(ErrorId::kOpenFiles, absl::StrCat("the limit of open files is ", files.rlim_cur,
                                                     ", and the daemon needs ", kOpenFilesMin));
}

// gRPC would abort.
absl::Status CheckThreads() {
  const size_t startable = CountStartableThreads(kLimits.threads_at_start);
  if (startable == kLimits.threads_at_start) return absl::OkStatus();
  return MakeError(ErrorId::kDaemonStart,
                   absl::StrCat("the daemon can start ", startable, " threads, and needs ",
                                kLimits.threads_at_start),
                   kThreadsFix);
}

// A container may have taken away what a part of the sandbox needs: the daemon runs without that
// part and says so, unless it was told to be strict.
bool InForce(SandboxMode mode, const absl::Status& status) {
  if (status.ok()) return true;
  spdlog::warn("the sandbox is not complete: {}", ToStd(status.message()));
  return mode != SandboxMode::kStrict;
}

int Main(int argc, char** argv) {
  CLI::App app("offloadd: keeps the state of training runs on NVMe and runs their optimizer");
  Flags flags;
  AddFlags(app, flags);
  CLI11_PARSE(app, argc, argv);
  if (flags.report >= 0) Detach(flags.report);
  if (!flags.daemon.pools.allowed.empty())
    flags.daemon.pools.default_pool = flags.daemon.pools.allowed.front();
  SetUpProcess(flags.daemon.is_private);
  SetUpLog(flags);
  absl::Status resources = CheckOpenFiles();
  if (resources.ok()) resources = CheckThreads();
  if (!resources.ok()) {
    std::fprintf(stderr, "offloadd: %s\n", std::string(resources.message()).c_str());
    return 1;
  }
  const std::vector<std::string> environment = EnvironmentOfThisProcess();
  if (const absl::Status status = CheckEnvironment(environment); !status.ok()) {
    std::fprintf(stderr, "offloadd: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  if (!flags.daemon.is_private) {  // the trainer has said it
    for (const std::string& unknown : UnknownVariables(environment)) spdlog::warn("{}", unknown);
  }
  spdlog::debug("limits: {} sessions, {} calls of each, {} ranks of a job, {} s for room",
                kLimits.sessions_max, kLimits.calls_per_session_max, kLimits.ranks_max,
                kLimits.room_timeout_seconds);
  const SandboxMode sandbox = *ParseSandboxMode(flags.sandbox);
  if (sandbox != SandboxMode::kOff && !InForce(sandbox, DropPrivileges())) return 1;
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Create(flags.daemon);
  if (!daemon.ok()) {
    std::fprintf(stderr, "offloadd: %s\n", std::string(daemon.status().message()).c_str());
    return 1;
  }
  if (sandbox != SandboxMode::kOff && !InForce(sandbox, RestrictSystemCalls(sandbox))) return 1;
  if (!flags.daemon.is_private) spdlog::info("listening at {}", flags.daemon.socket_path);
  (*daemon)->Run();
  return 0;
}

}  // namespace
}  // namespace offload::daemon

int main(int argc, char** argv) { return offload::daemon::Main(argc, argv); }

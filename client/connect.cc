#include "client/connect.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/advice.h"
#include "base/detached_process.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "client/leftovers.h"
#include "proto/socket_directory.h"

extern char** environ;

namespace offload::client {
namespace {

constexpr int kStartTimeoutMilliseconds = 10'000;
constexpr int kStartPollMilliseconds = 5;
constexpr int kEndTimeoutMilliseconds = 120'000;
constexpr int kReportTimeoutMilliseconds = 1'000;

absl::Status StartError(const std::string& what) { return MakeError(ErrorId::kDaemonStart, what); }

// The daemon has the trainer's standard error.
absl::Status EndedAtOnce(const std::string& end) {
  return MakeError(ErrorId::kDaemonStart, absl::StrCat("the private daemon ended at once: ", end),
                   "See what it has written to the standard error");
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

bool IsProgram(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         ::access(path.c_str(), X_OK) == 0;
}

std::string DirectoryOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

// The program, and the shared library if this code is in one (a Python package).
std::vector<std::string> DirectoriesOfThisCode() {
  std::vector<std::string> directories;
  char program[4096];
  const ssize_t length = ::readlink("/proc/self/exe", program, sizeof(program) - 1);
  if (length > 0) directories.push_back(DirectoryOf(std::string(program, length)));
  Dl_info library{};
  if (::dladdr(reinterpret_cast<void*>(&FindDaemonBinary), &library) != 0 &&
      library.dli_fname != nullptr && library.dli_fname[0] == '/') {
    directories.push_back(DirectoryOf(library.dli_fname));
  }
  return directories;
}

// Private to this user; short, since socket paths are.
absl::StatusOr<std::string> MakeDirectory() {
  constexpr size_t kLongestName = sizeof("/offloadd-XXXXXX/offloadd.sock");
  const std::string runtime = Variable("XDG_RUNTIME_DIR");
  for (const std::string& parent : {runtime, std::string("/tmp")}) {
    if (parent.empty() || parent.size() + kLongestName > proto::kSocketPathBytesMax) continue;
    RemoveLeftovers(parent);
    std::string directory = absl::StrCat(parent, "/offloadd-XXXXXX");
    if (::mkdtemp(directory.data()) == nullptr) continue;
    // The umask may have taken bits away.
    if (::chmod(directory.c_str(), 0700) == 0) return directory;
  }
  return MakeError(
      ErrorId::kDaemonStart,
      absl::StrCat("no directory for the daemon's socket can be made in /tmp: ", ErrnoText(errno)),
      absl::StrCat("Set XDG_RUNTIME_DIR to a directory that this user may write to, of at most ",
                   proto::kSocketPathBytesMax - kLongestName, " bytes"));
}

// Arguments as posix_spawn wants them; the strings outlive it.
std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// A preloaded attach library must not attach the daemon to itself.
std::vector<std::string> EnvironmentForDaemon() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::strncmp(*variable, "LD_PRELOAD=", 11) != 0) variables.emplace_back(*variable);
  }
  return variables;
}

constexpr char kNullDevice[] = "/dev/null";
constexpr int kInheritedReport = STDERR_FILENO + 1, kInheritedLock = kInheritedReport + 1;

// Descriptors `report` and `lock` become kInheritedReport and kInheritedLock in the daemon; -1:
// there is no lock. Neither has such a number here. The calls can only fail for want of memory;
// then the daemon is not started.
class SpawnSettings {
 public:
  SpawnSettings(int report, int lock) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, kNullDevice, O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions_, STDERR_FILENO, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, report, kInheritedReport);
    if (lock >= 0) ::posix_spawn_file_actions_adddup2(&actions_, lock, kInheritedLock);
    ::posix_spawn_file_actions_addclosefrom_np(&actions_,
                                               lock >= 0 ? kInheritedLock + 1 : kInheritedLock);
    ::posix_spawnattr_init(&attributes_);
    sigset_t signals;
    ::sigemptyset(&signals);
    ::posix_spawnattr_setsigmask(&attributes_, &signals);
    ::sigfillset(&signals);
    ::posix_spawnattr_setsigdefault(&attributes_, &signals);
    ::posix_spawnattr_setpgroup(&attributes_, 0);
    ::posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// The same, with a number beyond those that a daemon inherits.
absl::StatusOr<UniqueFd> MovedUp(int descriptor) {
  UniqueFd moved(::fcntl(descriptor, F_DUPFD_CLOEXEC, kInheritedLock + 1));
  if (!moved.valid()) return StartError(absl::StrCat("fcntl: ", ErrnoText(errno)));
  return moved;
}

struct Pipe {
  UniqueFd reading, writing;
};
absl::StatusOr<Pipe> MakePipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return StartError(absl::StrCat("pipe2: ", ErrnoText(errno)));
  Pipe pipe{.reading = UniqueFd(ends[0]), .writing = UniqueFd(ends[1])};
  OFFLOAD_ASSIGN_OR_RETURN(pipe.writing, MovedUp(ends[1]));
  return pipe;
}

bool WaitUntilEnded(int pidfd, std::chrono::steady_clock::time_point deadline) {
  using Clock = std::chrono::steady_clock;
  pollfd ended{.fd = pidfd, .events = POLLIN};
  int count = 0;
  do {  // a trainer's timer may interrupt each of them
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    count = ::poll(&ended, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
  } while (count < 0 && errno == EINTR);
  return count > 0;
}

// Not valid where it has ended, or the system refuses it.
UniqueFd OpenProcess(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// Of a child that has ended or is about to; missing when somebody else has.
std::optional<int> Reap(pid_t child) {
  int status = 0;
  pid_t reaped = -1;
  do {
    reaped = ::waitpid(child, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  return reaped == child ? std::optional<int>(status) : std::nullopt;
}

std::string EndText(int status) {
  if (WIFSIGNALED(status))
    return absl::StrCat("signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  return absl::StrCat("exit status ", WEXITSTATUS(status));
}

std::vector<std::string> NodeSockets() {
  std::vector<std::string> paths;
  const std::string runtime = Variable("XDG_RUNTIME_DIR");
  if (!runtime.empty()) paths.push_back(absl::StrCat(runtime, "/offloadd/offloadd.sock"));
  paths.push_back("/run/offloadd/offloadd.sock");
  return paths;
}

absl::StatusOr<Connection> Meet(UniqueFd socket) {
  Connection connection{.socket = std::move(socket)};
  OFFLOAD_ASSIGN_OR_RETURN(connection.welcome, proto::Greet(connection.socket.get()));
  return connection;
}

absl::StatusOr<Connection> MeetStarted(PrivateDaemon daemon) {
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd socket, daemon.ConnectWhenReady());
  absl::StatusOr<Connection> connection = Meet(std::move(socket));
  if (connection.ok()) {
    connection->private_daemon = std::move(daemon);
    return connection;
  }
  if (ErrorIdOf(connection.status()) == ErrorId::kDaemonLost) {
    // It listens before it has all that it serves with.
    const std::string end = daemon.DescribeEnd(kStartTimeoutMilliseconds);
    if (!end.empty()) return EndedAtOnce(end);
  }
  daemon.Terminate();  // whom it has refused it would wait for
  return connection;
}

absl::StatusOr<Connection> StartPrivate() {
  OFFLOAD_ASSIGN_OR_RETURN(const std::string binary, FindDaemonBinary());
  OFFLOAD_ASSIGN_OR_RETURN(PrivateDaemon daemon, PrivateDaemon::Start(binary));
  return MeetStarted(std::move(daemon));
}

// Nobody else may have made it, or may look into it.
absl::StatusOr<UniqueFd> OpenOwnDirectory(const std::string& directory) {
  const bool is_made = ::mkdir(directory.c_str(), 0700) == 0;
  if (!is_made && errno != EEXIST)
    return StartError(absl::StrCat(directory, " cannot be made: ", ErrnoText(errno)));
  if (is_made && ::chmod(directory.c_str(), 0700) != 0)  // the umask may have taken bits away
    return StartError(absl::StrCat(directory, ": ", ErrnoText(errno)));
  UniqueFd opened(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status = {};
  if (!opened.valid() || ::fstat(opened.get(), &status) != 0) {
    if (errno == ENOENT) return UniqueFd();  // a daemon has just ended: again
    return StartError(absl::StrCat(directory, ": ", ErrnoText(errno)));
  }
  if (status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    return StartError(
        absl::StrCat(directory, ", where ranks meet, is another user's or open to others"));
  }
  return opened;
}

absl::StatusOr<Connection> StartShared(const std::string& directory, const UniqueFd& lock,
                                       const World& world) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::string binary, FindDaemonBinary());
  OFFLOAD_ASSIGN_OR_RETURN(PrivateDaemon daemon,
                           PrivateDaemon::StartShared(binary, directory, lock, world.world_size));
  return MeetStarted(std::move(daemon));
}

// Whoever has the lock starts the daemon, which keeps the lock until it has ended; who has not
// waits until one listens, or the lock is free.
absl::StatusOr<Connection> FindOrStartShared(const World& world) {
  const std::string directory = RanksDirectory(world.run_id);
  const std::string socket_path = directory + "/offloadd.sock";
  if (socket_path.size() > proto::kSocketPathBytesMax)
    return StartError(absl::StrCat("the path of the socket is too long: ", socket_path));
  const auto deadline =
      std::chrono::steady_clock::now() + 3 * std::chrono::milliseconds(kStartTimeoutMilliseconds);
  while (std::chrono::steady_clock::now() < deadline) {
    OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd opened, OpenOwnDirectory(directory));
    const bool is_ours = proto::LockSocketDirectory(opened, directory);
    // With the lock, too: somebody may have started it just before.
    absl::StatusOr<UniqueFd> socket = proto::ConnectToDaemon(socket_path);
    if (socket.ok()) {
      absl::StatusOr<Connection> connection = Meet(*std::move(socket));
      // The daemon of a launch of the same name may just be ending.
      if (connection.ok() || ErrorIdOf(connection.status()) != ErrorId::kDaemonLost)
        return connection;
    } else if (is_ours) {
      return StartShared(directory, opened, world);
    }
    ::poll(nullptr, 0, kStartPollMilliseconds);
  }
  return StartError(absl::StrCat("rank ", world.rank, " finds no daemon of its launch in ",
                                 directory,
                                 ": another rank is starting one there, or the last one has not "
                                 "ended"));
}

}  // namespace

std::string RanksDirectory(const std::string& run_id) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a: the same in every process
  for (const unsigned char letter : run_id) hash = (hash ^ letter) * 1099511628211u;
  const std::string runtime = Variable("XDG_RUNTIME_DIR");
  return absl::StrCat(runtime.empty() ? "/tmp" : runtime, "/offloadd-ranks-", ::geteuid(), "-",
                      absl::Hex(hash, absl::kZeroPad16));
}

void OpenClosedStreams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    const int opened = ::open(kNullDevice, O_RDWR);
    if (opened >= 0 && opened != stream) ::close(opened);  // another thread was first
  }
}

absl::StatusOr<PrivateDaemon> PrivateDaemon::Start(const std::string& binary) {
  PrivateDaemon daemon;
  OFFLOAD_ASSIGN_OR_RETURN(daemon.directory_, MakeDirectory());
  OFFLOAD_RETURN_IF_ERROR(daemon.Spawn(binary, {}));
  return daemon;
}

absl::StatusOr<PrivateDaemon> PrivateDaemon::StartShared(const std::string& binary,
                                                         const std::string& directory,
                                                         const UniqueFd& lock,
                                                         uint32_t rank_count) {
  PrivateDaemon daemon;
  daemon.is_shared_ = true;
  daemon.directory_ = directory;
  OFFLOAD_RETURN_IF_ERROR(daemon.Spawn(binary, {"--ranks", absl::StrCat(rank_count)}, lock.get()));
  return daemon;
}

absl::Status PrivateDaemon::Spawn(const std::string& binary,
                                  const std::vector<std::string>& more_arguments, int lock) {
  std::vector<std::string> arguments = {binary,         "--private",
                                        "--socket",     socket_path(),
                                        "--parent-pid", absl::StrCat(::getpid()),
                                        "--detach",     absl::StrCat(kInheritedReport)};
  arguments.insert(arguments.end(), more_arguments.begin(), more_arguments.end());
  if (lock >= 0)
    arguments.insert(arguments.end(), {"--directory-lock", absl::StrCat(kInheritedLock)});
  std::vector<std::string> environment = EnvironmentForDaemon();
  OFFLOAD_ASSIGN_OR_RETURN(Pipe report, MakePipe());
  report_ = std::move(report.reading);
  UniqueFd moved_lock;
  if (lock >= 0) {
    OFFLOAD_ASSIGN_OR_RETURN(moved_lock, MovedUp(lock));
  }
  const SpawnSettings settings(report.writing.get(), moved_lock.get());
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, binary.c_str(), settings.actions(), settings.attributes(),
                                  Pointers(arguments).data(), Pointers(environment).data());
  if (error != 0) {
    if (::access(kNullDevice, R_OK) != 0) {
      return MakeError(ErrorId::kDaemonStart,
                       absl::StrCat(kNullDevice, " cannot be opened: ", ErrnoText(errno)),
                       "Mount /dev (in a chroot: mount --bind /dev DIR/dev)");
    }
    return StartError(absl::StrCat("\"", binary, "\" cannot be run: ", ErrnoText(error)));
  }
  pid_ = pid;
  pidfd_ = OpenProcess(pid);
  if (!pidfd_.valid()) {
    const absl::Status error = MakeError(
        ErrorId::kDaemonStart, absl::StrCat("pidfd_open of process ", pid, ": ", ErrnoText(errno)),
        absl::StrCat(kSeccompFix, "; it takes Linux 5.3"));
    ::kill(pid, SIGKILL);
    return error;
  }
  return absl::OkStatus();
}

PrivateDaemon::PrivateDaemon(PrivateDaemon&& other) noexcept
    : is_shared_(other.is_shared_),
      is_child_(other.is_child_),
      pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      waiting_pidfd_(std::move(other.waiting_pidfd_)),
      report_(std::move(other.report_)),
      directory_(std::exchange(other.directory_, {})),
      end_(std::exchange(other.end_, {})) {}

PrivateDaemon& PrivateDaemon::operator=(PrivateDaemon&& other) noexcept {
  if (this == &other) return *this;
  WaitForEnd();
  is_shared_ = other.is_shared_;
  is_child_ = other.is_child_;
  pid_ = std::exchange(other.pid_, -1);
  pidfd_ = std::move(other.pidfd_);
  waiting_pidfd_ = std::move(other.waiting_pidfd_);
  report_ = std::move(other.report_);
  directory_ = std::exchange(other.directory_, {});
  end_ = std::exchange(other.end_, {});
  return *this;
}

bool PrivateDaemon::Follow(int timeout_ms) {
  if (!is_child_ || !report_.valid()) return false;
  const std::optional<int32_t> waiting = ReadReport(report_.get(), timeout_ms);
  if (!waiting.has_value()) return false;
  const std::optional<int32_t> number = ReadReport(report_.get(), kReportTimeoutMilliseconds);
  if (!number.has_value()) return false;
  Reap(pid_);  // it has started the process that writes, and ends
  is_child_ = false;
  pid_ = *number;
  pidfd_ = OpenProcess(pid_);
  waiting_pidfd_ = OpenProcess(*waiting);
  return true;
}

bool PrivateDaemon::HasEnded(int timeout_ms) {
  if (!end_.empty()) return true;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  if (pidfd_.valid() && !WaitUntilEnded(pidfd_.get(), deadline)) return false;
  // What it has written is there, or the pipe ends with it.
  if (Follow(kReportTimeoutMilliseconds) && pidfd_.valid() &&
      !WaitUntilEnded(pidfd_.get(), deadline))
    return false;
  if (is_child_) {
    const std::optional<int> status = Reap(pid_);
    end_ = status.has_value() ? EndText(*status) : "unknown: the trainer reaps its children itself";
  } else {
    const std::optional<int32_t> status = ReadReport(report_.get(), kReportTimeoutMilliseconds);
    end_ = status.has_value() ? EndText(*status) : "unknown: who waited for it has ended";
    ReapAdopted();
  }
  return true;
}

std::string PrivateDaemon::DescribeEnd(int timeout_ms) {
  return valid() && HasEnded(timeout_ms) ? end_ : std::string();
}

absl::StatusOr<UniqueFd> PrivateDaemon::ConnectWhenReady() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline =
      Clock::now() + std::chrono::milliseconds(kStartTimeoutMilliseconds);
  for (;;) {
    absl::StatusOr<UniqueFd> socket = proto::ConnectToDaemon(socket_path());
    if (socket.ok()) {
      Follow(0);  // a daemon that listens has said where it is
      return socket;
    }
    if (HasEnded(kStartPollMilliseconds)) {
      return EndedAtOnce(end_);
    }
    if (Clock::now() >= deadline) {
      Signal(SIGKILL);
      return StartError(absl::StrCat("the private daemon did not listen within ",
                                     kStartTimeoutMilliseconds / 1000, " s"));
    }
  }
}

void PrivateDaemon::Terminate() const {
  if (valid() && !is_shared_) Signal(SIGTERM);
}

void PrivateDaemon::WaitForEnd() {
  if (is_shared_) return Forget();
  if (valid() && !HasEnded(kEndTimeoutMilliseconds)) {
    Signal(SIGKILL);
    HasEnded(kEndTimeoutMilliseconds);
  }
  if (!directory_.empty()) proto::RemoveSocketDirectory(directory_);
  Forget();
}

// One that has ended gets none, nor does another process that has its number since.
void PrivateDaemon::Signal(int number) const {
  ::syscall(SYS_pidfd_send_signal, pidfd_.get(), number, nullptr, 0);
}

void PrivateDaemon::ReapAdopted() {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(kReportTimeoutMilliseconds);
  for (const UniqueFd* process : {&pidfd_, &waiting_pidfd_}) {
    if (!process->valid()) continue;
    const auto reap = [&](int flags) {
      siginfo_t end = {};
      return ::waitid(P_PIDFD, static_cast<id_t>(process->get()), &end, WEXITED | flags) == 0;
    };
    const bool is_ours = reap(WNOHANG | WNOWAIT);
    if (is_ours && WaitUntilEnded(process->get(), deadline)) reap(WNOHANG);
  }
}

void PrivateDaemon::Forget() {
  pid_ = -1;
  pidfd_.reset();
  waiting_pidfd_.reset();
  report_.reset();
  directory_.clear();
}

std::vector<std::string> DaemonBinaryCandidates() {
  std::vector<std::string> candidates;
  for (const std::string& directory : DirectoriesOfThisCode()) {
    candidates.push_back(absl::StrCat(directory, "/offloadd"));
    candidates.push_back(absl::StrCat(directory, "/../offloadd/offloadd"));
    candidates.push_back(absl::StrCat(directory, "/../bin/offloadd"));  // installed: lib and bin
  }
  return candidates;
}

absl::StatusOr<std::string> FindDaemonBinary() {
  const std::string chosen = Variable("OFFLOADD_BINARY");
  if (!chosen.empty()) {
    if (IsProgram(chosen)) return chosen;
    return StartError(absl::StrCat("OFFLOADD_BINARY \"", chosen, "\" is no program"));
  }
  for (const std::string& candidate : DaemonBinaryCandidates()) {
    if (IsProgram(candidate)) return candidate;
  }
  for (const absl::string_view directory : absl::StrSplit(Variable("PATH"), ':')) {
    const std::string candidate = absl::StrCat(directory, "/offloadd");
    if (!directory.empty() && IsProgram(candidate)) return candidate;
  }
  return StartError("the program offloadd was not found beside this one or on PATH");
}

absl::StatusOr<Connection> ConnectOrStart(const ConnectOptions& options) {
  const bool has_ranks = options.world.world_size > 1;
  const auto start = [&] { return has_ranks ? FindOrStartShared(options.world) : StartPrivate(); };
  if (options.only_private) return start();
  const std::string chosen = Variable("OFFLOADD_SOCKET");
  if (!chosen.empty()) {
    // Said explicitly: an error, not a fallback.
    OFFLOAD_ASSIGN_OR_RETURN(UniqueFd socket, proto::ConnectToDaemon(chosen));
    return Meet(std::move(socket));
  }
  for (const std::string& path : NodeSockets()) {
    absl::StatusOr<UniqueFd> socket = proto::ConnectToDaemon(path);
    if (socket.ok()) return Meet(*std::move(socket));
  }
  if (options.allow_private) return start();
  return StartError("no daemon runs on this node and a private one is not allowed");
}

}  // namespace offload::client

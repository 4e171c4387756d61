#include "proto/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "proto/cut_text.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace offload::proto {
namespace {

constexpr int kListenBacklog = 64;
constexpr size_t kPassedDescriptors = 3;  // slab, region, doorbell
// Larger than every message, so that a longer one is seen as such.
constexpr size_t kMessageBytesMax = 2048;

absl::Status SystemError(ErrorId id, std::string_view what, int error_number) {
  return MakeError(id, absl::StrCat(ToAbsl(what), ": ", ErrnoText(error_number)));
}

absl::Status Malformed(std::string_view what) {
  return MakeError(ErrorId::kProtocol, absl::StrCat("handshake: ", ToAbsl(what)));
}

// Text in a fixed array, which a peer need not have ended.
template <size_t kSize>
std::string TextIn(const char (&text)[kSize]) {
  return std::string(text, ::strnlen(text, kSize));
}
template <size_t kSize>
void CopyText(std::string_view text, char (&target)[kSize]) {
  const std::string_view cut = CutText(text, kSize - 1);
  std::memcpy(target, cut.data(), cut.size());
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() > kSocketPathBytesMax) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("socket path \"", path, "\" has ", path.size(), " bytes, 1 to ",
                                  kSocketPathBytesMax));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// ---- One message each way ---------------------------------------------------------------------

// Room for the descriptors of one message, aligned as the kernel wants it.
union ControlBuffer {
  cmsghdr header;
  char bytes[CMSG_SPACE(kPassedDescriptors * sizeof(int))];
};

// The socket's buffer has room for all messages that the protocol ever sends, so a send that would
// block is a peer that does not follow it.
absl::Status SendBytes(int socket, const void* message, size_t size_bytes,
                       const std::vector<int>& descriptors = {}) {
  iovec part{const_cast<void*>(message), size_bytes};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  ControlBuffer control{};
  if (!descriptors.empty()) {
    const size_t data_bytes = descriptors.size() * sizeof(int);
    header.msg_control = control.bytes;
    header.msg_controllen = CMSG_SPACE(data_bytes);
    cmsghdr* passed = CMSG_FIRSTHDR(&header);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(data_bytes);
    std::memcpy(CMSG_DATA(passed), descriptors.data(), data_bytes);
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return SystemError(ErrorId::kSessionEnded, "sending to the peer", errno);
  return absl::OkStatus();
}

template <typename Message>
absl::Status Send(int socket, const Message& message, const std::vector<int>& descriptors = {}) {
  static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) < kMessageBytesMax);
  return SendBytes(socket, &message, sizeof(message), descriptors);
}

struct Received {
  std::array<char, kMessageBytesMax> bytes;
  size_t size_bytes = 0;
  std::vector<UniqueFd> descriptors;

  MessageType type() const {
    MessageHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    return header.type;
  }
  // The message, if it has exactly this type and size.
  template <typename Message>
  std::optional<Message> As() const {
    Message message;
    if (size_bytes != sizeof(Message) || type() != message.header.type) return std::nullopt;
    std::memcpy(&message, bytes.data(), sizeof(Message));
    return message;
  }
};

// Takes ownership of everything that was passed, wanted or not, so that nothing leaks.
std::vector<UniqueFd> TakeDescriptors(msghdr& header) {
  std::vector<UniqueFd> descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

enum class Descriptors { kRefuse, kAccept };

// Missing when no message is there. Without a control buffer the kernel drops what is passed.
absl::StatusOr<std::optional<Received>> Receive(int socket, Descriptors policy) {
  std::optional<Received> received(std::in_place);
  iovec part{received->bytes.data(), received->bytes.size()};
  ControlBuffer control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (policy == Descriptors::kAccept) {
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof(control.bytes);
  }
  ssize_t size = 0;
  // A peer that closed before it read our last message resets the connection. The kernel reports
  // that once, ahead of what the peer sent before it closed.
  int resets = 0;
  do {
    size = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (size < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
  if (size < 0 && errno == EAGAIN) return std::optional<Received>();
  if (size < 0) return SystemError(ErrorId::kSessionEnded, "receiving from the peer", errno);
  received->descriptors = TakeDescriptors(header);
  if (size == 0) return MakeError(ErrorId::kSessionEnded, "the peer has closed the connection");
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Malformed("the message is longer, or passes more descriptors, than any");
  }
  received->size_bytes = static_cast<size_t>(size);
  MessageHeader message;
  if (received->size_bytes < sizeof(message)) return Malformed("the message has no header");
  std::memcpy(&message, received->bytes.data(), sizeof(message));
  if (message.magic != kHandshakeMagic) return Malformed("the message has another magic");
  return received;
}

absl::Status DaemonGone() {
  return MakeError(ErrorId::kDaemonLost, "the daemon closed the connection");
}

absl::Status StatusOf(const RefusalMessage& refusal) {
  const auto code = static_cast<absl::StatusCode>(refusal.code);
  return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                      TextIn(refusal.text));
}

// Waits for the daemon's answer; a refusal becomes its status.
absl::StatusOr<Received> ReceiveAnswer(int socket, int timeout_ms, Descriptors policy) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    absl::StatusOr<std::optional<Received>> received = Receive(socket, policy);
    if (!received.ok()) {
      return ErrorIdOf(received.status()) == ErrorId::kSessionEnded ? DaemonGone()
                                                                    : received.status();
    }
    if (received->has_value()) {
      const auto refusal = (*received)->As<RefusalMessage>();
      if (refusal.has_value()) return StatusOf(*refusal);
      return **std::move(received);
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      return MakeError(ErrorId::kDaemonStart,
                       absl::StrCat("the daemon did not answer within ", timeout_ms, " ms"));
    }
    pollfd readable{.fd = socket, .events = POLLIN};
    ::poll(&readable, 1, static_cast<int>(left));
  }
}

// Connects; the errno of a refusal as the value.
absl::StatusOr<UniqueFd> Connect(const std::string& path, int& error_number) {
  OFFLOAD_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return SystemError(ErrorId::kDaemonStart, "socket", errno);
  int result = 0;
  do {
    result = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (result != 0 && errno == EINTR);
  error_number = result == 0 ? 0 : errno;
  return fd;
}

// Removes a socket file that a dead daemon left.
absl::Status RemoveDeadSocket(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return absl::OkStatus();
  if (!S_ISSOCK(status.st_mode)) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("\"", path, "\" is no socket"));
  }
  int error_number = 0;
  OFFLOAD_RETURN_IF_ERROR(Connect(path, error_number).status());
  if (error_number == 0) {
    return MakeError(ErrorId::kStoreLocked,
                     absl::StrCat("another daemon listens at \"", path, "\""),
                     "Stop it, or choose another socket");
  }
  if (error_number != ECONNREFUSED) {
    return SystemError(ErrorId::kBadValue, absl::StrCat("socket \"", path, "\""), error_number);
  }
  ::unlink(path.c_str());
  return absl::OkStatus();
}

absl::Status CheckDirectory(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  struct stat status;
  if (::stat(directory.c_str(), &status) != 0) {
    return SystemError(ErrorId::kBadValue, absl::StrCat("socket \"", path, "\""), errno);
  }
  const bool others_write = (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  const bool owner_is_trusted = status.st_uid == 0 || status.st_uid == ::geteuid();
  if (owner_is_trusted && (!others_write || (status.st_mode & S_ISVTX) != 0))
    return absl::OkStatus();
  return MakeError(ErrorId::kBadValue,
                   absl::StrCat("socket \"", path, "\": other users may write to its directory"),
                   "Choose a directory that only this user may write to");
}

// Empty where the kernel does not tell (before Linux 4.13).
std::vector<gid_t> GroupsOf(int socket) {
  std::vector<gid_t> groups(1u << 16);  // NGROUPS_MAX
  socklen_t length = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &length) != 0) length = 0;
  groups.resize(length / sizeof(gid_t));
  groups.shrink_to_fit();
  return groups;
}

int PidfdOf(int socket, pid_t pid) {
  int pidfd = -1;
  socklen_t length = sizeof(pidfd);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) return pidfd;
  if (errno != ENOPROTOOPT) return -1;
  // Before Linux 6.5 the number may have been given to another process meanwhile; but then the
  // socket is closed, which the caller checks next.
  pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return -1;
  pollfd hung_up{.fd = socket, .events = 0};
  if (::poll(&hung_up, 1, 0) == 0) return pidfd;
  ::close(pidfd);
  return -1;
}

}  // namespace

absl::StatusOr<Token> MakeToken() {
  Token token;
  // Up to 256 bytes come whole, without EINTR, once the pool is ready.
  if (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return SystemError(ErrorId::kInternal, "getrandom", errno);
  }
  return token;
}

bool TokensEqual(const Token& a, const Token& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < kTokenBytes; ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

std::string TokenText(const Token& token) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(token.data()), token.size()));
}

std::optional<Token> ParseToken(std::string_view text) {
  if (text.size() != 2 * kTokenBytes) return std::nullopt;
  const auto value_of = [](char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
    return -1;
  };
  Token token;
  for (size_t i = 0; i < kTokenBytes; ++i) {
    const int high = value_of(text[2 * i]);
    const int low = value_of(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    token[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return token;
}

absl::StatusOr<UniqueFd> ListenForRanks(const std::string& path, mode_t mode) {
  OFFLOAD_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  OFFLOAD_RETURN_IF_ERROR(CheckDirectory(path));
  OFFLOAD_RETURN_IF_ERROR(RemoveDeadSocket(path));
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return SystemError(ErrorId::kInternal, "socket", errno);
  // The mode of the inode, so that the file never exists with other rights.
  ::fchmod(fd.get(), mode);
  const mode_t umask_before = ::umask(0);
  const int bound = ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int bind_error = errno;
  ::umask(umask_before);
  errno = bind_error;
  if (bound != 0) {
    return SystemError(ErrorId::kBadValue, absl::StrCat("binding socket \"", path, "\""), errno);
  }
  if (::listen(fd.get(), kListenBacklog) != 0) {
    return SystemError(ErrorId::kInternal, absl::StrCat("listening at \"", path, "\""), errno);
  }
  return fd;
}

absl::StatusOr<std::optional<UniqueFd>> AcceptRank(int listener) {
  for (;;) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) return std::optional<UniqueFd>(std::in_place, fd);
    if (errno == EAGAIN) return std::optional<UniqueFd>();
    if (errno == EINTR || errno == ECONNABORTED) continue;
    return SystemError(ErrorId::kRefused, "accept", errno);
  }
}

absl::StatusOr<Peer> PeerOf(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return SystemError(ErrorId::kRefused, "SO_PEERCRED", errno);
  }
  Peer peer{.pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid};
  peer.groups = GroupsOf(socket);
  peer.pidfd.reset(PidfdOf(socket, credentials.pid));
  if (!peer.pidfd.valid()) {
    return MakeError(ErrorId::kRefused,
                     absl::StrCat("process ", peer.pid, " has ended or cannot be identified"));
  }
  return peer;
}

bool IsTrusted(const Peer& peer) { return peer.uid == 0 || peer.uid == ::geteuid(); }

absl::Status CheckPeer(const Peer& peer, const PeerPolicy& policy) {
  const auto has = [](const auto& ids, auto id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  if (IsTrusted(peer) || has(policy.uids, peer.uid) || has(policy.gids, peer.gid))
    return absl::OkStatus();
  for (const gid_t group : peer.groups) {
    if (has(policy.gids, group)) return absl::OkStatus();
  }
  return MakeError(ErrorId::kRefused, absl::StrCat("user ", peer.uid, " may not use this daemon"));
}

absl::StatusOr<std::optional<RankMessage>> ReceiveFromRank(int socket) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<Received> received,
                           Receive(socket, Descriptors::kRefuse));
  if (!received.has_value()) return std::optional<RankMessage>();
  if (const auto hello = received->As<HelloMessage>(); hello.has_value()) {
    if (hello->version == kProtocolVersion) return std::optional<RankMessage>(*hello);
    return MakeError(ErrorId::kProtocolVersion,
                     absl::StrCat("the client speaks version ", hello->version, ", the daemon ",
                                  kProtocolVersion));
  }
  if (const auto map = received->As<MapMessage>(); map.has_value()) {
    return std::optional<RankMessage>(*map);
  }
  if (const auto mapped = received->As<MappedMessage>(); mapped.has_value()) {
    return std::optional<RankMessage>(*mapped);
  }
  return Malformed(absl::StrCat("message of type ", static_cast<uint32_t>(received->type()),
                                " and ", received->size_bytes, " bytes"));
}

absl::Status SendWelcome(int socket, uint64_t session, const Token& token,
                         std::string_view control_path) {
  WelcomeMessage message;
  message.daemon_pid = ::getpid();
  message.session = session;
  message.token = token;
  CopyText(control_path, message.control_path);
  return Send(socket, message);
}

absl::Status SendRefusal(int socket, const absl::Status& reason) {
  RefusalMessage message;
  message.code = static_cast<int32_t>(reason.code());
  message.error = static_cast<int32_t>(ErrorIdOf(reason).value_or(ErrorId::kInternal));
  CopyText(ToStd(reason.message()), message.text);
  return Send(socket, message);
}

absl::Status SendMemory(int socket, int slab_fd, uint64_t slab_bytes, int region_fd,
                        uint64_t region_bytes, const Doorbell& for_rank) {
  MemoryMessage message;
  message.slab_bytes = slab_bytes;
  message.region_bytes = region_bytes;
  return Send(socket, message, {slab_fd, region_fd, for_rank.fd()});
}

absl::Status SendReady(int socket) { return Send(socket, ReadyMessage{}); }

absl::StatusOr<UniqueFd> ConnectToDaemon(const std::string& path) {
  int error_number = 0;
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd fd, Connect(path, error_number));
  if (error_number == EACCES || error_number == EPERM) {
    return MakeError(ErrorId::kDaemonStart,
                     absl::StrCat("connecting to \"", path, "\": ", ErrnoText(error_number)),
                     "Run as the user of that daemon, or have it started with --allow-uid or "
                     "--allow-gid and its socket where you may reach it; without OFFLOADD_SOCKET a "
                     "trainer starts a private daemon");
  }
  if (error_number == ENOENT || error_number == ECONNREFUSED) {
    return MakeError(
        ErrorId::kDaemonStart,
        absl::StrCat("connecting to \"", path, "\": ", ErrnoText(error_number)),
        "Start the daemon that listens there; without OFFLOADD_SOCKET a trainer starts "
        "a private one");
  }
  if (error_number != 0) {
    return SystemError(ErrorId::kDaemonStart, absl::StrCat("connecting to \"", path, "\""),
                       error_number);
  }
  return fd;
}

absl::StatusOr<Welcome> Greet(int socket, int timeout_ms) {
  HelloMessage hello;
  hello.pid = ::getpid();
  // A refusal may be on its way already although the daemon has closed: read it in any case.
  Send(socket, hello).IgnoreError();
  OFFLOAD_ASSIGN_OR_RETURN(const Received received,
                           ReceiveAnswer(socket, timeout_ms, Descriptors::kRefuse));
  const auto message = received.As<WelcomeMessage>();
  if (!message.has_value()) return Malformed("the answer to Hello is no Welcome");
  if (message->version != kProtocolVersion) {
    return MakeError(ErrorId::kProtocolVersion,
                     absl::StrCat("the daemon speaks version ", message->version, ", the client ",
                                  kProtocolVersion));
  }
  return Welcome{.session = message->session,
                 .token = message->token,
                 .daemon_pid = message->daemon_pid,
                 .control_path = TextIn(message->control_path)};
}

absl::StatusOr<SessionMemory> RequestMemory(int socket, const Token& token, int timeout_ms) {
  MapMessage map;
  map.token = token;
  Send(socket, map).IgnoreError();
  OFFLOAD_ASSIGN_OR_RETURN(Received received,
                           ReceiveAnswer(socket, timeout_ms, Descriptors::kAccept));
  const auto message = received.As<MemoryMessage>();
  if (!message.has_value() || received.descriptors.size() != kPassedDescriptors) {
    return Malformed(
        absl::StrCat("the answer to Map passes ", received.descriptors.size(), " descriptors"));
  }
  return SessionMemory{.slab = std::move(received.descriptors[0]),
                       .region = std::move(received.descriptors[1]),
                       .slab_bytes = message->slab_bytes,
                       .region_bytes = message->region_bytes,
                       .doorbell = Doorbell(std::move(received.descriptors[2]))};
}

absl::Status ConfirmMapped(int socket, int timeout_ms) {
  Send(socket, MappedMessage{}).IgnoreError();
  OFFLOAD_ASSIGN_OR_RETURN(const Received received,
                           ReceiveAnswer(socket, timeout_ms, Descriptors::kRefuse));
  if (!received.As<ReadyMessage>().has_value())
    return Malformed("the answer to Mapped is no Ready");
  return absl::OkStatus();
}

absl::Status ReasonOfEnd(int socket) {
  const absl::StatusOr<std::optional<Received>> received = Receive(socket, Descriptors::kRefuse);
  if (!received.ok() || !received->has_value()) return DaemonGone();
  const auto refusal = (*received)->As<RefusalMessage>();
  return refusal.has_value() ? StatusOf(*refusal) : DaemonGone();
}

}  // namespace offload::proto

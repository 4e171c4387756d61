// proto/handshake.h
//
// How a rank and the daemon meet: a few fixed-size messages over a SOCK_SEQPACKET socket, which
// then stays open as the sign of life of both.
//
//   rank                               daemon
//   Hello{version, pid}            →   checks SO_PEERCRED, version, limits
//                                  ←   Welcome{session, token, path of the gRPC socket}
//                                      or Refusal{OFD number, text}
//   Control.OpenJob (gRPC)             creates slab and region
//   Map{token}                     →
//                                  ←   Memory{sizes} + slab, region, doorbell (SCM_RIGHTS)
//                                      or Refusal
//   maps both, Mapped              →   seals the region, then reads its ring
//                                  ←   Ready or Refusal
//
// Nothing else is sent, but a Refusal by the daemon at any time before it closes; end of file on
// either side, or the peer's pidfd, is the end of the session. The daemon never takes a descriptor:
// it receives without a control buffer. Messages are plain data, little endian; text is not trusted
// to end with a 0.
//
// Thread safety: pure functions over descriptors; one thread per socket.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "proto/doorbell.h"
#include "proto/shm_abi.h"

namespace offload::proto {

// ---- Messages -----------------------------------------------------------------------------------
inline constexpr uint32_t kHandshakeMagic = 0x48464f4f;  // "OOFH"
inline constexpr size_t kTokenBytes = 16;
inline constexpr size_t kSocketPathBytesMax = 107;  // sun_path without its 0
inline constexpr int kHandshakeTimeoutMilliseconds = 30'000;

using Token = std::array<uint8_t, kTokenBytes>;

enum class MessageType : uint32_t {
  kHello = 1,
  kWelcome = 2,
  kRefusal = 3,
  kMap = 4,
  kMemory = 5,
  kMapped = 6,
  kReady = 7
};

struct MessageHeader {
  uint32_t magic = kHandshakeMagic;
  MessageType type = MessageType::kHello;
};
struct HelloMessage {
  MessageHeader header{.type = MessageType::kHello};
  uint32_t version = kProtocolVersion;
  int32_t pid = 0;  // for the log only; identity is SO_PEERCRED
};
struct WelcomeMessage {
  MessageHeader header{.type = MessageType::kWelcome};
  uint32_t version = kProtocolVersion;
  int32_t daemon_pid = 0;
  uint64_t session = 0;
  Token token{};
  char control_path[112] = {};  // of the gRPC socket
};
struct RefusalMessage {
  MessageHeader header{.type = MessageType::kRefusal};
  int32_t code = 0;   // absl::StatusCode
  int32_t error = 0;  // OFD number
  char text[1024] = {};
};
struct MapMessage {
  MessageHeader header{.type = MessageType::kMap};
  Token token{};
};
struct MemoryMessage {
  MessageHeader header{.type = MessageType::kMemory};
  uint64_t slab_bytes = 0;
  uint64_t region_bytes = 0;
};
struct MappedMessage {
  MessageHeader header{.type = MessageType::kMapped};
};
struct ReadyMessage {
  MessageHeader header{.type = MessageType::kReady};
};
static_assert(sizeof(MessageHeader) == 8 && sizeof(HelloMessage) == 16 &&
              sizeof(WelcomeMessage) == 152);
static_assert(sizeof(RefusalMessage) == 1040 && sizeof(MapMessage) == 24 &&
              sizeof(MemoryMessage) == 24);
static_assert(sizeof(MappedMessage) == 8 && sizeof(ReadyMessage) == 8);

// ---- Both sides ---------------------------------------------------------------------------------
absl::StatusOr<Token> MakeToken();
// In a time that does not depend on the contents.
bool TokensEqual(const Token& a, const Token& b);
// 32 lower-case hexadecimal digits, as in the metadata of gRPC calls; missing when `text` is not
// that.
std::string TokenText(const Token& token);
std::optional<Token> ParseToken(std::string_view text);

// ---- Daemon: never blocks -----------------------------------------------------------------------
// Binds and listens at `path`, non-blocking. A socket file that nobody listens at is replaced; one
// that somebody listens at is OFD-1205. OFD-1002 when somebody else could replace the file: its
// directory must be this user's or root's, and writable by nobody else unless it is sticky.
absl::StatusOr<UniqueFd> ListenForRanks(const std::string& path, mode_t mode = 0600);

// Accepts one connection (CLOEXEC, non-blocking); missing when none waits.
absl::StatusOr<std::optional<UniqueFd>> AcceptRank(int listener);

// Who the kernel says is on the other side.
struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // the supplementary ones
  UniqueFd pidfd;             // readable when the process has ended
};
// OFD-1504 when the process cannot be identified or has ended.
absl::StatusOr<Peer> PeerOf(int socket);

// Root and the daemon's own user are always welcome.
struct PeerPolicy {
  std::vector<uid_t> uids;
  std::vector<gid_t> gids;  // primary or supplementary
  bool admits_others() const { return !uids.empty() || !gids.empty(); }
};
// Root or the daemon's own user: may do with all jobs whatever the daemon may.
bool IsTrusted(const Peer& peer);
absl::Status CheckPeer(const Peer& peer, const PeerPolicy& policy);  // OFD-1504

using RankMessage = std::variant<HelloMessage, MapMessage, MappedMessage>;
// Takes the next message; missing when none is there. OFD-1503 for malformed ones, OFD-1502 for a
// Hello of another version, OFD-1802 at the end of file.
absl::StatusOr<std::optional<RankMessage>> ReceiveFromRank(int socket);

// Each sends one message. Failed: the session is to be closed.
absl::Status SendWelcome(int socket, uint64_t session, const Token& token,
                         std::string_view control_path);
absl::Status SendRefusal(int socket, const absl::Status& reason);
absl::Status SendMemory(int socket, int slab_fd, uint64_t slab_bytes, int region_fd,
                        uint64_t region_bytes, const Doorbell& for_rank);
absl::Status SendReady(int socket);

// ---- Rank: blocks up to the time limit ----------------------------------------------------------
// OFD-1501 when nobody listens there.
absl::StatusOr<UniqueFd> ConnectToDaemon(const std::string& path);

struct Welcome {
  uint64_t session = 0;
  Token token{};
  pid_t daemon_pid = 0;
  std::string control_path;
};
// All three return the daemon's refusal as its status, OFD-1801 when it is gone, OFD-1503 for
// malformed answers.
absl::StatusOr<Welcome> Greet(int socket, int timeout_ms = kHandshakeTimeoutMilliseconds);

struct SessionMemory {
  UniqueFd slab, region;
  uint64_t slab_bytes = 0, region_bytes = 0;
  Doorbell doorbell;
};
absl::StatusOr<SessionMemory> RequestMemory(int socket, const Token& token,
                                            int timeout_ms = kHandshakeTimeoutMilliseconds);
absl::Status ConfirmMapped(int socket, int timeout_ms = kHandshakeTimeoutMilliseconds);

// Why the daemon closed: the Refusal that it left, else OFD-1801. Never blocks.
absl::Status ReasonOfEnd(int socket);

}  // namespace offload::proto

#include "proto/handshake.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "proto/doorbell.h"

namespace offload::proto {
namespace {

// Socket paths are short: a directory of its own under /tmp.
class HandshakeTest : public testing::Test {
 protected:
  HandshakeTest() {
    char name[] = "/tmp/offloadd-test-XXXXXX";
    directory_ = ::mkdtemp(name);
    path_ = directory_ + "/d.sock";
    int pair[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    rank_ = UniqueFd(pair[0]);
    daemon_ = UniqueFd(pair[1]);
  }
  ~HandshakeTest() override {
    ::unlink(path_.c_str());
    ::rmdir(directory_.c_str());
  }
  void SendRaw(const void* bytes, size_t size) const {
    ASSERT_EQ(::send(rank_.get(), bytes, size, 0), static_cast<ssize_t>(size));
  }
  template <typename Message>
  Message Expect() const {
    auto message = ReceiveFromRank(daemon_.get());
    EXPECT_TRUE(message.ok()) << message.status();
    EXPECT_TRUE(message->has_value());
    return std::get<Message>(**message);
  }

  std::string directory_, path_;
  UniqueFd rank_, daemon_;
};

int Memfd(const char* content) {
  const int fd = ::memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(::pwrite(fd, content, 1, 0), 1);
  return fd;
}
char FirstByte(int fd) {
  char byte = 0;
  EXPECT_EQ(::pread(fd, &byte, 1, 0), 1);
  return byte;
}

// Answers are put into the socket beforehand: both sides run in one thread.
TEST_F(HandshakeTest, ASessionBeginsAndPassesItsMemory) {
  const absl::StatusOr<Token> token = MakeToken();
  ASSERT_TRUE(token.ok()) << token.status();
  ASSERT_TRUE(SendWelcome(daemon_.get(), 7, *token, "/run/x/control.sock").ok());
  const auto welcome = Greet(rank_.get());
  ASSERT_TRUE(welcome.ok()) << welcome.status();
  EXPECT_EQ(welcome->session, 7u);
  EXPECT_EQ(welcome->control_path, "/run/x/control.sock");
  EXPECT_EQ(welcome->daemon_pid, ::getpid());
  EXPECT_TRUE(TokensEqual(welcome->token, *token));
  EXPECT_EQ(Expect<HelloMessage>().pid, ::getpid());

  const UniqueFd slab(Memfd("s"));
  const UniqueFd region(Memfd("r"));
  auto bells = Doorbell::CreatePair();
  ASSERT_TRUE(bells.ok()) << bells.status();
  ASSERT_TRUE(SendMemory(daemon_.get(), slab.get(), 111, region.get(), 222, bells->second).ok());
  const auto memory = RequestMemory(rank_.get(), welcome->token);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_TRUE(TokensEqual(Expect<MapMessage>().token, *token));
  EXPECT_EQ(memory->slab_bytes, 111u);
  EXPECT_EQ(memory->region_bytes, 222u);
  EXPECT_EQ(FirstByte(memory->slab.get()), 's');
  EXPECT_EQ(FirstByte(memory->region.get()), 'r');
  EXPECT_NE(::fcntl(memory->slab.get(), F_GETFD) & FD_CLOEXEC, 0);
  memory->doorbell.Ring();
  char ring = 0;
  EXPECT_EQ(::recv(bells->first.fd(), &ring, 1, MSG_DONTWAIT), 1);

  ASSERT_TRUE(SendReady(daemon_.get()).ok());
  EXPECT_TRUE(ConfirmMapped(rank_.get()).ok());
  Expect<MappedMessage>();
  EXPECT_FALSE(ReceiveFromRank(daemon_.get())->has_value());
}

TEST_F(HandshakeTest, ARefusalArrivesWithCodeAndTextAlsoWhenTheDaemonHasClosed) {
  const absl::Status reason = MakeError(ErrorId::kRefused, "user 5 may not");
  ASSERT_TRUE(SendRefusal(daemon_.get(), reason).ok());
  daemon_.reset();
  EXPECT_EQ(Greet(rank_.get()).status(), reason);
}

TEST_F(HandshakeTest, ARefusalArrivesAlsoWhenTheDaemonHasClosedWithoutReadingTheHello) {
  const absl::Status reason = MakeError(ErrorId::kRefused, "user 5 may not");
  HelloMessage hello;
  SendRaw(&hello, sizeof(hello));
  ASSERT_TRUE(SendRefusal(daemon_.get(), reason).ok());
  daemon_.reset();
  EXPECT_EQ(ReasonOfEnd(rank_.get()), reason);
}

TEST_F(HandshakeTest, TheReasonOfTheEndIsTheLastRefusalElseThatTheDaemonIsGone) {
  const absl::Status reason = MakeError(ErrorId::kProtocol, "tensor 9");
  ASSERT_TRUE(SendRefusal(daemon_.get(), reason).ok());
  daemon_.reset();
  EXPECT_EQ(ReasonOfEnd(rank_.get()), reason);
  EXPECT_EQ(ErrorIdOf(ReasonOfEnd(rank_.get())), ErrorId::kDaemonLost);
}

TEST_F(HandshakeTest, ADaemonThatClosesOrIsSilentIsAnError) {
  EXPECT_EQ(ErrorIdOf(Greet(rank_.get(), /*timeout_ms=*/1).status()), ErrorId::kDaemonStart);
  daemon_.reset();
  EXPECT_EQ(ErrorIdOf(Greet(rank_.get()).status()), ErrorId::kDaemonLost);
}

TEST_F(HandshakeTest, ARankOfAnotherVersionIsTold) {
  HelloMessage hello;
  hello.version = kProtocolVersion + 1;
  SendRaw(&hello, sizeof(hello));
  EXPECT_EQ(ErrorIdOf(ReceiveFromRank(daemon_.get()).status()), ErrorId::kProtocolVersion);
}

TEST_F(HandshakeTest, MalformedMessagesAreRefused) {
  const auto expect_refused = [this](const std::string& bytes) {
    SendRaw(bytes.data(), bytes.size());
    EXPECT_EQ(ErrorIdOf(ReceiveFromRank(daemon_.get()).status()), ErrorId::kProtocol);
  };
  HelloMessage hello;
  const std::string good(reinterpret_cast<const char*>(&hello), sizeof(hello));
  expect_refused("x");
  expect_refused(std::string(100, 'x'));
  expect_refused(good.substr(0, good.size() - 1));
  expect_refused(good + "x");
  expect_refused(std::string(4096, 'x'));
  WelcomeMessage welcome;  // the daemon's own message
  expect_refused(std::string(reinterpret_cast<const char*>(&welcome), sizeof(welcome)));
}

TEST_F(HandshakeTest, TheDaemonTakesNoDescriptor) {
  // A message of the daemon's, sent by the rank: it passes descriptors.
  const UniqueFd file(Memfd("x"));
  auto bells = Doorbell::CreatePair();
  ASSERT_TRUE(SendMemory(rank_.get(), file.get(), 1, file.get(), 1, bells->first).ok());
  const int next_fd = ::dup(file.get());
  ::close(next_fd);
  EXPECT_EQ(ErrorIdOf(ReceiveFromRank(daemon_.get()).status()), ErrorId::kProtocol);
  const UniqueFd probe(::dup(file.get()));
  EXPECT_EQ(probe.get(), next_fd);  // nothing was opened in between
}

TEST_F(HandshakeTest, TheRankRefusesMemoryWithoutDescriptors) {
  MemoryMessage memory;
  ASSERT_EQ(::send(daemon_.get(), &memory, sizeof(memory), 0), ssize_t{sizeof(memory)});
  EXPECT_EQ(ErrorIdOf(RequestMemory(rank_.get(), Token{}).status()), ErrorId::kProtocol);
}

TEST_F(HandshakeTest, ListensConnectsAndKnowsThePeer) {
  EXPECT_EQ(ErrorIdOf(ConnectToDaemon(path_).status()), ErrorId::kDaemonStart);
  const auto listener = ListenForRanks(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_FALSE(AcceptRank(listener->get())->has_value());
  const auto client = ConnectToDaemon(path_);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto accepted = AcceptRank(listener->get());
  ASSERT_TRUE(accepted.ok() && accepted->has_value());
  const auto peer = PeerOf((*accepted)->get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_EQ(peer->uid, ::geteuid());
  EXPECT_TRUE(CheckPeer(*peer, {}).ok());
}

TEST_F(HandshakeTest, ASocketInUseIsLeftAloneAndADeadOneReplaced) {
  {
    const auto first = ListenForRanks(path_);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_FALSE(ListenForRanks(path_).ok());
    EXPECT_TRUE(ConnectToDaemon(path_).ok());
  }
  EXPECT_TRUE(ListenForRanks(path_).ok());
}

TEST_F(HandshakeTest, PathsThatASocketCannotHaveAreRefused) {
  EXPECT_EQ(ErrorIdOf(ListenForRanks(std::string(108, 'x')).status()), ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf(ConnectToDaemon("").status()), ErrorId::kBadValue);
}

TEST(PeerPolicyTest, AdmitsRootTheOwnUserAndThoseThatAreListed) {
  const auto peer = [](uid_t uid) {
    Peer peer;
    peer.uid = uid;
    return peer;
  };
  const uid_t stranger = ::geteuid() + 4711;
  EXPECT_TRUE(CheckPeer(peer(0), {}).ok());
  EXPECT_TRUE(CheckPeer(peer(::geteuid()), {}).ok());
  EXPECT_EQ(ErrorIdOf(CheckPeer(peer(stranger), {})), ErrorId::kRefused);
  EXPECT_TRUE(CheckPeer(peer(stranger), {.uids = {stranger}}).ok());
}

TEST(PeerPolicyTest, MembersOfAnAdmittedGroupAreWelcome) {
  Peer peer;
  peer.uid = ::geteuid() + 4711;
  peer.gid = 100;
  peer.groups = {7, 101};
  const auto check = [&](gid_t group) { return CheckPeer(peer, {.gids = {group}}); };
  EXPECT_TRUE(check(100).ok());
  EXPECT_TRUE(check(101).ok());
  EXPECT_EQ(ErrorIdOf(check(102)), ErrorId::kRefused);
  EXPECT_FALSE(IsTrusted(peer));
}

TEST_F(HandshakeTest, ASocketThatOthersCouldReplaceIsRefused) {
  ASSERT_EQ(::chmod(directory_.c_str(), 0770), 0);
  EXPECT_EQ(ErrorIdOf(ListenForRanks(path_).status()), ErrorId::kBadValue);
  ASSERT_EQ(::chmod(directory_.c_str(), 01777), 0);  // as /tmp is
  EXPECT_TRUE(ListenForRanks(path_).ok());
}

TEST_F(HandshakeTest, TheSocketHasTheModeThatWasAskedFor) {
  struct stat info;
  for (const mode_t mode : {0600, 0666}) {
    const auto listener = ListenForRanks(path_, mode);
    ASSERT_TRUE(listener.ok()) << listener.status();
    ASSERT_EQ(::stat(path_.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, mode);
  }
}

TEST(TokenTest, TextsComeBackAndOthersAreRefused) {
  const auto token = MakeToken();
  ASSERT_TRUE(token.ok()) << token.status();
  const std::string text = TokenText(*token);
  ASSERT_TRUE(ParseToken(text).has_value());
  EXPECT_TRUE(TokensEqual(*ParseToken(text), *token));
  EXPECT_FALSE(ParseToken("").has_value());
  EXPECT_FALSE(ParseToken(text + "0").has_value());
  EXPECT_FALSE(ParseToken(text.substr(1) + "g").has_value());
  Token other = *token;
  other[15] ^= 1;
  EXPECT_FALSE(TokensEqual(*token, other));
  EXPECT_FALSE(TokensEqual(*token, *MakeToken()));
}

}  // namespace
}  // namespace offload::proto

// What goes wrong in a handshake: the peer's messages, the socket's folder, and every system call.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/failing_call.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "proto/doorbell.h"
#include "proto/handshake.h"

namespace offload::proto {
namespace {

constexpr uid_t kOtherUser = 65534;

// Runs `holds` in a child that is another user than root.
bool HoldsForAUser(const std::function<bool()>& holds) {
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && setresuid(kOtherUser, kOtherUser, kOtherUser) != 0) _exit(1);
    _exit(holds() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status == 0;
}

class HandshakeErrorsTest : public testing::Test {
 protected:
  HandshakeErrorsTest() {
    char name[] = "/tmp/offloadd-test-XXXXXX";
    directory_ = mkdtemp(name);
    path_ = directory_ + "/d.sock";
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    rank_ = UniqueFd(pair[0]);
    daemon_ = UniqueFd(pair[1]);
  }
  ~HandshakeErrorsTest() override { std::filesystem::remove_all(directory_); }

  template <typename Message>
  static void SendRaw(const UniqueFd& from, const Message& message) {
    ASSERT_EQ(send(from.get(), &message, sizeof(message), 0), ssize_t{sizeof(message)});
  }
  // One that connected to `listener` and is accepted.
  static UniqueFd Accepted(const UniqueFd& listener) {
    auto accepted = AcceptRank(listener.get());
    EXPECT_TRUE(accepted.ok() && accepted->has_value()) << accepted.status();
    return **std::move(accepted);
  }
  // Listens at path_ with a socket of that type.
  UniqueFd Bind(int type) const {
    UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd.get(), 1), 0);
    return fd;
  }
  ErrorId ListenError() const {
    return ErrorIdOf(ListenForRanks(path_).status()).value_or(ErrorId{});
  }

  std::string directory_, path_;
  UniqueFd rank_, daemon_;
};

// ---- Answers of a daemon that is none ----------------------------------------------------------

TEST_F(HandshakeErrorsTest, AnAnswerOfAnotherKindIsMalformedInEveryStage) {
  SendRaw(daemon_, ReadyMessage{});
  EXPECT_EQ(ErrorIdOf(Greet(rank_.get()).status()), ErrorId::kProtocol);
  SendRaw(daemon_, ReadyMessage{});
  EXPECT_EQ(ErrorIdOf(RequestMemory(rank_.get(), Token{}).status()), ErrorId::kProtocol);
  SendRaw(daemon_, WelcomeMessage{});
  EXPECT_EQ(ErrorIdOf(ConfirmMapped(rank_.get())), ErrorId::kProtocol);
}

TEST_F(HandshakeErrorsTest, AnAnswerWithoutHeaderOrWithAnotherMagicIsMalformed) {
  for (const std::string& answer :
       {std::string(1, 'x'), std::string(sizeof(WelcomeMessage), 'x')}) {
    ASSERT_EQ(send(daemon_.get(), answer.data(), answer.size(), 0),
              static_cast<ssize_t>(answer.size()));
    EXPECT_EQ(ErrorIdOf(Greet(rank_.get()).status()), ErrorId::kProtocol);
  }
}

TEST_F(HandshakeErrorsTest, ADaemonOfAnotherVersionIsNamed) {
  SendRaw(daemon_, WelcomeMessage{.version = kProtocolVersion + 1});
  EXPECT_EQ(ErrorIdOf(Greet(rank_.get()).status()), ErrorId::kProtocolVersion);
}

TEST_F(HandshakeErrorsTest, EveryStageTellsThatTheDaemonIsGone) {
  daemon_.reset();
  EXPECT_EQ(ErrorIdOf(RequestMemory(rank_.get(), Token{}).status()), ErrorId::kDaemonLost);
  EXPECT_EQ(ErrorIdOf(ConfirmMapped(rank_.get())), ErrorId::kDaemonLost);
}

TEST_F(HandshakeErrorsTest, ARefusalThatSaysOkIsStillAnError) {
  SendRaw(daemon_, RefusalMessage{.code = 0});
  EXPECT_FALSE(Greet(rank_.get()).ok());
}

TEST_F(HandshakeErrorsTest, ALastMessageThatIsNoRefusalTellsOnlyThatTheDaemonIsGone) {
  EXPECT_EQ(ErrorIdOf(ReasonOfEnd(rank_.get())), ErrorId::kDaemonLost) << "nothing is there";
  SendRaw(daemon_, ReadyMessage{});
  EXPECT_EQ(ErrorIdOf(ReasonOfEnd(rank_.get())), ErrorId::kDaemonLost);
}

// Each of the three descriptors too few or too many; more than there is room for is cut off.
TEST_F(HandshakeErrorsTest, MemoryWithAnotherCountOfDescriptorsIsRefusedAndLeaksNone) {
  const UniqueFd file(memfd_create("test", MFD_CLOEXEC));
  for (const size_t count : {1u, 2u, 4u, 9u}) {
    MemoryMessage memory;
    iovec part{&memory, sizeof(memory)};
    alignas(cmsghdr) char control[CMSG_SPACE(9 * sizeof(int))] = {};
    msghdr header{.msg_iov = &part, .msg_iovlen = 1};
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const passed = CMSG_FIRSTHDR(&header);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(count * sizeof(int));
    const std::vector<int> fds(count, file.get());
    std::memcpy(CMSG_DATA(passed), fds.data(), count * sizeof(int));
    ASSERT_GT(sendmsg(daemon_.get(), &header, 0), 0);
    const UniqueFd before(dup(file.get()));
    const int next_fd = dup(file.get());
    close(next_fd);
    EXPECT_EQ(ErrorIdOf(RequestMemory(rank_.get(), Token{}).status()), ErrorId::kProtocol) << count;
    const UniqueFd after(dup(file.get()));
    EXPECT_EQ(after.get(), next_fd) << count;
  }
}

// The kernel adds credentials for a trainer that asked for them on its socket.
TEST_F(HandshakeErrorsTest, OtherAncillaryDataIsNoDescriptor) {
  const int on = 1;
  ASSERT_EQ(setsockopt(rank_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)), 0);
  SendRaw(daemon_, MemoryMessage{});
  EXPECT_EQ(ErrorIdOf(RequestMemory(rank_.get(), Token{}).status()), ErrorId::kProtocol);
}

// ---- The socket's place ------------------------------------------------------------------------

TEST_F(HandshakeErrorsTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "precious";
  EXPECT_EQ(ListenError(), ErrorId::kBadValue);
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
}

TEST_F(HandshakeErrorsTest, ASocketOfAnotherKindIsLeftAlone) {
  const UniqueFd other = Bind(SOCK_STREAM);
  EXPECT_EQ(ListenError(), ErrorId::kBadValue);
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(HandshakeErrorsTest, ADaemonThatListensIsNamedAndADirectoryThatIsNotThereToo) {
  const UniqueFd other = Bind(SOCK_SEQPACKET);
  EXPECT_EQ(ListenError(), ErrorId::kStoreLocked);
  path_ = directory_ + "/missing/d.sock";
  EXPECT_EQ(ListenError(), ErrorId::kBadValue);
}

TEST_F(HandshakeErrorsTest, ANameWithoutDirectoryIsInTheCurrentOne) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(directory_);
  EXPECT_TRUE(ListenForRanks("d.sock").ok());
  std::filesystem::current_path(before);
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(HandshakeErrorsTest, AnotherUsersDirectoryIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a directory away";
  ASSERT_EQ(chown(directory_.c_str(), kOtherUser, kOtherUser), 0);
  EXPECT_EQ(ListenError(), ErrorId::kBadValue);
}

TEST_F(HandshakeErrorsTest, AUserListensInItsOwnDirectoryAndTrustsItself) {
  EXPECT_TRUE(HoldsForAUser([] {
    char name[] = "/tmp/offloadd-test-XXXXXX";
    const std::string directory = mkdtemp(name);
    const bool listens = ListenForRanks(directory + "/d.sock").ok();
    std::filesystem::remove_all(directory);
    Peer self, other;
    self.uid = geteuid();
    other.uid = geteuid() + 1;
    return listens && IsTrusted(self) && !IsTrusted(other);
  }));
}

// ---- Peers -------------------------------------------------------------------------------------

TEST_F(HandshakeErrorsTest, WhoCannotBeIdentifiedIsRefused) {
  EXPECT_EQ(ErrorIdOf(PeerOf(-1).status()), ErrorId::kRefused);
  constexpr FailingCall::Which kThird = {.after = 2};  // SO_PEERCRED, SO_PEERGROUPS, SO_PEERPIDFD
  const FailingCall failing("getsockopt", EINVAL, kThird);
  EXPECT_EQ(ErrorIdOf(PeerOf(rank_.get()).status()), ErrorId::kRefused);
  EXPECT_EQ(failing.failures(), 1);
}

TEST_F(HandshakeErrorsTest, AKernelThatTellsNoGroupsTellsNone) {
  const FailingCall failing("getsockopt", ENOPROTOOPT, {.after = 1});
  const auto peer = PeerOf(rank_.get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_TRUE(peer->groups.empty());
}

// Before Linux 6.5 the process is found by its number, which must still be its own.
TEST_F(HandshakeErrorsTest, AKernelWithoutSocketPidfdsFindsTheProcessUnlessItHasHungUpOrEnded) {
  const auto listener = ListenForRanks(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const auto peer_of = [](const UniqueFd& socket) {
    const FailingCall failing("getsockopt", ENOPROTOOPT, {.after = 2});
    return PeerOf(socket.get());
  };
  auto client = ConnectToDaemon(path_);
  ASSERT_TRUE(client.ok()) << client.status();
  const UniqueFd accepted = Accepted(*listener);
  const auto peer = peer_of(accepted);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->pid, getpid());
  client->reset();
  EXPECT_EQ(ErrorIdOf(peer_of(accepted).status()), ErrorId::kRefused) << "hung up";

  const pid_t child = fork();
  if (child == 0) _exit(ConnectToDaemon(path_).ok() ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(ErrorIdOf(peer_of(Accepted(*listener)).status()), ErrorId::kRefused) << "ended";
}

// ---- System calls that fail --------------------------------------------------------------------

TEST_F(HandshakeErrorsTest, InterruptedCallsAreMadeAgain) {
  {
    const FailingCall failing("sendmsg", EINTR, {.times = 3});
    EXPECT_TRUE(SendReady(daemon_.get()).ok());
    EXPECT_EQ(failing.failures(), 3);
  }
  {
    const FailingCall failing("recvmsg", EINTR, {.times = 3});
    EXPECT_TRUE(ConfirmMapped(rank_.get()).ok());
    EXPECT_EQ(failing.failures(), 3);
  }
  const auto listener = ListenForRanks(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  absl::StatusOr<UniqueFd> client;
  {
    const FailingCall failing("connect", EINTR, {.times = 2});
    client = ConnectToDaemon(path_);
    EXPECT_TRUE(client.ok()) << client.status();
  }
  const FailingCall failing("accept4", EINTR, {.times = 2});
  EXPECT_TRUE(Accepted(*listener).valid());
}

TEST_F(HandshakeErrorsTest, AClientThatIsGoneAgainDoesNotEndTheAccepting) {
  const auto listener = ListenForRanks(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  {
    const FailingCall failing("accept4", ECONNABORTED, {.times = 2});
    const auto none = AcceptRank(listener->get());
    EXPECT_TRUE(none.ok() && !none->has_value()) << none.status();
  }
  const FailingCall failing("accept4", EMFILE);
  EXPECT_EQ(ErrorIdOf(AcceptRank(listener->get()).status()), ErrorId::kRefused);
}

TEST_F(HandshakeErrorsTest, AResetIsReadOverOnceAndTheNextOneIsTheEnd) {
  SendRaw(rank_, MappedMessage{});
  {
    const FailingCall failing("recvmsg", ECONNRESET);
    EXPECT_TRUE(ReceiveFromRank(daemon_.get()).ok());
  }
  const FailingCall failing("recvmsg", ECONNRESET, {.times = 2});
  EXPECT_EQ(ErrorIdOf(ReceiveFromRank(daemon_.get()).status()), ErrorId::kSessionEnded);
}

TEST_F(HandshakeErrorsTest, APeerThatIsGoneIsToldToWhoSends) {
  rank_.reset();
  EXPECT_EQ(ErrorIdOf(SendReady(daemon_.get())), ErrorId::kSessionEnded);
}

TEST_F(HandshakeErrorsTest, WithoutSocketsNobodyConnectsOrListens) {
  for (const char* call : {"socket", "bind", "listen"}) {
    const FailingCall failing(call, EMFILE);
    EXPECT_FALSE(ListenForRanks(path_).ok()) << call;
    EXPECT_EQ(failing.failures(), 1) << call;
  }
  const FailingCall failing("socket", EMFILE, {.times = 2});
  EXPECT_EQ(ErrorIdOf(ConnectToDaemon(path_).status()), ErrorId::kDaemonStart);
  EXPECT_EQ(ListenError(), ErrorId::kDaemonStart) << "the socket that is left cannot be tried";
}

TEST_F(HandshakeErrorsTest, WithoutRandomBytesThereIsNoToken) {
  const FailingCall failing("getrandom", ENOSYS);
  EXPECT_EQ(ErrorIdOf(MakeToken().status()), ErrorId::kInternal);
}

TEST(TokenTextTest, OnlyLowerCaseHexadecimalDigitsAreAToken) {
  const std::string good(2 * kTokenBytes, '0');
  ASSERT_TRUE(ParseToken(good).has_value());
  for (const char wrong : {'/', ':', 'A', '`', 'g', '\0', '\xff'}) {
    for (const size_t at : {size_t{0}, size_t{1}, good.size() - 1}) {
      std::string text = good;
      text[at] = wrong;
      EXPECT_FALSE(ParseToken(text).has_value()) << text;
    }
  }
}

}  // namespace
}  // namespace offload::proto

// Bytes of a fuzzer as messages to both sides of a handshake. Each message is two bytes of length
// and its content; the highest two bits of the length tell how many descriptors are passed with it.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/unique_fd.h"
#include "proto/handshake.h"

namespace {

using namespace offload;  // NOLINT: a fuzz target

struct Pair {
  UniqueFd peer, ours;
};
Pair MakePair() {
  int fds[2];
  OFFLOAD_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

constexpr size_t kDescriptorsMax = 3;

int whole_ranks = 0, whole_daemons = 0;  // every message of them was taken

struct Message {
  std::string_view bytes;
  size_t descriptor_count;
};
std::vector<Message> Split(std::string_view input) {
  std::vector<Message> messages;
  while (input.size() >= 2 && messages.size() < 8) {
    uint16_t length = 0;
    std::memcpy(&length, input.data(), 2);
    const std::string_view bytes = input.substr(2, length & 0xfff);
    messages.push_back({bytes, size_t{length} >> 14});
    input.remove_prefix(2 + bytes.size());
  }
  return messages;
}

void Send(int fd, const Message& message) {
  iovec part{const_cast<char*>(message.bytes.data()), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))] = {};
  if (message.descriptor_count > 0) {
    const std::vector<int> descriptors(message.descriptor_count, fd);
    const size_t size_bytes = descriptors.size() * sizeof(int);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(size_bytes);
    cmsghdr* passed = CMSG_FIRSTHDR(&header);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(size_bytes);
    std::memcpy(CMSG_DATA(passed), descriptors.data(), size_bytes);
  }
  ::sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void AsDaemon(const std::vector<Message>& messages) {
  const Pair pair = MakePair();
  size_t taken = 0;
  for (const Message& message : messages) {
    Send(pair.peer.get(), message);
    const auto received = proto::ReceiveFromRank(pair.ours.get());
    if (!received.ok()) continue;
    // Only three kinds of messages pass, each with its own size.
    OFFLOAD_CHECK(!received->has_value() || message.bytes.size() <= sizeof(proto::MapMessage));
    taken += received->has_value();
  }
  whole_ranks += taken == 3;  // Hello, Map, Mapped
}

void AsRank(const std::vector<Message>& messages) {
  const Pair pair = MakePair();
  for (const Message& message : messages) Send(pair.peer.get(), message);
  ::shutdown(pair.peer.get(), SHUT_WR);  // so that nobody waits
  const auto welcome = proto::Greet(pair.ours.get(), 0);
  OFFLOAD_CHECK(!welcome.ok() || welcome->control_path.size() <= sizeof(proto::WelcomeMessage));
  const auto memory = proto::RequestMemory(pair.ours.get(), {}, 0);
  OFFLOAD_CHECK(!memory.ok() || (memory->slab.valid() && memory->region.valid()));
  const absl::Status ready = proto::ConfirmMapped(pair.ours.get(), 0);
  whole_daemons += welcome.ok() && memory.ok() && ready.ok();
  OFFLOAD_CHECK(!proto::ReasonOfEnd(pair.ours.get()).ok());
}

}  // namespace

extern "C" int AcceptedInputs() { return std::min(whole_ranks, whole_daemons); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::vector<Message> messages = Split(input);
  AsDaemon(messages);
  AsRank(messages);
  const auto token = proto::ParseToken(input.substr(0, 2 * proto::kTokenBytes));
  OFFLOAD_CHECK(!token.has_value() ||
                proto::TokenText(*token) == input.substr(0, 2 * proto::kTokenBytes));
  return 0;
}

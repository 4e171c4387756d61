#include "proto/doorbell.h"

#include <sys/socket.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload::proto {

absl::StatusOr<std::pair<Doorbell, Doorbell>> Doorbell::CreatePair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("socketpair: ", ErrnoText(errno)));
  }
  return std::pair(Doorbell(UniqueFd(fds[0])), Doorbell(UniqueFd(fds[1])));
}

void Doorbell::Ring() const {
  const char ring = 1;
  while (::send(fd_.get(), &ring, sizeof(ring), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
         errno == EINTR) {
  }
}

bool Doorbell::Drain() const {
  char rings[256];
  ssize_t count = 0;
  do {
    count = ::recv(fd_.get(), rings, sizeof(rings), MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  return count > 0 || (count < 0 && errno == EAGAIN);
}

}  // namespace offload::proto

#include "zero3/gpu/peer_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload::zero3 {

absl::StatusOr<PeerWatch> PeerWatch::Open(std::span<const int> pids) {
  PeerWatch watch;
  for (const int pid : pids) {
    watch.processes_.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!watch.processes_.back().valid())
      return absl::UnavailableError(absl::StrCat("process ", pid, ": ", ErrnoText(errno)));
  }
  return watch;
}

std::vector<uint32_t> PeerWatch::Ended() const {
  std::vector<pollfd> looks;
  for (const UniqueFd& process : processes_) looks.push_back({process.get(), POLLIN, 0});
  std::vector<uint32_t> ended;
  if (poll(looks.data(), looks.size(), /*timeout=*/0) <= 0) return ended;
  for (uint32_t rank = 0; rank < looks.size(); ++rank) {
    if ((looks[rank].revents & POLLIN) != 0) ended.push_back(rank);
  }
  return ended;
}

}  // namespace offload::zero3

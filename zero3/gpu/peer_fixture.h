// zero3/gpu/peer_fixture.h
//
// For tests: ranks that tell each other things before they are connected, as the daemon would have
// them (Control.Exchange): threads of one process, or two processes.
#pragma once

#include <sys/socket.h>

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero3/gpu/peer_group.h"

namespace offload::zero3 {

// Ranks as threads of this process.
class Threads {
 public:
  explicit Threads(uint32_t world_size) : barrier_(world_size), said_(world_size) {}

  PeerGroup::Exchange ExchangeOf(uint32_t rank) {
    return [this, rank](const std::string& says) -> absl::StatusOr<std::vector<std::string>> {
      said_[rank] = says;
      barrier_.arrive_and_wait();
      const std::vector<std::string> all = said_;
      barrier_.arrive_and_wait();
      return all;
    };
  }
  void Meet() { barrier_.arrive_and_wait(); }
  uint32_t world_size() const { return static_cast<uint32_t>(said_.size()); }

  void Run(const std::function<void(uint32_t rank)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < world_size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::barrier<> barrier_;
  std::vector<std::string> said_;
};

// Messages of two processes, 0 and 1, over a pair of sockets that keep messages apart.
inline PeerGroup::Exchange ExchangeOver(int socket, uint32_t rank) {
  return [socket, rank](const std::string& says) -> absl::StatusOr<std::vector<std::string>> {
    if (send(socket, says.data(), says.size(), 0) < 0) return absl::InternalError("send");
    char bytes[4096];
    const ssize_t size = recv(socket, bytes, sizeof(bytes), 0);
    if (size < 0) return absl::InternalError("recv");
    std::vector<std::string> said(2);
    said[rank] = says;
    said[1 - rank] = std::string(bytes, static_cast<size_t>(size));
    return said;
  };
}

}  // namespace offload::zero3

// tests/honest_neighbour.h
//
// A rank that only reads its weights, through a window that holds half of them, and looks at every
// byte: what a job sees whose neighbour is hostile.
//
// Thread safety: Start and Stop from one thread; a thread of its own reads meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "client/session.h"

namespace offload::tests {

class HonestNeighbour {
 public:
  // Every word of its weights; what nobody else may ever see.
  static constexpr uint64_t kCanary = 0x6b0d'55e1'9c3a'f27bull;

  // Opens a job at the daemon of OFFLOADD_SOCKET and puts its weights.
  static absl::StatusOr<std::unique_ptr<HonestNeighbour>> Open(const std::string& job,
                                                               const std::string& pool);
  ~HonestNeighbour() { Stop().IgnoreError(); }

  void Start();
  // OK when every read was served, and with the right bytes.
  absl::Status Stop();
  uint64_t reads() const { return reads_.load(); }
  // Of all reads since Start, in seconds, in the order of time. After Stop.
  const std::vector<double>& latencies_seconds() const { return latencies_seconds_; }

 private:
  HonestNeighbour() = default;
  absl::Status PutWeights();
  absl::Status ReadAll();

  std::unique_ptr<client::Session> session_;
  std::atomic<uint64_t> reads_{0};
  std::atomic<bool> stop_{false};
  std::vector<double> latencies_seconds_;
  absl::Status status_;
  std::thread thread_;
};

}  // namespace offload::tests

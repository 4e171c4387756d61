// tests/raw_rank.h
//
// A rank without manners: speaks the daemon's protocol step by step and leaves every word of it in
// the caller's hands. What client::Session would never send is sent from here.
//
// Thread safety: one thread at a time; the memories are the callers' business.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mapped_region.h"
#include "base/unique_fd.h"
#include "proto/handshake.h"
#include "proto/offload.grpc.pb.h"
#include "proto/ring.h"

namespace offload::tests {

class RawRank {
 public:
  // Tensor 0 of every job: frozen fp32, more than one extent.
  static constexpr uint64_t kElements = 300'000;
  static constexpr uint64_t kRamBytes = 48ull << 20;

  // As far as the token.
  static absl::StatusOr<RawRank> Greet(const std::string& socket_path);
  // As far as descriptors of both memories.
  absl::Status OpenJob(const std::string& job, const std::string& pool);
  // Maps them and says so.
  absl::Status Map();
  // Declares the tensor and seals.
  absl::Status Seal(bool trainable = false);
  // All of it.
  static absl::StatusOr<RawRank> Open(const std::string& socket_path, const std::string& job,
                                      const std::string& pool);

  int socket() const { return socket_.get(); }
  const proto::Token& token() const { return welcome_.token; }
  const std::string& control_path() const { return welcome_.control_path; }
  proto::v1::Control::Stub& stub() { return *stub_; }
  int slab_fd() const { return memory_->slab.get(); }
  int region_fd() const { return memory_->region.get(); }
  const MappedRegion& slab() const { return slab_; }
  const MappedRegion& region() const { return region_; }
  proto::RegionHeader* header() const { return proto::HeaderOf(region_.data()); }
  proto::SubmissionEntry* entries() const { return proto::SubmissionEntriesOf(region_.data()); }
  // The bytes of the region that have pages after Seal().
  uint64_t allocated_region_bytes() const;
  void RingBell() const { memory_->doorbell.Ring(); }
  // False once the daemon has closed the session.
  bool IsAlive() const;
  // A get of the first 4096 bytes, which passes every check.
  // One that keeps nothing.
  static proto::v1::Optimizer PlainSgd();
  static proto::SubmissionEntry GoodEntry(uint64_t tag);

 private:
  RawRank() = default;

  UniqueFd socket_;
  proto::Welcome welcome_;
  std::unique_ptr<proto::v1::Control::Stub> stub_;
  std::optional<proto::SessionMemory> memory_;
  MappedRegion slab_, region_;
};

}  // namespace offload::tests

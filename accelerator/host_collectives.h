// accelerator/host_collectives.h
//
// The stand-in for NCCL: ranks that are threads or processes of one machine, each with a
// HostAccelerator, exchange bytes through memory that they share. A command of a collective is one
// of the device's stream: it executes when streams and events allow, and ends when all ranks' have
// begun. As on a GPU it needs no thread of the trainer to go on.
//
// Reported as violations of the device (host_accelerator.h): ranks whose calls differ in order or
// size, which on a GPU would hang or exchange the wrong bytes; and what its accesses conflict with.
//
// Where bytes of other ranks come there is 0xFF, NaN in every dtype, before they arrive.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <memory>
#include <string>

#include "accelerator/host_accelerator.h"
#include "accelerator/peers.h"

namespace offload::accelerator {

class HostPeers final : public Peers {
 public:
  HostPeers(HostAccelerator* device, std::string address);
  ~HostPeers() override;

  std::string Address() const override { return address_; }
  bool CanAccess(const std::string& address) const override;
  absl::StatusOr<std::string> MakeId(uint32_t world_size) override;
  absl::StatusOr<std::unique_ptr<Collectives>> Join(const std::string& id, uint32_t rank,
                                                    uint32_t world_size) override;

 private:
  struct Made;  // connections that wait for this rank to join

  HostAccelerator* const device_;
  const std::string address_;
  const std::unique_ptr<Made> made_;
};

}  // namespace offload::accelerator

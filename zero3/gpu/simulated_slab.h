// zero3/gpu/simulated_slab.h
//
// For tests: host memory of a daemon with fewer slots than weights, which uses a slot again as soon
// as nobody holds a lease on it. The bytes of a weight are a function of its number and version.
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "base/random.h"
#include "zero3/gpu/weight_source.h"

namespace offload::zero3 {

// Writes what stands for version `version` of a tensor.
void FillPattern(std::span<std::byte> bytes, uint32_t tensor, uint64_t version);
bool HasPattern(std::span<const std::byte> bytes, uint32_t tensor, uint64_t version);

class SimulatedSlab final : public WeightSource {
 public:
  // Slots of the largest weight.
  SimulatedSlab(accelerator::HostAccelerator* device, std::vector<uint64_t> weight_bytes,
                size_t slot_count, uint64_t seed);

  std::span<const std::byte> memory() const { return memory_; }
  // Ascending offsets where slots begin.
  std::vector<uint64_t> borders() const;
  uint64_t version(uint32_t tensor) const { return weights_[tensor].version; }
  // The update of a step: the next version is read from the drive when it is wanted.
  void Change(uint32_t tensor);
  size_t lease_count() const;
  const std::string& violation() const { return violation_; }

  void Prefetch(uint32_t tensor) override;
  absl::StatusOr<const std::byte*> TryLease(uint32_t tensor) override;
  absl::StatusOr<const std::byte*> Lease(uint32_t tensor) override;
  void Return(uint32_t tensor) override;

 private:
  struct Weight {
    uint64_t size_bytes = 0;
    uint64_t version = 1;
    std::optional<size_t> slot;  // that holds this version
    std::deque<size_t> leased;   // slots, of older versions, too, in the order of the leases
  };
  struct Slot {
    std::optional<uint32_t> tensor;  // whose current version it holds
    size_t lease_count = 0;
  };

  std::byte* BytesOf(size_t slot) { return memory_.data() + slot * slot_bytes_; }
  bool Load(uint32_t tensor);

  accelerator::HostAccelerator* const device_;
  Random random_;
  uint64_t slot_bytes_ = 0;
  std::vector<Weight> weights_;
  std::vector<Slot> slots_;
  std::vector<std::byte> memory_;
  std::string violation_;
};

}  // namespace offload::zero3

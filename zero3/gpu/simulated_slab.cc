#include "zero3/gpu/simulated_slab.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload::zero3 {
namespace {

using accelerator::Use;

std::byte PatternAt(uint32_t tensor, uint64_t version, size_t i) {
  // Never 0xFF: that is what the stand-in poisons with.
  return std::byte(static_cast<uint8_t>((tensor * 37 + version * 101 + i * 7) % 251));
}

}  // namespace

void FillPattern(std::span<std::byte> bytes, uint32_t tensor, uint64_t version) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = PatternAt(tensor, version, i);
}

bool HasPattern(std::span<const std::byte> bytes, uint32_t tensor, uint64_t version) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != PatternAt(tensor, version, i)) return false;
  }
  return true;
}

SimulatedSlab::SimulatedSlab(accelerator::HostAccelerator* device,
                             std::vector<uint64_t> weight_bytes, size_t slot_count, uint64_t seed)
    : device_(device), random_(seed), weights_(weight_bytes.size()), slots_(slot_count) {
  for (size_t i = 0; i < weights_.size(); ++i) weights_[i].size_bytes = weight_bytes[i];
  slot_bytes_ = *std::ranges::max_element(weight_bytes);
  memory_.resize(slot_bytes_ * slot_count);
}

std::vector<uint64_t> SimulatedSlab::borders() const {
  std::vector<uint64_t> borders;
  for (size_t i = 0; i < slots_.size(); ++i) borders.push_back(i * slot_bytes_);
  return borders;
}

void SimulatedSlab::Change(uint32_t tensor) {
  Weight& weight = weights_[tensor];
  ++weight.version;
  if (weight.slot.has_value()) slots_[*weight.slot].tensor.reset();
  weight.slot.reset();
}

size_t SimulatedSlab::lease_count() const {
  size_t count = 0;
  for (const Slot& slot : slots_) count += slot.lease_count;
  return count;
}

// Reads a weight from the drive into a slot that nobody leases. False: there is none.
bool SimulatedSlab::Load(uint32_t tensor) {
  std::vector<size_t> free;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].lease_count == 0) free.push_back(i);
  }
  if (free.empty()) return false;
  const size_t chosen = free[random_.Below(free.size())];
  Slot& slot = slots_[chosen];
  if (slot.tensor.has_value()) weights_[*slot.tensor].slot.reset();
  Weight& weight = weights_[tensor];
  device_->NoteHostUse(Use::kWrite, BytesOf(chosen), weight.size_bytes);
  FillPattern({BytesOf(chosen), weight.size_bytes}, tensor, weight.version);
  slot.tensor = tensor;
  weight.slot = chosen;
  return true;
}

void SimulatedSlab::Prefetch(uint32_t tensor) {
  if (!weights_[tensor].slot.has_value() && random_.OneIn(2)) Load(tensor);
}

absl::StatusOr<const std::byte*> SimulatedSlab::TryLease(uint32_t tensor) {
  Weight& weight = weights_[tensor];
  if (!weight.slot.has_value() && random_.OneIn(2)) Load(tensor);
  if (!weight.slot.has_value()) return nullptr;
  ++slots_[*weight.slot].lease_count;
  weight.leased.push_back(*weight.slot);
  return BytesOf(*weight.slot);
}

absl::StatusOr<const std::byte*> SimulatedSlab::Lease(uint32_t tensor) {
  if (lease_count() > 0) violation_ = "a wait for the source that holds leases";
  if (!weights_[tensor].slot.has_value()) Load(tensor);
  return TryLease(tensor);
}

void SimulatedSlab::Return(uint32_t tensor) {
  Weight& weight = weights_[tensor];
  if (weight.leased.empty()) {
    violation_ = absl::StrCat("tensor ", tensor, " returned without a lease");
    return;
  }
  const size_t i = weight.leased.front();
  weight.leased.pop_front();
  Slot& slot = slots_[i];
  if (--slot.lease_count > 0) return;
  // The daemon is quick: other bytes stand there before anybody could look again.
  if (slot.tensor.has_value()) weights_[*slot.tensor].slot.reset();
  slot.tensor.reset();
  device_->NoteHostUse(Use::kWrite, BytesOf(i), slot_bytes_);
  std::memset(BytesOf(i), 0xFE, slot_bytes_);
}

}  // namespace offload::zero3

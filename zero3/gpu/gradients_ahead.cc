#include "zero3/gpu/gradients_ahead.h"

#include <utility>

namespace offload::zero3 {

GradientsAhead::GradientsAhead(std::vector<uint64_t> slot_bytes, uint64_t ahead_bytes,
                               std::vector<uint64_t> read_bytes, uint64_t read_ahead_bytes)
    : schedule_(slot_bytes, ahead_bytes),
      reads_(
          read_bytes.empty() ? std::vector<uint64_t>(slot_bytes.size(), 0) : std::move(read_bytes),
          read_ahead_bytes),
      gradients_(slot_bytes.size(), nullptr) {}

void GradientsAhead::Join(uint32_t tensor, Awaited* gradient) {
  const std::lock_guard lock(mutex_);
  gradients_[tensor] = gradient;
}

void GradientsAhead::Leave(uint32_t tensor, const Awaited* gradient) {
  const std::lock_guard lock(mutex_);
  if (gradients_[tensor] == gradient) gradients_[tensor] = nullptr;
}

void GradientsAhead::Added(uint32_t tensor) {
  const std::lock_guard lock(mutex_);
  std::erase(wanted_, tensor);  // it came when it was used
  std::erase(wanted_reads_, tensor);
  schedule_.Touch(tensor, [this](uint32_t next) { wanted_.push_back(next); });
  reads_.Touch(tensor, [this](uint32_t next) { wanted_reads_.push_back(next); });
  for (; !wanted_.empty(); wanted_.pop_front()) {
    Awaited* const next = gradients_[wanted_.front()];
    if (next != nullptr && !next->ComeAhead()) break;
  }
  for (; !wanted_reads_.empty(); wanted_reads_.pop_front()) {
    Awaited* const next = gradients_[wanted_reads_.front()];
    if (next != nullptr && !next->ReadAhead()) break;
  }
}

// No gradient has a value that the next step adds to.
void GradientsAhead::EndStep() {
  const std::lock_guard lock(mutex_);
  wanted_.clear();
  wanted_reads_.clear();
  schedule_.EndStep([](uint32_t) {});
  reads_.EndStep([](uint32_t) {});
}

}  // namespace offload::zero3

#include "zero3/torch/delivery_ring.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "proto/slab_layout.h"

namespace offload::zero3 {

DeliveryRing::DeliveryRing(uint64_t offset, uint64_t size_bytes, Wait wait)
    : wait_(std::move(wait)) {
  if (size_bytes > 0) free_[offset] = size_bytes;
}

absl::StatusOr<uint64_t> DeliveryRing::Take(uint64_t size_bytes) {
  size_bytes = proto::PaddedBytes(size_bytes);
  absl::MutexLock lock(&mutex_);
  for (;;) {
    if (!failure_.ok()) return failure_;
    const auto fits = std::find_if(free_.begin(), free_.end(),
                                   [&](const auto& range) { return range.second >= size_bytes; });
    if (fits != free_.end() && deliveries_.size() + being_waited_for_ < kDeliveriesMax) {
      const auto [offset, range_bytes] = *fits;
      free_.erase(fits);
      if (range_bytes > size_bytes) free_[offset + size_bytes] = range_bytes - size_bytes;
      return offset;
    }
    if (!WaitForOne()) {
      return MakeError(
          ErrorId::kWindowExhausted,
          absl::StrCat("gradients that the trainer has written fill the ring of this rank, ",
                       FormatBytes(size_bytes), " more are needed"),
          "Raise ram: rings grow with it, up to whole gradients");
    }
  }
}

void DeliveryRing::Deliver(uint64_t offset, uint64_t size_bytes, client::Ticket ticket) {
  absl::MutexLock lock(&mutex_);
  deliveries_.push_back({offset, proto::PaddedBytes(size_bytes), ticket});
}

void DeliveryRing::Return(uint64_t offset, uint64_t size_bytes) {
  absl::MutexLock lock(&mutex_);
  Free(offset, proto::PaddedBytes(size_bytes));
}

absl::Status DeliveryRing::WaitForAll() {
  absl::MutexLock lock(&mutex_);
  while (WaitForOne()) {
  }
  return failure_;
}

bool DeliveryRing::WaitForOne() {
  if (deliveries_.empty()) {
    if (being_waited_for_ == 0) return false;
    freed_.Wait(&mutex_);
    return true;
  }
  const Delivery oldest = deliveries_.front();
  deliveries_.pop_front();
  ++being_waited_for_;
  mutex_.Unlock();
  const absl::Status added = wait_(oldest.ticket);
  mutex_.Lock();
  --being_waited_for_;
  failure_.Update(added);
  Free(oldest.offset, oldest.size_bytes);
  return true;
}

void DeliveryRing::Free(uint64_t offset, uint64_t size_bytes) {
  freed_.SignalAll();
  if (size_bytes == 0) return;
  const auto after = free_.upper_bound(offset);
  if (after != free_.end() && offset + size_bytes == after->first) {
    size_bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.upper_bound(offset);
  if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
    std::prev(next)->second += size_bytes;
  } else {
    free_[offset] = size_bytes;
  }
}

}  // namespace offload::zero3

#include "zero3/torch/device_parts.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {
namespace {

// Of the ring: while one bucket is on its way the daemon adds others.
constexpr uint64_t kPartOfRing = 4;

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceParts>> DeviceParts::Make(
    accelerator::Accelerator* accelerator, uint64_t bytes_max, uint64_t ring_bytes) {
  std::unique_ptr<DeviceParts> made(new DeviceParts(accelerator));
  const uint64_t bucket_bytes =
      std::min({GradientReturn::Options().bucket_bytes, bytes_max / 2, ring_bytes / kPartOfRing});
  OFFLOAD_ASSIGN_OR_RETURN(
      made->return_,
      GradientReturn::Make(accelerator, {.bucket_bytes = bucket_bytes, .held_bytes_max = bytes_max},
                           [parts = made.get()](uint32_t) { parts->Arrived(); }));
  return made;
}

void DeviceParts::Give(uint32_t tensor, const std::byte* bytes, std::shared_ptr<const void> owner) {
  const std::lock_guard lock(mutex_);
  given_[tensor] = {bytes, std::move(owner)};
}

void DeviceParts::Forget(uint32_t tensor) {
  const std::lock_guard lock(mutex_);
  given_.erase(tensor);
}

client::Ticket DeviceParts::Start(uint32_t tensor, uint64_t offset_bytes, uint64_t size_bytes,
                                  std::byte* host, accelerator::Stream stream, Tell tell) {
  client::Ticket ticket = 0;
  Given given;
  {
    const std::lock_guard lock(mutex_);
    const auto found = given_.find(tensor);
    OFFLOAD_CHECK(found != given_.end()) << "a part of tensor " << tensor << ", which has none";
    given = found->second;
    ticket = next_ticket_++;
    parts_.push_back({ticket, host, size_bytes, std::move(tell)});
  }
  const uint64_t held_bytes = DeviceBytes(size_bytes);
  on_their_way_bytes_ += held_bytes;
  return_
      ->Add({.tensor = tensor,
             .device = given.bytes + offset_bytes,
             .host = host,
             .size_bytes = size_bytes,
             .drop =
                 [this, held_bytes, owner = std::move(given.owner)]() mutable {
                   owner.reset();
                   on_their_way_bytes_ -= held_bytes;
                 }},
            stream)
      .IgnoreError();  // who waits for it meets it
  bytes_max_ = std::max(bytes_max_.load(), on_their_way_bytes_.load());
  return ticket;
}

void DeviceParts::Arrived() {
  const std::lock_guard lock(mutex_);
  const Part part = std::move(parts_.front());
  parts_.pop_front();
  accelerator_->NoteHostUse(accelerator::Use::kRead, part.host, part.size_bytes);
  told_[part.ticket] = part.tell();
}

std::optional<client::Ticket> DeviceParts::TakeTold(client::Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const auto told = told_.find(ticket);
  if (told == told_.end()) return std::nullopt;
  const client::Ticket of_daemon = told->second;
  told_.erase(told);
  return of_daemon;
}

absl::StatusOr<client::Ticket> DeviceParts::TicketOf(client::Ticket ticket) {
  for (;;) {
    const bool is_last_look = on_their_way_bytes_ == 0;
    if (const std::optional<client::Ticket> told = TakeTold(ticket)) return *told;
    OFFLOAD_RETURN_IF_ERROR(return_->FlushOldest());
    OFFLOAD_CHECK(!is_last_look) << "a part was waited for already";
  }
}

absl::Status DeviceParts::Flush() { return return_->Flush(); }

uint64_t DeviceParts::bytes_max_ever() const { return bytes_max_; }

}  // namespace offload::zero3

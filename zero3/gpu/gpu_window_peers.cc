// What the window does together with the windows of other ranks.
//
// No rank waits for ever: the list of what is agreed is issued by whoever has the lock next, and
// nobody waits under the lock for anything but what is issued. Before the source is waited for
// offers are taken back, so that nothing is agreed in the meantime.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/gpu/gpu_window.h"

namespace offload::zero3 {
namespace {

// Between two looks at whether the others live.
constexpr std::chrono::milliseconds kPatience(100);

constexpr uint64_t kPartAlignment = 16;

// Of each rank; what is left over is copied by all of them.
uint64_t PartBytes(uint64_t size_bytes, uint32_t world_size) {
  return size_bytes / world_size / kPartAlignment * kPartAlignment;
}

}  // namespace

bool GpuWindow::MayOffer(const Weight& weight) const {
  if (options_.peers == nullptr || weight.size_bytes < options_.gathered_bytes_min) return false;
  if (PartBytes(weight.size_bytes, options_.peers->world_size()) == 0) return false;
  return offered_bytes_ + weight.size_bytes <= options_.leased_bytes_max;
}

// A weight whose lease is held, and a place for it. Nobody else writes there until it is issued or
// taken back.
absl::Status GpuWindow::Offer(uint32_t tensor, const WeightWindow::Room& place,
                              const std::byte* host) {
  Weight& weight = weights_[tensor];
  const auto source_offset = static_cast<uint64_t>(host - options_.source_begin);
  if (!options_.peers->agreement().Offer(tensor, source_offset)) return Fill(tensor, place, host);
  weight.offered = host;
  offers_.push_back(tensor);
  offered_bytes_ += weight.size_bytes;
  for (const uint32_t other : place.evicted) OFFLOAD_RETURN_IF_ERROR(Evict(other));
  OFFLOAD_RETURN_IF_ERROR(WaitForUsers(place.offset_bytes, place.offset_bytes + weight.slot_bytes));
  places_.Occupy(tensor, place.offset_bytes, weight.slot_bytes);
  return IssueAgreed();
}

const std::byte* GpuWindow::EndOffer(uint32_t tensor) {
  offers_.erase(std::ranges::find(offers_, tensor));
  offered_bytes_ -= weights_[tensor].size_bytes;
  return std::exchange(weights_[tensor].offered, nullptr);
}

// Afterwards the weight is not in the window, and its lease is returned unless `keeps_lease`; or it
// is there, when the others have offered it, too.
absl::Status GpuWindow::TakeBack(uint32_t tensor, bool keeps_lease) {
  const bool is_agreed = !options_.peers->agreement().Withdraw(tensor);
  if (is_agreed) OFFLOAD_RETURN_IF_ERROR(IssueAgreed());
  if (weights_[tensor].offered == nullptr) return absl::OkStatus();
  EndOffer(tensor);
  places_.Release(tensor);
  if (!keeps_lease || is_agreed) source_->Return(tensor);
  if (is_agreed) return MakeError(ErrorId::kRankLost, "a rank ended amid an agreement");
  ++counters_.taken_back;
  return absl::OkStatus();
}

// Oldest first, which are needed first: when half of what lies ahead waits for others, a copy has
// the time of the other half.
absl::Status GpuWindow::CopyOldOffers() {
  while (offered_bytes_ > options_.lookahead_bytes / 2) {
    const uint32_t tensor = offers_.front();
    if (ring_.has_value()) {
      OFFLOAD_ASSIGN_OR_RETURN(const bool has_room, ring_->HasRoom(weights_[tensor].size_bytes));
      if (!has_room) return absl::OkStatus();
    }
    const WeightWindow::Room place{*places_.OffsetOf(tensor), {}};
    const std::byte* const host = weights_[tensor].offered;
    OFFLOAD_RETURN_IF_ERROR(TakeBack(tensor, /*keeps_lease=*/true));
    if (weights_[tensor].copied == nullptr) OFFLOAD_RETURN_IF_ERROR(Fill(tensor, place, host));
  }
  return absl::OkStatus();
}

// They are wanted as before.
absl::Status GpuWindow::TakeBackAll() {
  while (!offers_.empty()) {
    const uint32_t tensor = offers_.back();
    OFFLOAD_RETURN_IF_ERROR(TakeBack(tensor));
    if (weights_[tensor].copied == nullptr) wanted_.push_front(tensor);
  }
  return absl::OkStatus();
}

absl::Status GpuWindow::IssueAgreed() {
  if (options_.peers == nullptr) return absl::OkStatus();
  while (const std::optional<uint32_t> tensor = options_.peers->agreement().TakeNext())
    OFFLOAD_RETURN_IF_ERROR(Issue(*tensor));
  return absl::OkStatus();
}

absl::Status GpuWindow::Issue(uint32_t item) {
  if (item < weights_.size()) return Gather(item);
  OFFLOAD_CHECK(options_.other_work != nullptr) << "item " << item;
  return options_.other_work->Issue(item - static_cast<uint32_t>(weights_.size()), gathers_);
}

absl::Status GpuWindow::FollowAgreement() {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  return Keep(IssueAgreed());
}

// The lease goes back when the rank's own part is copied. What a gather that was aborted leaves is
// not a number: no operator takes it for weights.
absl::Status GpuWindow::Gather(uint32_t tensor) {
  Weight& weight = weights_[tensor];
  OFFLOAD_CHECK(weight.offered != nullptr) << "tensor " << tensor << " is agreed, and not offered";
  const std::byte* const host = EndOffer(tensor);
  std::byte* const device = bytes_ + *places_.OffsetOf(tensor);
  const uint64_t part_bytes = PartBytes(weight.size_bytes, options_.peers->world_size());
  const uint64_t begin = options_.peers->rank() * part_bytes;
  const uint64_t gathered_bytes = options_.peers->world_size() * part_bytes;
  RecordedEvent part_copied;
  const absl::Status status = [&] {
    OFFLOAD_RETURN_IF_ERROR(accelerator_->Memset(device, kNanByte, gathered_bytes, copies_));
    OFFLOAD_RETURN_IF_ERROR(CopyPiece(device + begin, host + begin, part_bytes));
    OFFLOAD_RETURN_IF_ERROR(CopyPiece(device + gathered_bytes, host + gathered_bytes,
                                      weight.size_bytes - gathered_bytes));
    OFFLOAD_ASSIGN_OR_RETURN(part_copied, events_.Record(copies_));
    OFFLOAD_RETURN_IF_ERROR(accelerator_->StreamWaitEvent(gathers_, *part_copied));
    OFFLOAD_RETURN_IF_ERROR(options_.peers->collectives().AllGather(device, part_bytes, gathers_));
    OFFLOAD_ASSIGN_OR_RETURN(weight.copied, events_.Record(gathers_));
    weight.is_gathered = true;
    weight.arrival = ++arrivals_;
    ++counters_.gathers;
    return absl::OkStatus();
  }();
  if (ring_.has_value() || !status.ok()) {
    source_->Return(tensor);
    return status;
  }
  leased_bytes_ += weight.size_bytes;
  under_way_.push_back({tensor, std::move(part_copied)});
  return absl::OkStatus();
}

void GpuWindow::LeavePeers() {
  if (options_.peers == nullptr) return;
  if (failed_.ok()) Keep(TakeBackAll()).IgnoreError();
  options_.peers->agreement().Leave();
  if (!failed_.ok()) options_.peers->collectives().Abort();
}

// Issues what is agreed while nobody calls, and ends the waits for ranks that are gone.
void GpuWindow::FollowPeers() {
  PeerGroup& peers = *options_.peers;
  while (!is_closing_) {
    const uint32_t seen = peers.agreement().news();
    if (const absl::Status health = peers.Health(); !health.ok()) {
      peers.collectives().Abort();  // first: who waits for a gather has the lock
      const std::lock_guard lock(mutex_);
      Keep(health).IgnoreError();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      if (failed_.ok()) Keep(IssueAgreed()).IgnoreError();
    }
    peers.agreement().WaitForNews(seen, kPatience);
  }
}

}  // namespace offload::zero3

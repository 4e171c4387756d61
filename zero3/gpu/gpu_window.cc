#include "zero3/gpu/gpu_window.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {
namespace {

std::vector<uint64_t> SlotsOf(std::span<const uint64_t> weight_bytes) {
  std::vector<uint64_t> slots;
  for (const uint64_t size_bytes : weight_bytes) slots.push_back(DeviceBytes(size_bytes));
  return slots;
}

}  // namespace

GpuWindow::GpuWindow(accelerator::Accelerator* accelerator, WeightSource* source,
                     std::span<const uint64_t> weight_bytes, const Options& options)
    : accelerator_(accelerator),
      source_(source),
      options_(options),
      events_(accelerator),
      stalls_(accelerator),
      schedule_(SlotsOf(weight_bytes), options.lookahead_bytes),
      places_(options.window_bytes),
      weights_(weight_bytes.size()) {
  if (!options.staging.empty()) ring_.emplace(accelerator, &events_, options.staging);
  for (size_t i = 0; i < weights_.size(); ++i) {
    weights_[i].size_bytes = weight_bytes[i];
    weights_[i].slot_bytes = DeviceBytes(weight_bytes[i]);
  }
}

absl::StatusOr<std::unique_ptr<GpuWindow>> GpuWindow::Make(accelerator::Accelerator* accelerator,
                                                           WeightSource* source,
                                                           std::span<const uint64_t> weight_bytes,
                                                           const Options& options) {
  auto window =
      std::unique_ptr<GpuWindow>(new GpuWindow(accelerator, source, weight_bytes, options));
  OFFLOAD_ASSIGN_OR_RETURN(window->copies_, accelerator->StreamCreate());
  OFFLOAD_ASSIGN_OR_RETURN(window->bytes_, accelerator->Malloc(options.window_bytes));
  if (options.peers != nullptr) {
    OFFLOAD_ASSIGN_OR_RETURN(window->gathers_, accelerator->StreamCreate());
    window->follower_ = std::thread([window = window.get()] { window->FollowPeers(); });
  }
  return window;
}

GpuWindow::~GpuWindow() {
  std::unique_lock lock(mutex_);
  LeavePeers();
  // The copy stream behind all users, the host behind the copy stream. A device that has failed
  // executes nothing any more.
  for (uint32_t tensor = 0; tensor < weights_.size(); ++tensor) {
    OFFLOAD_CHECK(weights_[tensor].pins == 0) << "tensor " << tensor << " is pinned";
    if (weights_[tensor].copied != nullptr) Evict(tensor).IgnoreError();
  }
  WaitForUsers(0, options_.window_bytes).IgnoreError();
  if (const auto last = events_.Record(copies_); last.ok())
    accelerator_->EventSynchronize(**last).IgnoreError();
  lock.unlock();
  is_closing_ = true;
  if (follower_.joinable())
    follower_.join();  // until now it has ended waits for peers that are gone
  ReturnUnfinished();
  if (gathers_ != accelerator::Stream{}) accelerator_->StreamDestroy(gathers_).IgnoreError();
  if (bytes_ != nullptr) accelerator_->Free(bytes_).IgnoreError();
  if (copies_ != accelerator::Stream{}) accelerator_->StreamDestroy(copies_).IgnoreError();
}

// ---- Operators -----------------------------------------------------------------------------

absl::Status CheckIsNotCaptured(accelerator::Accelerator& accelerator, uint32_t tensor,
                                accelerator::Stream stream) {
  OFFLOAD_ASSIGN_OR_RETURN(const bool is_capturing, accelerator.StreamIsCapturing(stream));
  if (!is_capturing) return absl::OkStatus();
  return MakeError(ErrorId::kGpuCapture,
                   absl::StrCat("tensor ", tensor, " is used by a stream that is being captured"));
}

absl::StatusOr<std::byte*> GpuWindow::Pin(uint32_t tensor, accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  const absl::Status may_use = CheckIsNotCaptured(*accelerator_, tensor, stream);
  if (!may_use.ok()) return ErrorIdOf(may_use) == ErrorId::kGpuCapture ? may_use : Keep(may_use);
  Weight& weight = weights_[tensor];
  OFFLOAD_CHECK(weight.slot_bytes > 0) << "tensor " << tensor << " never comes here";
  schedule_.Touch(tensor, [this](uint32_t next) { wanted_.push_back(next); });
  ++counters_.pins;
  OFFLOAD_RETURN_IF_ERROR(Keep(ReturnCopied()));
  OFFLOAD_RETURN_IF_ERROR(Keep(IssueAgreed()));
  if (weight.offered != nullptr) OFFLOAD_RETURN_IF_ERROR(Keep(TakeBack(tensor)));
  if (weight.copied == nullptr) {
    ++counters_.misses;
    const absl::Status status = BringNow(tensor);
    if (ErrorIdOf(status) == ErrorId::kWindowExhausted) return status;
    OFFLOAD_RETURN_IF_ERROR(Keep(status));
  }
  if (std::ranges::find(weight.ordered, stream) == weight.ordered.end()) {
    OFFLOAD_RETURN_IF_ERROR(Keep(weight.is_known_copied
                                     ? accelerator_->StreamWaitEvent(stream, *weight.copied)
                                     : stalls_.Wait(stream, *weight.copied)));
    weight.ordered.push_back(stream);
  }
  ++weight.pins;
  if (const absl::Status status = BringAhead(); !status.ok()) {
    --weight.pins;
    return Keep(status);
  }
  return bytes_ + *places_.OffsetOf(tensor);
}

absl::Status GpuWindow::Unpin(uint32_t tensor, accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  Weight& weight = weights_[tensor];
  OFFLOAD_CHECK(weight.pins > 0) << "tensor " << tensor << " is not pinned";
  --weight.pins;
  if (!failed_.ok()) return failed_;
  absl::StatusOr<RecordedEvent> last = events_.Record(stream);
  if (!last.ok()) return Keep(last.status());
  const auto use = std::ranges::find(weight.uses, stream, &Use::stream);
  if (use != weight.uses.end()) {
    use->last = *std::move(last);
  } else {
    weight.uses.push_back({stream, *std::move(last)});
  }
  if (weight.pins == 0 && weight.is_old) return Keep(Evict(tensor));
  return absl::OkStatus();
}

absl::Status GpuWindow::RecordStream(uint32_t tensor, accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  Weight& weight = weights_[tensor];
  OFFLOAD_CHECK(weight.pins > 0) << "tensor " << tensor << " is not pinned";
  if (std::ranges::find(weight.recorded, stream) == weight.recorded.end())
    weight.recorded.push_back(stream);
  return failed_;
}

void GpuWindow::SetRecording(bool recording) {
  const std::lock_guard lock(mutex_);
  schedule_.SetRecording(recording);
}

absl::Status GpuWindow::Changed(std::span<const uint32_t> tensors) {
  const std::lock_guard lock(mutex_);
  return EvictOld(tensors);
}

absl::Status GpuWindow::EvictOld(std::span<const uint32_t> tensors) {
  if (!failed_.ok()) return failed_;
  for (const uint32_t tensor : tensors) {
    Weight& weight = weights_[tensor];
    if (weight.offered != nullptr) OFFLOAD_RETURN_IF_ERROR(Keep(TakeBack(tensor)));
    if (weight.copied == nullptr) continue;
    weight.is_old = true;
    if (weight.pins == 0) OFFLOAD_RETURN_IF_ERROR(Keep(Evict(tensor)));
  }
  return absl::OkStatus();
}

absl::Status GpuWindow::EndStep(std::span<const uint32_t> changed) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(EvictOld(changed));
  wanted_.clear();
  const bool is_new = schedule_.EndStep([this](uint32_t next) { wanted_.push_back(next); });
  if (is_new) order_ = UseOrder(schedule_.order(), static_cast<uint32_t>(weights_.size()));
  return Keep(BringAhead());
}

// What a device that has failed was copying nobody reads any more.
void GpuWindow::BeginSourceWait() {
  const std::lock_guard lock(mutex_);
  ++source_waits_;
  if (failed_.ok()) Keep(ReturnAll()).IgnoreError();  // every later call says so
  if (!failed_.ok()) ReturnUnfinished();
}

void GpuWindow::EndSourceWait() {
  const std::lock_guard lock(mutex_);
  OFFLOAD_CHECK(source_waits_ > 0) << "nobody waits for the source";
  --source_waits_;
}

// ---- Bringing weights in -------------------------------------------------------------------

absl::Status GpuWindow::BringNow(uint32_t tensor) {
  auto place = FindPlace(tensor, std::nullopt);
  if (!place.has_value() && !offers_.empty()) {
    OFFLOAD_RETURN_IF_ERROR(TakeBackAll());
    place = FindPlace(tensor, std::nullopt);
  }
  if (!place.has_value()) {
    return MakeError(
        ErrorId::kWindowExhausted,
        absl::StrCat("tensor ", tensor, " of ", FormatBytes(weights_[tensor].size_bytes),
                     " finds no place beside what the same operation uses, in a window of ",
                     FormatBytes(options_.window_bytes)),
        "Raise gpu_ram");
  }
  OFFLOAD_ASSIGN_OR_RETURN(const std::byte* const host, LeaseNow(tensor));
  OFFLOAD_RETURN_IF_ERROR(Fill(tensor, *place, host));
  if (source_waits_ > 0) return ReturnAll();
  if (options_.source_is_shared && leased_bytes_ + offered_bytes_ > options_.leased_bytes_max)
    OFFLOAD_RETURN_IF_ERROR(TakeBackAll());
  while (options_.source_is_shared && leased_bytes_ > options_.leased_bytes_max)
    OFFLOAD_RETURN_IF_ERROR(ReturnOldest());
  return absl::OkStatus();
}

absl::StatusOr<const std::byte*> GpuWindow::LeaseNow(uint32_t tensor) {
  if (leased_bytes_ + offered_bytes_ + weights_[tensor].size_bytes > options_.leased_bytes_max)
    OFFLOAD_RETURN_IF_ERROR(TakeBackAll());
  while (leased_bytes_ > 0 &&
         leased_bytes_ + weights_[tensor].size_bytes > options_.leased_bytes_max) {
    OFFLOAD_RETURN_IF_ERROR(ReturnOldest());
  }
  OFFLOAD_ASSIGN_OR_RETURN(const std::byte* const host, source_->TryLease(tensor));
  if (host != nullptr) return host;
  // The source may need what we hold to make room.
  OFFLOAD_RETURN_IF_ERROR(ReturnAll());
  ++counters_.source_waits;
  return source_->Lease(tensor);
}

// Copies what the schedule wants, in its order, as far as it costs nobody a wait.
absl::Status GpuWindow::BringAhead() {
  OFFLOAD_RETURN_IF_ERROR(CopyOldOffers());
  while (!wanted_.empty() && source_waits_ == 0) {
    const uint32_t tensor = wanted_.front();
    if (weights_[tensor].copied == nullptr && weights_[tensor].offered == nullptr) {
      OFFLOAD_ASSIGN_OR_RETURN(const bool may, MayCopyAhead(weights_[tensor]));
      const auto place = FindPlace(tensor, NextUse(tensor));
      if (!may || !place.has_value()) return absl::OkStatus();
      OFFLOAD_ASSIGN_OR_RETURN(const std::byte* const host, source_->TryLease(tensor));
      if (host == nullptr) {
        source_->Prefetch(tensor);
        return absl::OkStatus();
      }
      OFFLOAD_RETURN_IF_ERROR(MayOffer(weights_[tensor]) ? Offer(tensor, *place, host)
                                                         : Fill(tensor, *place, host));
      ++counters_.prefetches;
    }
    wanted_.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> GpuWindow::MayCopyAhead(const Weight& weight) {
  if (ring_.has_value() && MayOffer(weight)) return true;  // a part of it takes room, and later
  if (ring_.has_value()) return ring_->HasRoom(weight.size_bytes);
  const uint64_t leased_bytes = leased_bytes_ + offered_bytes_;
  if (leased_bytes + weight.size_bytes <= options_.leased_bytes_max) return true;
  return leased_bytes == 0 && !options_.source_is_shared;
}

std::optional<WeightWindow::Room> GpuWindow::FindPlace(uint32_t tensor,
                                                       std::optional<uint64_t> needed) const {
  return places_.Find(weights_[tensor].slot_bytes, needed, [this](uint32_t other) {
    const bool evictable = weights_[other].pins == 0 && weights_[other].offered == nullptr;
    return Occupant{.evictable = evictable, .next_use = NextUse(other)};
  });
}

// Before there is a schedule the oldest goes first.
uint64_t GpuWindow::NextUse(uint32_t tensor) const {
  if (order_.empty()) return kNeverUsed - 1 - weights_[tensor].arrival;
  return order_.NextUse(tensor, schedule_.position());
}

// Puts a weight whose lease is held into a place.
absl::Status GpuWindow::Fill(uint32_t tensor, const WeightWindow::Room& place,
                             const std::byte* host) {
  Weight& weight = weights_[tensor];
  const absl::Status status = [&] {
    for (const uint32_t other : place.evicted) OFFLOAD_RETURN_IF_ERROR(Evict(other));
    return CopyIn(tensor, place.offset_bytes, host);
  }();
  if (ring_.has_value() || !status.ok()) {
    source_->Return(tensor);
    return status;
  }
  leased_bytes_ += weight.size_bytes;
  under_way_.push_back({tensor, weight.copied});
  return absl::OkStatus();
}

absl::Status GpuWindow::CopyIn(uint32_t tensor, uint64_t offset_bytes, const std::byte* host) {
  Weight& weight = weights_[tensor];
  std::byte* const device = bytes_ + offset_bytes;
  OFFLOAD_RETURN_IF_ERROR(WaitForUsers(offset_bytes, offset_bytes + weight.slot_bytes));
  OFFLOAD_RETURN_IF_ERROR(CopyPiece(device, host, weight.size_bytes));
  OFFLOAD_ASSIGN_OR_RETURN(weight.copied, events_.Record(copies_));
  places_.Occupy(tensor, offset_bytes, weight.slot_bytes);
  weight.arrival = ++arrivals_;
  return absl::OkStatus();
}

absl::Status GpuWindow::CopyPiece(std::byte* device, const std::byte* host, uint64_t size_bytes) {
  if (size_bytes == 0) return absl::OkStatus();
  counters_.bytes_to_device += size_bytes;
  if (!ring_.has_value()) return accelerator_->MemcpyToDevice(device, host, size_bytes, copies_);
  accelerator_->NoteHostUse(accelerator::Use::kRead, host, size_bytes);
  return ring_->CopyToDevice(device, {host, size_bytes}, copies_);
}

// Orders the copy stream behind everything that has used a range. All writes into the window are
// its own, so a place needs no more waiting afterwards, nor does the rest of it.
absl::Status GpuWindow::WaitForUsers(uint64_t begin, uint64_t end) {
  for (const Retired& place : retired_) {
    if (place.end <= begin || end <= place.begin) continue;
    for (const RecordedEvent& use : place.uses)
      OFFLOAD_RETURN_IF_ERROR(accelerator_->StreamWaitEvent(copies_, *use));
  }
  std::erase_if(retired_,
                [=](const Retired& place) { return begin < place.end && place.begin < end; });
  return absl::OkStatus();
}

absl::Status GpuWindow::Evict(uint32_t tensor) {
  Weight& weight = weights_[tensor];
  const uint64_t begin = *places_.OffsetOf(tensor), end = begin + weight.slot_bytes;
  Retired place{begin, end, {}};
  if (weight.is_gathered) place.uses.push_back(weight.copied);
  for (Use& use : weight.uses) place.uses.push_back(std::move(use.last));
  absl::Status status;
  for (const accelerator::Stream stream : weight.recorded) {
    absl::StatusOr<RecordedEvent> last = events_.Record(stream);
    if (last.ok()) place.uses.push_back(*std::move(last));
    status.Update(last.status());
  }
  retired_.push_back(std::move(place));
  places_.Release(tensor);
  weight.copied = nullptr;
  weight.is_known_copied = false;
  weight.is_gathered = false;
  weight.is_old = false;
  weight.uses.clear();
  weight.ordered.clear();
  weight.recorded.clear();
  if (!options_.poisons || !status.ok()) return status;
  OFFLOAD_RETURN_IF_ERROR(WaitForUsers(begin, end));
  return accelerator_->Memset(bytes_ + begin, kNanByte, end - begin, copies_);
}

// ---- Leases --------------------------------------------------------------------------------

absl::Status GpuWindow::ReturnCopied() {
  while (!under_way_.empty()) {
    OFFLOAD_ASSIGN_OR_RETURN(const bool is_copied,
                             accelerator_->EventQuery(*under_way_.front().copied));
    if (!is_copied) return absl::OkStatus();
    Weight& weight = weights_[under_way_.front().tensor];
    weight.is_known_copied |= weight.copied == under_way_.front().copied;
    leased_bytes_ -= weight.size_bytes;
    source_->Return(under_way_.front().tensor);
    under_way_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status GpuWindow::ReturnOldest() {
  ++counters_.host_waits;
  OFFLOAD_RETURN_IF_ERROR(accelerator_->EventSynchronize(*under_way_.front().copied));
  return ReturnCopied();
}

absl::Status GpuWindow::ReturnAll() {
  OFFLOAD_RETURN_IF_ERROR(TakeBackAll());
  OFFLOAD_RETURN_IF_ERROR(ReturnCopied());
  while (!under_way_.empty()) OFFLOAD_RETURN_IF_ERROR(ReturnOldest());
  return absl::OkStatus();
}

void GpuWindow::ReturnUnfinished() {
  for (const CopyUnderWay& copy : under_way_) source_->Return(copy.tensor);
  under_way_.clear();
  leased_bytes_ = 0;
  for (const uint32_t tensor : std::deque<uint32_t>(offers_)) {
    EndOffer(tensor);
    source_->Return(tensor);
  }
}

absl::Status GpuWindow::Keep(absl::Status status) {
  if (failed_.ok() && !status.ok()) {
    if (options_.peers != nullptr && ErrorIdOf(status) != ErrorId::kRankLost) {
      // A connection that was ended for a rank that is gone. Of that the others know themselves.
      if (absl::Status reason = options_.peers->Health(); ErrorIdOf(reason) == ErrorId::kRankLost)
        status = std::move(reason);
      else
        options_.peers->agreement().Fail();
    }
    failed_ = status;
  }
  return status;
}

GpuWindow::Counters GpuWindow::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.used_bytes = places_.occupied_bytes();
  counters.stall_seconds = stalls_.Seconds();
  return counters;
}

uint64_t GpuWindow::leased_bytes() const {
  const std::lock_guard lock(mutex_);
  return leased_bytes_ + offered_bytes_;
}

}  // namespace offload::zero3

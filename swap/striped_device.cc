#include "swap/striped_device.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace offload::swap {

absl::StatusOr<std::unique_ptr<StripedDevice>> StripedDevice::Make(
    std::vector<StripeMember> members, StripeMap map, uint64_t size_bytes) {
  if (members.size() != map.member_count())
    return absl::InvalidArgumentError(
        absl::StrCat(members.size(), " members for a map of ", map.member_count()));
  aio::Geometry geometry{.size_bytes = size_bytes, .offset_alignment = 512, .memory_alignment = 4};
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  bool polls_only = false;
  for (uint32_t index = 0; index < members.size(); ++index) {
    const StripeMember& member = members[index];
    const aio::Geometry& own = member.device->geometry();
    if (own.size_bytes < member.offset_bytes + map.MemberBytes(index, size_bytes))
      return absl::InvalidArgumentError(
          absl::StrCat(member.name, " is too short: ", own.size_bytes, " bytes"));
    geometry.offset_alignment = std::max(geometry.offset_alignment, own.offset_alignment);
    geometry.memory_alignment = std::max(geometry.memory_alignment, own.memory_alignment);
    polls_only |= member.device->event_fd() < 0;
    OFFLOAD_RETURN_IF_ERROR(wakeup.Watch(member.device->event_fd()));
  }
  return std::unique_ptr<StripedDevice>(new StripedDevice(std::move(members), std::move(map),
                                                          geometry, std::move(wakeup), polls_only));
}

StripedDevice::StripedDevice(std::vector<StripeMember> members, StripeMap map,
                             const aio::Geometry& geometry, Wakeup wakeup, bool polls_only)
    : members_(std::move(members)),
      map_(std::move(map)),
      geometry_(geometry),
      wakeup_(std::move(wakeup)),
      polls_only_(polls_only) {}

StripedDevice::~StripedDevice() {
  Drain();
  for (const StripeMember& member : members_) wakeup_.Forget(member.device->event_fd());
}

// Each member pins the pages for itself: a transfer of one is none of another.
void StripedDevice::RegisterBuffer(std::span<std::byte> bytes) {
  for (const StripeMember& member : members_) member.device->RegisterBuffer(bytes);
}

uint64_t StripedDevice::registered_bytes() const {
  uint64_t bytes = 0;
  for (const StripeMember& member : members_) bytes += member.device->registered_bytes();
  return bytes;
}

void StripedDevice::Start(std::unique_ptr<Op> op) {
  started_in_poll_ = true;
  auto split = std::make_shared<Split>();
  split->op = std::move(op);
  if (split->op->kind == Kind::kFlush) {
    for (uint32_t member = 0; member < members_.size(); ++member) {
      members_[member].device->Flush(PartDone(split, member));
    }
  } else {
    StartParts(split);
  }
  --split->parts_left;
  OFFLOAD_CHECK(split->parts_left > 0) << "a member completed outside Poll()";
}

// Walks the operation's bytes; a member's part grows as long as they are neighbours in its file.
void StripedDevice::StartParts(const std::shared_ptr<Split>& split) {
  std::vector<Part> open(members_.size());
  uint64_t at_bytes = split->op->offset_bytes;
  for (const iovec& piece : split->op->pieces) {
    for (size_t done_bytes = 0; done_bytes < piece.iov_len;) {
      const StripeMap::Run run = map_.Find(at_bytes);
      const size_t take_bytes = std::min<uint64_t>(piece.iov_len - done_bytes, run.unit_left_bytes);
      const uint64_t offset_bytes = members_[run.member].offset_bytes + run.offset_bytes;
      Part& part = open[run.member];
      const bool joins = !part.pieces.empty() && part.pieces.size() < kMaxPieces &&
                         part.offset_bytes + part.size_bytes == offset_bytes;
      if (!joins) {
        if (!part.pieces.empty()) StartPart(split, run.member, std::move(part));
        part = {.offset_bytes = offset_bytes};
      }
      part.pieces.push_back({static_cast<std::byte*>(piece.iov_base) + done_bytes, take_bytes});
      part.size_bytes += take_bytes;
      done_bytes += take_bytes;
      at_bytes += take_bytes;
    }
  }
  for (uint32_t member = 0; member < members_.size(); ++member) {
    if (!open[member].pieces.empty()) StartPart(split, member, std::move(open[member]));
  }
}

void StripedDevice::StartPart(const std::shared_ptr<Split>& split, uint32_t member, Part part) {
  aio::Device& device = *members_[member].device;
  Done done = PartDone(split, member);
  split->op->kind == Kind::kRead ? device.Read(part.offset_bytes, part.pieces, std::move(done))
                                 : device.Write(part.offset_bytes, part.pieces, std::move(done));
}

aio::Device::Done StripedDevice::PartDone(const std::shared_ptr<Split>& split, uint32_t member) {
  ++split->parts_left;
  return [this, split, member](absl::Status status) {
    if (!status.ok() && split->status.ok()) {
      split->status =
          absl::Status(status.code(), absl::StrCat(members_[member].name, ": ", status.message()));
    }
    FinishPart(*split);
  };
}

void StripedDevice::FinishPart(Split& split) {
  if (--split.parts_left > 0) return;
  ++completed_count_;
  Complete(std::move(split.op), std::move(split.status));
}

size_t StripedDevice::Poll(bool wait) {
  const size_t before = completed_count_;
  wakeup_.Clear();
  started_in_poll_ = false;
  completed_count_ += CompleteRefused();
  for (;;) {
    for (const StripeMember& member : members_) member.device->Poll(/*wait=*/false);
    if (completed_count_ != before || !wait || in_flight() == 0) break;
    WaitForAny();
  }
  // A callback may have started something on a member that had had its turn, and has not handed it
  // to the kernel.
  if (started_in_poll_) wakeup_.Signal();
  return completed_count_ - before;
}

void StripedDevice::WaitForAny() {
  if (!polls_only_) {
    pollfd waiting{.fd = wakeup_.fd(), .events = POLLIN};
    poll(&waiting, 1, /*timeout=*/-1);
    return;
  }
  for (const StripeMember& member : members_) {
    if (member.device->in_flight() > 0) {
      member.device->Poll(/*wait=*/true);
      return;
    }
  }
}

}  // namespace offload::swap

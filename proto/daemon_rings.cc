#include "proto/daemon_rings.h"

#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "base/string_view.h"
#include "proto/cut_text.h"

namespace offload::proto {

void InitializeRegion(std::byte* region) {
  RegionHeader* header = HeaderOf(region);
  header->magic = kRegionMagic;
  header->version = kProtocolVersion;
  header->submission_tail.store(0, std::memory_order_relaxed);
  header->submission_head.store(0, std::memory_order_relaxed);
  header->completion_tail.store(0, std::memory_order_relaxed);
  header->completion_head.store(0, std::memory_order_relaxed);
  header->daemon_sleeping.store(0, std::memory_order_relaxed);
  header->rank_sleeping.store(0, std::memory_order_relaxed);
  header->schedule_position.store(0, std::memory_order_relaxed);
}

void InitializeSlab(std::byte* slab) {
  std::memset(slab, 0, sizeof(SlabHeader));
  auto* header = reinterpret_cast<SlabHeader*>(slab);
  header->magic = kSlabMagic;
  header->version = kProtocolVersion;
}

void PublishFailure(SlabHeader* header, const absl::Status& status) {
  if (header->failure.load(std::memory_order_relaxed) != 0) return;
  const std::string_view text = CutText(ToStd(status.message()), sizeof(header->failure_text) - 1);
  std::memcpy(header->failure_text, text.data(), text.size());
  header->failure_text[text.size()] = 0;
  const ErrorId id = ErrorIdOf(status).value_or(ErrorId::kInternal);
  header->failure.store(static_cast<uint32_t>(id), std::memory_order_release);
}

DaemonRings::DaemonRings(std::byte* region, Doorbell doorbell)
    : header_(HeaderOf(region)),
      doorbell_(std::move(doorbell)),
      submissions_(region),
      completions_(CompletionEntriesOf(region), &header_->completion_tail,
                   &header_->completion_head),
      daemon_sleep_(&header_->daemon_sleeping),
      rank_sleep_(&header_->rank_sleeping) {}

absl::StatusOr<std::optional<SubmissionEntry>> DaemonRings::Next() {
  const std::optional<uint32_t> room = completions_.Room();
  if (!room.has_value()) {
    return MakeError(ErrorId::kProtocol, "completion_head is not where completions were written");
  }
  if (*room <= submissions_.in_flight()) return std::nullopt;
  return submissions_.Next();
}

std::string DaemonRings::CopyStepCommand(uint64_t size_bytes) const {
  OFFLOAD_CHECK(size_bytes <= kStepCommandBytes) << size_bytes;
  const auto* command = reinterpret_cast<const char*>(header_) + kStepCommandOffset;
  return std::string(command, size_bytes);
}

void DaemonRings::Complete(uint64_t tag, uint64_t value, const absl::Status& status) {
  CompletionEntry entry{};
  entry.tag = tag;
  entry.value = value;
  entry.code = static_cast<int32_t>(status.code());
  if (!status.ok()) {
    entry.error = static_cast<int32_t>(ErrorIdOf(status).value_or(ErrorId::kInternal));
  }
  completions_.Push(entry);
  submissions_.CountCompletion();
  unpublished_ = true;
}

void DaemonRings::Publish() {
  if (!unpublished_) return;
  unpublished_ = false;
  completions_.Publish();
  if (rank_sleep_.MustWake()) doorbell_.Ring();
}

bool DaemonRings::PrepareToSleep() {
  Publish();
  daemon_sleep_.Announce();
  const std::optional<uint32_t> room = completions_.Room();
  // Without room for a completion the rank has to read first, and rings when it has.
  const bool has_room = !room.has_value() || *room > submissions_.in_flight();
  if (!has_room || !submissions_.HasNext()) return true;
  Awake();
  return false;
}

void DaemonRings::Awake() { daemon_sleep_.Awake(); }

}  // namespace offload::proto

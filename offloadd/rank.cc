#include "offloadd/rank.h"

#include "base/status_macros.h"
#include "offloadd/limits.h"

namespace offload::daemon {

absl::Status Rank::MakeRegion(Machine& machine, uint64_t address_bytes,
                              const Placement& placement) {
  OFFLOAD_ASSIGN_OR_RETURN(region_,
                           machine.CreateMemory("offloadd-region", address_bytes, placement));
  OFFLOAD_RETURN_IF_ERROR(region_.Allocate(0, kOpenRegionBytes));
  proto::InitializeRegion(region_.data());
  return absl::OkStatus();
}

void Rank::Complete(uint64_t tag, const absl::Status& status, uint64_t value) {
  if (!rings_.has_value()) return;
  if (!status.ok()) {
    failure_texts_.emplace_back(tag, std::string(status.message()));
    if (failure_texts_.size() > kLimits.failure_texts_max) failure_texts_.pop_front();
  }
  rings_->Complete(tag, value, status);
}

std::string Rank::ExplainFailure(uint64_t tag) const {
  for (auto text = failure_texts_.rbegin(); text != failure_texts_.rend(); ++text) {
    if (text->first == tag) return text->second;
  }
  return "";
}

}  // namespace offload::daemon

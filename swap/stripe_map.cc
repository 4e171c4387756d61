#include "swap/stripe_map.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "swap/format.h"

namespace offload::swap {

absl::StatusOr<StripeMap> StripeMap::Make(const StripeNumbers& numbers) {
  const size_t count = numbers.weights.size();
  if (count < 1 || count > kMembersMax)
    return absl::InvalidArgumentError(absl::StrCat(count, " members"));
  if (numbers.head_bytes % kPageBytes != 0 || numbers.head_bytes > kStripedBytesMax ||
      numbers.unit_bytes == 0 || numbers.unit_bytes % kPageBytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a head of ", numbers.head_bytes, " bytes, units of ", numbers.unit_bytes));
  }
  for (const uint32_t weight : numbers.weights) {
    if (weight < 1 || weight > kWeightMax)
      return absl::InvalidArgumentError(absl::StrCat("a member of weight ", weight));
  }
  StripeMap map;
  map.numbers_ = numbers;
  // Each slot goes to the member that is furthest behind its share (smooth weighted round robin).
  const auto total = std::accumulate(numbers.weights.begin(), numbers.weights.end(), int64_t{0});
  std::vector<int64_t> credit(count, 0);
  std::vector<uint32_t> rank(count, 0);
  for (int64_t slot = 0; slot < total; ++slot) {
    for (size_t member = 0; member < count; ++member) credit[member] += numbers.weights[member];
    const auto best = std::max_element(credit.begin(), credit.end());
    const auto member = static_cast<uint32_t>(best - credit.begin());
    *best -= total;
    map.cycle_.push_back({member, rank[member]++});
  }
  return map;
}

StripeMap::Run StripeMap::Find(uint64_t offset_bytes) const {
  const uint64_t head_bytes = numbers_.head_bytes;
  if (offset_bytes < head_bytes) return {0, offset_bytes, head_bytes - offset_bytes};
  const uint64_t unit = (offset_bytes - head_bytes) / numbers_.unit_bytes;
  const uint64_t in_unit = (offset_bytes - head_bytes) % numbers_.unit_bytes;
  const Slot& slot = cycle_[unit % cycle_.size()];
  const uint64_t member_unit = unit / cycle_.size() * numbers_.weights[slot.member] + slot.rank;
  return {slot.member,
          (slot.member == 0 ? head_bytes : 0) + member_unit * numbers_.unit_bytes + in_unit,
          numbers_.unit_bytes - in_unit};
}

uint64_t StripeMap::MemberBytes(uint32_t member, uint64_t store_bytes) const {
  const uint64_t head_bytes = member == 0 ? std::min(store_bytes, numbers_.head_bytes) : 0;
  if (store_bytes <= numbers_.head_bytes) return head_bytes;
  const uint64_t striped_bytes = store_bytes - numbers_.head_bytes;
  const uint64_t cycle_bytes = cycle_.size() * uint64_t{numbers_.unit_bytes};
  uint64_t bytes =
      head_bytes + striped_bytes / cycle_bytes * numbers_.weights[member] * numbers_.unit_bytes;
  uint64_t left_bytes = striped_bytes % cycle_bytes;
  for (const Slot& slot : cycle_) {
    const uint64_t unit_bytes = std::min<uint64_t>(left_bytes, numbers_.unit_bytes);
    if (slot.member == member) bytes += unit_bytes;
    left_bytes -= unit_bytes;
  }
  return bytes;
}

std::vector<uint32_t> WeightsOf(std::span<const double> bandwidths) {
  double best = 0;
  for (const double bandwidth : bandwidths) {
    if (std::isfinite(bandwidth)) best = std::max(best, bandwidth);
  }
  std::vector<uint32_t> weights;
  uint32_t divisor = 0;
  for (const double bandwidth : bandwidths) {
    const double share = std::isfinite(bandwidth) && bandwidth > 0 ? bandwidth / best : 0;
    weights.push_back(
        std::max<uint32_t>(1, static_cast<uint32_t>(std::lround(share * kWeightMax))));
    divisor = std::gcd(divisor, weights.back());
  }
  for (uint32_t& weight : weights) weight /= divisor;
  return weights;
}

}  // namespace offload::swap

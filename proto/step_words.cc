#include "proto/step_words.h"

#include "base/checked.h"

namespace offload::proto {
namespace {

// Calls `apply` with each word of two sums.
template <typename Apply>
void ForEachWord(StepSums& a, const StepSums& b, const Apply& apply) {
  for (size_t phase = 0; phase < kStepPhases; ++phase) {
    apply(a.phase_nanoseconds[phase], b.phase_nanoseconds[phase]);
    for (size_t cause = 0; cause < kStallCauses; ++cause)
      apply(a.stall_nanoseconds[phase][cause], b.stall_nanoseconds[phase][cause]);
  }
  for (size_t result = 0; result < kPrefetchResults; ++result)
    apply(a.prefetches[result], b.prefetches[result]);
}

}  // namespace

uint64_t StepSums::AllNanoseconds() const {
  uint64_t sum = 0;
  for (const uint64_t phase : phase_nanoseconds) sum += phase;
  return sum;
}

uint64_t StepSums::StallNanoseconds() const {
  uint64_t sum = 0;
  for (const auto& phase : stall_nanoseconds) {
    for (const uint64_t stall : phase) sum += stall;
  }
  return sum;
}

std::span<const UseTimes> UseTimesOf(const std::byte* region, uint64_t region_bytes,
                                     uint64_t tensor_count) {
  const auto& words = *reinterpret_cast<const StepWords*>(region + kStepWordsOffset);
  const uint64_t offset = words.use_times_offset.load(std::memory_order_relaxed);
  if (offset < kRegionFixedBytes || !IsAligned(offset, alignof(UseTimes)) ||
      !IsInside(offset, tensor_count * sizeof(UseTimes), region_bytes))
    return {};
  return {reinterpret_cast<const UseTimes*>(region + offset), tensor_count};
}

StepSums ReadStepWords(const StepWords& words) {
  const auto read = [](const std::atomic<uint64_t>& word) {
    return word.load(std::memory_order_relaxed);  // figures order nothing
  };
  StepSums sums;
  for (size_t phase = 0; phase < kStepPhases; ++phase) {
    sums.phase_nanoseconds[phase] = read(words.phase_nanoseconds[phase]);
    for (size_t cause = 0; cause < kStallCauses; ++cause)
      sums.stall_nanoseconds[phase][cause] = read(words.stall_nanoseconds[phase][cause]);
  }
  for (size_t result = 0; result < kPrefetchResults; ++result)
    sums.prefetches[result] = read(words.prefetches[result]);
  return sums;
}

StepSums Difference(const StepSums& now, const StepSums& before) {
  StepSums difference = now;
  ForEachWord(difference, before, [](uint64_t& a, uint64_t b) { a = a < b ? 0 : a - b; });
  return difference;
}

void AddTo(StepSums& sum, const StepSums& more) {
  ForEachWord(sum, more, [](uint64_t& a, uint64_t b) { a += b; });
}

StepSums DividedBy(StepSums sum, uint64_t count) {
  ForEachWord(sum, StepSums(), [count](uint64_t& a, uint64_t) { a /= count; });
  return sum;
}

}  // namespace offload::proto

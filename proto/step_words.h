// proto/step_words.h
//
// What a rank says of its time, in the first page of its region behind the header: how long it was
// in which phase of its steps, what it waited for there, and how its prefetches came out. Sums that
// only grow, since the region was made. The daemon shows them to people and decides nothing by
// them: a rank that writes nonsense spoils its own figures.
//
//   forward   from the return of one step to the first tensor that a backward pass touches,
//             whatever else the trainer does there (data, evaluation); with several micro-batches
//             between their backward passes, too
//   backward  from there to the next forward or step (clipping counts here)
//   step      inside the call of the step
//
// Thread safety: the words may be read and added to from any thread; the sums are plain data.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "proto/shm_abi.h"

namespace offload::proto {

enum class StepPhase : uint32_t { kForward, kBackward, kStep };
inline constexpr size_t kStepPhases = 3;

// What a thread of the rank was blocked by.
enum class StallCause : uint32_t {
  kUpdate,    // the tensor's update of the step before is not done
  kLate,      // the tensor was asked for ahead, and is still on its way
  kMiss,      // the tensor is not there, and nobody had asked for it
  kCommit,    // a step waits for the commit of the one before, or the trainer for the last one
  kTransfer,  // a put, a get, or a transfer of the scratch file (spilled gradients)
  kRanks,     // other ranks: their steps, gradients and exchanges
};
inline constexpr size_t kStallCauses = 6;

// Of a tensor that was not in the slab when the schedule reached it, or whose use had to wait.
enum class PrefetchResult : uint32_t { kOnTime, kLate, kMiss };
inline constexpr size_t kPrefetchResults = 3;

inline constexpr std::array<std::string_view, kStepPhases> kStepPhaseNames = {"forward", "backward",
                                                                              "step"};
inline constexpr std::array<std::string_view, kStallCauses> kStallCauseNames = {
    "update", "late", "miss", "commit", "transfer", "ranks"};
inline constexpr std::array<std::string_view, kPrefetchResults> kPrefetchResultNames = {
    "on_time", "late", "miss"};

// Written by the rank, relaxed. Zero in a new region.
struct StepWords {
  std::atomic<uint64_t> phase_nanoseconds[kStepPhases];
  std::atomic<uint64_t> stall_nanoseconds[kStepPhases][kStallCauses];
  std::atomic<uint64_t> prefetches[kPrefetchResults];
  // In the region: UseTimes of each of the trainer's tensors; 0: there are none.
  std::atomic<uint64_t> use_times_offset;
};
inline constexpr uint64_t kStepWordsOffset = 2048;
static_assert(sizeof(RegionHeader) <= kStepWordsOffset &&
              kStepWordsOffset + sizeof(StepWords) <= kSubmissionRingOffset);

inline StepWords* StepWordsOf(std::byte* region) {
  return reinterpret_cast<StepWords*>(region + kStepWordsOffset);
}

// How long a tensor was the last one that the rank had come for: from its use, waits for it
// included, to that of another one or to the call of the step. As the words.
struct UseTimes {
  std::atomic<uint64_t> nanoseconds[2];  // in forward and backward
};
// Behind the pin words, to the end of their table.
inline constexpr uint64_t UseTimesOffset(uint64_t pins_offset, uint64_t tensor_count) {
  return pins_offset + (tensor_count * sizeof(PinWord) + 63) / 64 * 64;
}
inline constexpr uint64_t PinTableBytes(uint64_t tensor_count) {
  return UseTimesOffset(0, tensor_count) + tensor_count * sizeof(UseTimes);
}
// What `region`, of so many bytes, has of `tensor_count` tensors; empty when the rank names no
// place, or one that is not inside.
std::span<const UseTimes> UseTimesOf(const std::byte* region, uint64_t region_bytes,
                                     uint64_t tensor_count);

// The words at one moment, or what was added between two.
struct StepSums {
  std::array<uint64_t, kStepPhases> phase_nanoseconds{};
  std::array<std::array<uint64_t, kStallCauses>, kStepPhases> stall_nanoseconds{};
  std::array<uint64_t, kPrefetchResults> prefetches{};

  uint64_t AllNanoseconds() const;
  uint64_t StallNanoseconds() const;
  friend bool operator==(const StepSums&, const StepSums&) = default;
};

// What the words say now.
StepSums ReadStepWords(const StepWords& words);
// Word by word; what went back counts as 0.
StepSums Difference(const StepSums& now, const StepSums& before);
// Word by word.
void AddTo(StepSums& sum, const StepSums& more);
// Word by word, as the mean of `count` ranks.
StepSums DividedBy(StepSums sum, uint64_t count);

}  // namespace offload::proto

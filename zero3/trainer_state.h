// zero3/trainer_state.h
//
// The blob that is committed with every step: what the engine has to remember (how often each
// tensor was updated, for the bias correction; small buffers) and behind it the trainer's own
// bytes.
//
// Format, little endian: u32 magic, u32 version, u64 tensors, u64 runs, then (u64 update count, u64
// length) per run of tensors with equal counts, in version 2 u64 length and bytes of the buffers
// (buffers.h), then the trainer's bytes to the end. Version 1 is written where there are no
// buffers.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace offload::zero3 {

inline constexpr size_t kTrainerStateBytesMax = size_t{1} << 20;

struct TrainerState {
  std::vector<uint64_t> update_counts;  // per tensor
  std::string trainer;
  std::string buffers;  // encoded
};

// OFD-1002 when it is longer than a commit takes.
absl::StatusOr<std::string> EncodeTrainerState(const TrainerState& state);
// No bytes are a state without tensors. OFD-1207 when they are not from EncodeTrainerState.
absl::StatusOr<TrainerState> DecodeTrainerState(std::string_view bytes);

}  // namespace offload::zero3

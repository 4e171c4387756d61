// zero3/trainer_state.h
//
// The blob that is committed with every step: what the engine has to remember (how often each
// tensor was updated, for the bias correction; small buffers; the scales of losses) and behind it
// the trainer's own bytes.
//
// Format, little endian: u32 magic, u32 version, u64 tensors, u64 runs, then (u64 update count, u64
// length) per run of tensors with equal counts, from version 2 on u64 length and bytes of the
// buffers (buffers.h), from version 3 on u64 count and (f32 scale, i32 growth tracker) of each
// GradScaler, from version 4 on u64 successions (2^64 - 1: not counted), from version 5 on u64
// count and (u32 is new, u32 length of name, u32 length of former name, both) of each tensor of the
// store, in version 6 u64 count and u64 bytes of each slot, then u64 count of foreign optimizers
// and of each (u32 length of class, u32 is kept, u64 length of description, u64 pieces, class,
// description, and (u32 slot, u32 continues, u64 bytes) of each piece, followed by its bytes where
// it is in no slot), then the trainer's bytes to the end. Written is the first version that has
// what there is.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace offload::zero3 {

inline constexpr size_t kTrainerStateBytesMax = size_t{1} << 20;

// What a GradScaler goes on with.
struct LossScale {
  float scale = 0;
  int32_t growth_tracker = 0;  // steps since the scale has changed
};

// A tensor of a store that was laid out anew for other tensors.
struct LaidOutTensor {
  std::string name;
  // While there is no step yet since the store was laid out: whether it came then, and what its
  // name was before, if another.
  bool is_new = false;
  std::string former_name;

  bool operator==(const LaidOutTensor&) const = default;
};

// What an optimizer that runs in the trainer's process, unmodified, keeps.
struct ForeignState {
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  // Memory of its tensors, one storage after the other: bytes that are here, or in a tensor of the
  // store.
  struct Piece {
    uint32_t slot = kNoSlot;
    bool continues = false;  // the storage that the piece before is of
    uint64_t size_bytes = 0;
    std::string bytes;  // with a slot, none

    bool operator==(const Piece&) const = default;
  };

  std::string optimizer;  // its class
  bool is_kept = true;    // else the description says why it is not
  std::string described;  // by the trainer's language; empty before its first step
  std::vector<Piece> pieces;

  bool operator==(const ForeignState&) const = default;
};

struct TrainerState {
  std::vector<uint64_t> update_counts;  // per tensor
  std::string trainer;
  std::string buffers;                 // encoded
  std::vector<LossScale> loss_scales;  // in the order in which the program makes its scalers
  // How often an object of torch::optim had taken the place of one that was destroyed. Nothing: not
  // counted.
  std::optional<uint64_t> successions;
  // All of them, in their order there. None: those that the job was made with.
  std::vector<LaidOutTensor> layout;
  std::vector<uint64_t> slot_bytes;   // of the tensors of the store for foreign optimizers
  std::vector<ForeignState> foreign;  // in the order in which they are attached
};

// OFD-1002 when it is longer than a commit takes.
absl::StatusOr<std::string> EncodeTrainerState(const TrainerState& state);
// No bytes are a state without tensors. OFD-1207 when they are not from EncodeTrainerState.
absl::StatusOr<TrainerState> DecodeTrainerState(std::string_view bytes);

}  // namespace offload::zero3

#include "zero3/trainer_state.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/slab_layout.h"

namespace offload::zero3 {
namespace {

constexpr uint32_t kMagic = 0x544c464f;  // "OFLT"
constexpr uint32_t kVersion = 1, kVersionWithBuffers = 2, kVersionWithScales = 3,
                   kVersionWithSuccessions = 4, kVersionWithLayout = 5, kVersionWithForeign = 6;
constexpr uint64_t kNotCounted = UINT64_MAX;

// Of a tensor of the layout; its names follow.
struct LayoutHeader {
  uint32_t is_new, name_bytes, former_bytes;
};

// Of a foreign optimizer; its class, its description and its pieces follow.
struct ForeignHeader {
  uint32_t optimizer_bytes, is_kept;
  uint64_t described_bytes, pieces;
};
struct PieceHeader {
  uint32_t slot, continues;
  uint64_t size_bytes;
};

struct Header {
  uint32_t magic, version;
  uint64_t tensors, runs;
};
struct CountRun {
  uint64_t update_count, length;
};

absl::Status Damaged(std::string_view what) {
  return MakeError(ErrorId::kStoreDamaged,
                   absl::StrCat("the trainer state of the last epoch ", std::string(what)));
}

static_assert(sizeof(LossScale) == 8);

template <typename T>
void AppendValue(const T& value, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
void AppendLength(uint64_t length, std::string& bytes) { AppendValue(length, bytes); }

// False when the bytes end within it.
template <typename T>
bool TakeValue(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof(value)) return false;
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return true;
}
bool TakeText(std::string_view& bytes, uint64_t length, std::string& text) {
  if (length > bytes.size()) return false;
  text = std::string(bytes.substr(0, length));
  bytes.remove_prefix(length);
  return true;
}

// Nothing when the bytes end within it.
std::optional<uint64_t> TakeLength(std::string_view& bytes) {
  uint64_t length = 0;
  return TakeValue(bytes, length) ? std::optional(length) : std::nullopt;
}

absl::Status TakeBuffers(std::string_view& bytes, TrainerState& state) {
  const std::optional<uint64_t> length = TakeLength(bytes);
  if (!length.has_value()) return Damaged("ends before its buffers");
  if (!TakeText(bytes, *length, state.buffers)) return Damaged("ends within its buffers");
  return absl::OkStatus();
}

absl::Status TakeScales(std::string_view& bytes, TrainerState& state) {
  const std::optional<uint64_t> count = TakeLength(bytes);
  if (!count.has_value()) return Damaged("ends before its scales");
  if (*count > bytes.size() / sizeof(LossScale)) return Damaged("ends within its scales");
  state.loss_scales.resize(*count);
  if (*count > 0) std::memcpy(state.loss_scales.data(), bytes.data(), *count * sizeof(LossScale));
  bytes.remove_prefix(*count * sizeof(LossScale));
  return absl::OkStatus();
}

void AppendLayout(const std::vector<LaidOutTensor>& layout, std::string& bytes) {
  AppendLength(layout.size(), bytes);
  for (const LaidOutTensor& tensor : layout) {
    const LayoutHeader header = {tensor.is_new ? 1u : 0u, static_cast<uint32_t>(tensor.name.size()),
                                 static_cast<uint32_t>(tensor.former_name.size())};
    AppendValue(header, bytes);
    bytes.append(tensor.name).append(tensor.former_name);
  }
}

absl::Status TakeLayout(std::string_view& bytes, TrainerState& state) {
  const std::optional<uint64_t> count = TakeLength(bytes);
  if (!count.has_value()) return Damaged("ends before its layout");
  for (uint64_t i = 0; i < *count; ++i) {
    LayoutHeader header;
    LaidOutTensor tensor;
    if (!TakeValue(bytes, header) || !TakeText(bytes, header.name_bytes, tensor.name) ||
        !TakeText(bytes, header.former_bytes, tensor.former_name))
      return Damaged("ends within its layout");
    tensor.is_new = header.is_new != 0;
    state.layout.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

void AppendForeign(const TrainerState& state, std::string& bytes) {
  AppendLength(state.slot_bytes.size(), bytes);
  for (const uint64_t size_bytes : state.slot_bytes) AppendLength(size_bytes, bytes);
  AppendLength(state.foreign.size(), bytes);
  for (const ForeignState& each : state.foreign) {
    AppendValue(ForeignHeader{static_cast<uint32_t>(each.optimizer.size()), each.is_kept ? 1u : 0u,
                              each.described.size(), each.pieces.size()},
                bytes);
    bytes.append(each.optimizer).append(each.described);
    for (const ForeignState::Piece& piece : each.pieces) {
      AppendValue(PieceHeader{piece.slot, piece.continues ? 1u : 0u, piece.size_bytes}, bytes);
      bytes.append(piece.bytes);
    }
  }
}

bool TakeForeignState(std::string_view& bytes, const TrainerState& state, ForeignState& taken) {
  ForeignHeader header;
  if (!TakeValue(bytes, header) || !TakeText(bytes, header.optimizer_bytes, taken.optimizer) ||
      !TakeText(bytes, header.described_bytes, taken.described))
    return false;
  taken.is_kept = header.is_kept != 0;
  for (uint64_t i = 0; i < header.pieces; ++i) {
    PieceHeader piece;
    if (!TakeValue(bytes, piece)) return false;
    ForeignState::Piece& made = taken.pieces.emplace_back();
    made.slot = piece.slot;
    made.continues = piece.continues != 0;
    made.size_bytes = piece.size_bytes;
    const bool is_there =
        made.slot == ForeignState::kNoSlot
            ? TakeText(bytes, made.size_bytes, made.bytes)
            : made.slot < state.slot_bytes.size() && made.size_bytes <= state.slot_bytes[made.slot];
    if (!is_there) return false;
  }
  return true;
}

absl::Status TakeForeign(std::string_view& bytes, TrainerState& state) {
  constexpr std::string_view kEnds = "ends within what optimizers keep";
  const std::optional<uint64_t> slots = TakeLength(bytes);
  if (!slots.has_value() || *slots > bytes.size() / sizeof(uint64_t)) return Damaged(kEnds);
  for (uint64_t i = 0; i < *slots; ++i) state.slot_bytes.push_back(*TakeLength(bytes));
  const std::optional<uint64_t> count = TakeLength(bytes);
  if (!count.has_value()) return Damaged(kEnds);
  for (uint64_t i = 0; i < *count; ++i) {
    if (!TakeForeignState(bytes, state, state.foreign.emplace_back())) return Damaged(kEnds);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> EncodeTrainerState(const TrainerState& state) {
  std::vector<CountRun> runs;
  for (const uint64_t count : state.update_counts) {
    if (runs.empty() || runs.back().update_count != count) runs.push_back({count, 0});
    ++runs.back().length;
  }
  const bool has_foreign = !state.foreign.empty() || !state.slot_bytes.empty();
  const uint32_t version = has_foreign                     ? kVersionWithForeign
                           : !state.layout.empty()         ? kVersionWithLayout
                           : state.successions.has_value() ? kVersionWithSuccessions
                           : !state.loss_scales.empty()    ? kVersionWithScales
                           : !state.buffers.empty()        ? kVersionWithBuffers
                                                           : kVersion;
  const Header header = {kMagic, version, state.update_counts.size(), runs.size()};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(CountRun));
  if (version >= kVersionWithBuffers) {
    AppendLength(state.buffers.size(), bytes);
    bytes += state.buffers;
  }
  if (version >= kVersionWithScales) {
    AppendLength(state.loss_scales.size(), bytes);
    bytes.append(reinterpret_cast<const char*>(state.loss_scales.data()),
                 state.loss_scales.size() * sizeof(LossScale));
  }
  if (version >= kVersionWithSuccessions)
    AppendLength(state.successions.value_or(kNotCounted), bytes);
  if (version >= kVersionWithLayout) AppendLayout(state.layout, bytes);
  if (version >= kVersionWithForeign) AppendForeign(state, bytes);
  if (bytes.size() > kTrainerStateBytesMax) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("names of tensors, buffers, and what optimizers keep that run in "
                                  "this process have ",
                                  bytes.size(), " bytes in a step, which takes at most ",
                                  kTrainerStateBytesMax));
  }
  const size_t room = kTrainerStateBytesMax - bytes.size();
  if (state.trainer.size() > room) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("the trainer's state has ", state.trainer.size(),
                                  " bytes, a step takes at most ", room));
  }
  return bytes + state.trainer;
}

absl::StatusOr<TrainerState> DecodeTrainerState(std::string_view bytes) {
  if (bytes.empty()) return TrainerState();
  Header header;
  if (bytes.size() < sizeof(header))
    return Damaged(absl::StrCat("has only ", bytes.size(), " bytes"));
  std::memcpy(&header, bytes.data(), sizeof(header));
  bytes.remove_prefix(sizeof(header));
  if (header.magic != kMagic || header.version < kVersion || header.version > kVersionWithForeign)
    return Damaged("is not from this library");
  if (header.tensors > proto::kTensorsMax || header.runs > bytes.size() / sizeof(CountRun)) {
    return Damaged(absl::StrCat("says ", header.tensors, " tensors in ", header.runs, " runs"));
  }
  TrainerState state;
  for (uint64_t i = 0; i < header.runs; ++i) {
    CountRun run;
    std::memcpy(&run, bytes.data() + i * sizeof(run), sizeof(run));
    if (run.length > header.tensors - state.update_counts.size())
      return Damaged("has too many update counts");
    state.update_counts.insert(state.update_counts.end(), run.length, run.update_count);
  }
  if (state.update_counts.size() != header.tensors) return Damaged("has too few update counts");
  bytes.remove_prefix(header.runs * sizeof(CountRun));
  if (header.version >= kVersionWithBuffers) OFFLOAD_RETURN_IF_ERROR(TakeBuffers(bytes, state));
  if (header.version >= kVersionWithScales) OFFLOAD_RETURN_IF_ERROR(TakeScales(bytes, state));
  if (header.version >= kVersionWithSuccessions) {
    state.successions = TakeLength(bytes);
    if (!state.successions.has_value()) return Damaged("ends before its successions");
    if (state.successions == kNotCounted) state.successions.reset();
  }
  if (header.version >= kVersionWithLayout) OFFLOAD_RETURN_IF_ERROR(TakeLayout(bytes, state));
  if (header.version >= kVersionWithForeign) OFFLOAD_RETURN_IF_ERROR(TakeForeign(bytes, state));
  state.trainer = std::string(bytes);
  return state;
}

}  // namespace offload::zero3

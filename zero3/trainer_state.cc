#include "zero3/trainer_state.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/slab_layout.h"

namespace offload::zero3 {
namespace {

constexpr uint32_t kMagic = 0x544c464f;  // "OFLT"
constexpr uint32_t kVersion = 1, kVersionWithBuffers = 2;

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

}  // namespace

absl::StatusOr<std::string> EncodeTrainerState(const TrainerState& state) {
  std::vector<CountRun> runs;
  for (const uint64_t count : state.update_counts) {
    if (runs.empty() || runs.back().update_count != count) runs.push_back({count, 0});
    ++runs.back().length;
  }
  const uint32_t version = state.buffers.empty() ? kVersion : kVersionWithBuffers;
  const Header header = {kMagic, version, state.update_counts.size(), runs.size()};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(CountRun));
  if (!state.buffers.empty()) {
    const uint64_t length = state.buffers.size();
    bytes.append(reinterpret_cast<const char*>(&length), sizeof(length));
    bytes += state.buffers;
  }
  const size_t room = kTrainerStateBytesMax - std::min(kTrainerStateBytesMax, bytes.size());
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
  if (header.magic != kMagic ||
      (header.version != kVersion && header.version != kVersionWithBuffers))
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
  if (header.version == kVersionWithBuffers) {
    uint64_t length = 0;
    if (bytes.size() < sizeof(length)) return Damaged("ends before its buffers");
    std::memcpy(&length, bytes.data(), sizeof(length));
    bytes.remove_prefix(sizeof(length));
    if (length > bytes.size()) return Damaged("ends within its buffers");
    state.buffers = std::string(bytes.substr(0, length));
    bytes.remove_prefix(length);
  }
  state.trainer = std::string(bytes);
  return state;
}

}  // namespace offload::zero3

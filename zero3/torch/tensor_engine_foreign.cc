#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "proto/buffer_tensors.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/log.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// What optimizers keep that run in the trainer's process, unmodified. It stays in its memory
// (process_memory.h), as it is, and belongs to the job: small parts go with the trainer's state,
// the others into slots of the store, which are put when their bytes have changed, as buffers are.
// The store gets slots when they are first needed; it is laid out anew then, as for parameters that
// come later. Where that cannot be (several ranks, a device), it is made with those that are
// expected, and what fits into none of them is not kept. Of several ranks the first one puts, as
// with buffers: what an optimizer keeps is the same in all of them, or it is not kept.

namespace {

uint64_t SizeBytes(const at::Tensor& storage) {
  return static_cast<uint64_t>(storage.numel()) * storage.element_size();
}

std::string BytesOf(const at::Tensor& storage) {
  const at::Tensor bytes = storage.detach().contiguous().cpu();
  return {static_cast<const char*>(bytes.const_data_ptr()), SizeBytes(bytes)};
}

at::Tensor FromBytes(std::string_view bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

// Pieces that follow each other are of one.
struct Storage {
  std::span<const ForeignState::Piece> pieces;
  uint64_t size_bytes = 0;
};
std::vector<Storage> StoragesOf(std::span<const ForeignState::Piece> pieces) {
  std::vector<Storage> storages;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].continues || storages.empty()) storages.push_back({pieces.subspan(i, 0)});
    Storage& last = storages.back();
    last = {{last.pieces.data(), last.pieces.size() + 1}, last.size_bytes + pieces[i].size_bytes};
  }
  return storages;
}

// The smallest ones, as long as all of them are within `bytes_max`.
std::vector<bool> ChooseSmall(std::span<const at::Tensor> storages, uint64_t bytes_max) {
  std::vector<size_t> order(storages.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](size_t i) { return SizeBytes(storages[i]); });
  std::vector<bool> is_small(storages.size());
  uint64_t bytes = 0;
  for (const size_t i : order) {
    bytes += SizeBytes(storages[i]);
    is_small[i] = bytes <= bytes_max;
  }
  return is_small;
}

// The state of a store that has these tensors, with further slots.
TrainerState LaidOut(TrainerState state, std::vector<std::string> names,
                     std::span<const uint64_t> slots) {
  state.layout.clear();
  for (std::string& name : names) state.layout.push_back({.name = std::move(name)});
  state.slot_bytes.insert(state.slot_bytes.end(), slots.begin(), slots.end());
  return state;
}

constexpr uint64_t kAnyRamBytes = uint64_t{1} << 60;

// Room that a store is made with, on the drive, for what may come: two moments, in a file whose
// size is a power of two; of a small model, more (a history).
uint64_t ExpectedBytesMax(std::span<const proto::Tensor> tensors) {
  constexpr uint64_t kLittleBytes = 64 << 20;
  uint64_t weights_bytes = 0;
  for (const proto::Tensor& tensor : tensors)
    weights_bytes +=
        tensor.element_count * std::max<uint64_t>(proto::DtypeBytes(tensor.dtype), sizeof(float));
  return std::max(5 * weights_bytes, kLittleBytes);
}

// What ranks say to each other of an optimizer.
constexpr std::string_view kKept = "kept ", kLeft = "left ";

}  // namespace

// ---- When a job goes on ------------------------------------------------------------------------

// Of a layout that no step was taken with, the last ones are not there. The pieces of a storage are
// parts of one tensor.
void TensorEngine::TakeSlots() {
  std::vector<uint64_t>& sizes = state_.slot_bytes;
  const auto is_there = [this](size_t slot) {
    return stored_names_.contains(proto::BufferTensorName(proto::OptimizerSlotName(slot)));
  };
  while (!sizes.empty() && !is_there(sizes.size() - 1)) sizes.pop_back();
  epoch_state_.slot_bytes = sizes;
  buffers_.AddSlots(sizes);
  const ProcessMemory::Use use(process_memory_, /*inside_passes=*/false);
  const std::vector<Buffers::Large*> slots = buffers_.slots();
  for (const ForeignState& state : state_.foreign) {
    for (const Storage& storage : StoragesOf(state.pieces)) {
      const at::Tensor whole = at::empty({static_cast<int64_t>(storage.size_bytes)}, at::kByte);
      int64_t at = 0;
      for (const ForeignState::Piece& piece : storage.pieces) {
        const auto size_bytes = static_cast<int64_t>(piece.size_bytes);
        if (piece.slot < slots.size())
          slots[piece.slot]->tensor =
              whole.narrow(0, std::exchange(at, at + size_bytes), size_bytes);
      }
    }
  }
}

const ForeignState* TensorEngine::foreign(size_t number) const {
  return number < state_.foreign.size() ? &state_.foreign[number] : nullptr;
}

std::vector<at::Tensor> TensorEngine::TakeForeignStorages(size_t number) {
  const auto is_in_slot = [](const ForeignState::Piece& piece) {
    return piece.slot != ForeignState::kNoSlot;
  };
  const std::vector<ForeignState::Piece> pieces = state_.foreign.at(number).pieces;
  if (std::ranges::any_of(pieces, is_in_slot)) Seal();
  const std::vector<Buffers::Large*> slots = buffers_.slots();
  std::vector<at::Tensor> storages;
  for (const Storage& storage : StoragesOf(pieces)) {
    const ForeignState::Piece& first = storage.pieces.front();
    if (!is_in_slot(first)) {
      storages.push_back(FromBytes(first.bytes));
      continue;
    }
    const at::Tensor& part = slots.at(first.slot)->tensor;
    storages.push_back(part.defined()
                           ? part.as_strided({static_cast<int64_t>(storage.size_bytes)}, {1})
                           : ReadPieces(storage.pieces));
  }
  return storages;
}

// Of a storage that was taken before: the next optimizer under its number takes it again.
at::Tensor TensorEngine::ReadPieces(std::span<const ForeignState::Piece> pieces) {
  std::string all;
  for (const ForeignState::Piece& piece : pieces) {
    const Buffers::Large& slot = *buffers_.slots().at(piece.slot);
    std::string bytes(slot.element_count * sizeof(float), '\0');
    ThrowIfError(CopyOut(IdOfLarge(&slot - buffers_.large().data()), proto::Plane::kWeight,
                         sizeof(float), reinterpret_cast<std::byte*>(bytes.data())));
    all.append(bytes, 0, piece.size_bytes);
  }
  return FromBytes(all);
}

void TensorEngine::ExpectForeign(std::span<const uint64_t> storages_bytes) {
  expected_storages_.insert(expected_storages_.end(), storages_bytes.begin(), storages_bytes.end());
}

void TensorEngine::AddForeign(size_t number, const std::string& optimizer, bool commits_itself) {
  CheckAverages(absl::StrCat(optimizer, " runs in the trainer's process"));
  if (!commits_itself) unseen_foreign_.insert(number);
  if (number < state_.foreign.size() && state_.foreign[number].optimizer == optimizer) return;
  state_.foreign.resize(std::max(state_.foreign.size(), number + 1));
  state_.foreign[number] = {.optimizer = optimizer};
}

// What is inline in the trainer's state needs no room.
std::vector<uint64_t> TensorEngine::ExpectedSlots(std::span<const proto::Tensor> tensors) const {
  std::vector<uint64_t> sizes_bytes;
  const uint64_t all =
      std::accumulate(expected_storages_.begin(), expected_storages_.end(), uint64_t{0});
  if (attached_.sealed || !state_.slot_bytes.empty() || all <= SmallForeignBytes() ||
      (!may_grow() && all > ExpectedBytesMax(tensors)))
    return sizes_bytes;
  const uint64_t piece_bytes_max = PieceBytesMax(tensors);
  for (const uint64_t storage_bytes : expected_storages_) {
    for (uint64_t begin = 0; begin < storage_bytes; begin += piece_bytes_max)
      sizes_bytes.push_back(std::min(piece_bytes_max, storage_bytes - begin));
  }
  return sizes_bytes;
}

// With a store that cannot be laid out anew, when it is made.
void TensorEngine::AddExpectedSlots() {
  if (may_grow()) return;
  const std::vector<uint64_t> slots = ExpectedSlots(declared_);
  if (slots.empty() || !FitsWith(slots)) return;
  Buffers buffers = buffers_;
  buffers.AddSlots(slots);
  struct TrainerState next = LaidOut(state_, NamesInStore(buffers), slots);
  // The names go with every step, and are not all that does.
  const absl::StatusOr<std::string> encoded = EncodeTrainerState(next);
  if (!encoded.ok() || encoded->size() > StateBytesMax(*attachment_) / 2) return;
  buffers_ = std::move(buffers);
  state_.slot_bytes = std::move(next.slot_bytes);
  state_.layout = std::move(next.layout);
}

void TensorEngine::RaiseFloor(Plan& plan) const {
  const std::vector<uint64_t> slots = ExpectedSlots(declared_);
  if (slots.empty()) return;
  Buffers buffers = buffers_;
  buffers.AddSlots(slots);
  PlanInput input = DescribeJob({}, optimizer_, buffers);
  input.ram_bytes = kAnyRamBytes;
  const absl::StatusOr<Plan> with_slots = MakePlan(input);
  if (!with_slots.ok()) return;
  plan.floor_bytes = with_slots->floor_bytes;
  plan.floor_without_spilling_bytes = with_slots->floor_without_spilling_bytes;
  if (ram_bytes_ >= plan.floor_bytes) return;
  Log().warn(
      "ram is {}: the job may have no room for what an optimizer keeps that runs in this process, "
      "and then cannot be resumed. Set ram to at least {} bytes, or train it in one run",
      FormatBytes(ram_bytes_), plan.floor_bytes);
}

// ---- At its steps ------------------------------------------------------------------------------

absl::Status TensorEngine::KeepForeign(size_t number, std::string described,
                                       std::span<const at::Tensor> storages, bool is_first_ranks) {
  if (is_first_ranks) first_ranks_foreign_.insert(number);
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  Seal();
  // What the drive has lost of it must not be committed, nor trained with.
  if (const absl::Status there = process_memory_->Check(); !there.ok()) {
    ThrowStatus(MakeError(ErrorId::kIo,
                          absl::StrCat("what ", state_.foreign.at(number).optimizer,
                                       " keeps could not be paged to nvme_path: ", there.message()),
                          "Check the drive, then start the run again: it goes on from the last "
                          "committed step"));
  }
  ForeignState state = {.optimizer = state_.foreign.at(number).optimizer,
                        .described = std::move(described)};
  absl::Status status = PlaceForeign(number, storages, state);
  if (status.ok()) {
    struct TrainerState next = state_;
    next.foreign[number] = state;
    const absl::StatusOr<std::string> encoded = EncodeTrainerState(next);
    status = encoded.status();
    if (status.ok() && encoded->size() > StateBytesMax(*attachment_)) {
      status = absl::FailedPreconditionError(
          "what is said of its parts is more than a rank's part of a step takes");
    }
  }
  if (status.ok()) SetForeign(number, std::move(state));
  return status;
}

// What the store has stays there until other bytes come.
void TensorEngine::ForgetForeignBytes(size_t number) {
  const std::vector<Buffers::Large*> slots = buffers_.slots();
  for (const ForeignState::Piece& piece : state_.foreign.at(number).pieces) {
    if (piece.slot < slots.size()) slots[piece.slot]->tensor.reset();
  }
}

void TensorEngine::LeaveForeign(size_t number, const std::string& reason) {
  SetForeign(number, {.optimizer = state_.foreign.at(number).optimizer,
                      .is_kept = false,
                      .described = std::string(absl::StripSuffix(reason, "."))});
}

// Before a step of the job, whoever takes it: one of them may have written the weights.
void TensorEngine::LeaveUnseenForeign() {
  const std::unordered_set<size_t> committing = std::exchange(committing_foreign_, {});
  const std::vector<uint32_t> put = attachment_->PutSinceEpoch();
  const bool has_edits =
      std::ranges::any_of(put, [this](uint32_t id) { return id < declared_.size(); });
  if (!has_edits) return;
  for (const size_t number : unseen_foreign_) {
    if (!committing.contains(number))
      LeaveForeign(number, "weights were written in a step that was committed without it");
  }
}

// Of several ranks the first one's bytes are kept. Before a step, which all of them take.
void TensorEngine::AgreeOnForeign() {
  if (attachment_->world_size() == 1 || state_.slot_bytes.empty()) return;
  std::vector<std::string> own;  // of each optimizer: a digest, or why it is not kept
  for (size_t number = 0; number < state_.foreign.size(); ++number) {
    const ForeignState& state = state_.foreign[number];
    own.push_back(state.is_kept ? std::string(kKept) + std::to_string(DigestOf(number))
                                : std::string(kLeft) + state.described);
  }
  constexpr char kEnd = '\n';
  const std::vector<std::string> all = Exchange(absl::StrJoin(own, std::string(1, kEnd)));
  for (const std::string& blob : all) {
    const std::vector<std::string> other = absl::StrSplit(blob, kEnd);
    for (size_t number = 0; number < own.size(); ++number) {
      if (!state_.foreign[number].is_kept) continue;
      const std::string said = number < other.size() ? other[number] : "";
      if (said == own[number]) continue;
      const bool is_left = said.starts_with(kLeft);
      const std::string reason =
          is_left ? said.substr(kLeft.size()) : "it is not the same in all ranks";
      LeaveForeign(number, reason);
      if (is_left || !differing_foreign_.insert(number).second) continue;
      Log().warn("what {} keeps is not part of job {}, which cannot be resumed: {}",
                 state_.foreign[number].optimizer, options_.job, reason);
    }
  }
}

uint32_t TensorEngine::DigestOf(size_t number) {
  uint32_t digest = 0;
  const auto add = [&digest](const std::string& bytes) {
    digest = Crc32c(digest, bytes.data(), bytes.size());
  };
  const std::vector<Buffers::Large*> slots = buffers_.slots();
  for (const ForeignState::Piece& piece : state_.foreign[number].pieces) {
    add(absl::StrCat(piece.slot, " ", piece.continues, " ", piece.size_bytes));
    if (piece.slot < slots.size() && slots[piece.slot]->tensor.defined() &&
        !first_ranks_foreign_.contains(number))
      add(std::to_string(Buffers::CrcOf(Buffers::InOrder(*slots[piece.slot]))));
  }
  return digest;
}

// Slots that it leaves are free.
void TensorEngine::SetForeign(size_t number, ForeignState state) {
  committing_foreign_.insert(number);
  std::unordered_set<uint32_t> used = SlotsOfOthers(number);
  for (const ForeignState::Piece& piece : state.pieces) used.insert(piece.slot);
  state_.foreign[number] = std::move(state);
  const std::vector<Buffers::Large*> slots = buffers_.slots();
  for (uint32_t slot = 0; slot < slots.size(); ++slot) {
    if (!used.contains(slot)) slots[slot]->tensor.reset();
  }
}

std::unordered_set<uint32_t> TensorEngine::SlotsOfOthers(size_t number) const {
  std::unordered_set<uint32_t> slots;
  for (size_t i = 0; i < state_.foreign.size(); ++i) {
    if (i == number) continue;
    for (const ForeignState::Piece& piece : state_.foreign[i].pieces) slots.insert(piece.slot);
  }
  return slots;
}

// None is larger than the largest weight: `ram` that holds that does for them, too.
uint64_t TensorEngine::PieceBytesMax(std::span<const proto::Tensor> tensors) {
  uint64_t bytes = 64 << 10;
  for (const proto::Tensor& tensor : tensors)
    bytes = std::max(bytes, tensor.element_count * proto::DtypeBytes(tensor.dtype));
  return std::bit_floor(bytes);
}

absl::Status TensorEngine::PlaceForeign(size_t number, std::span<const at::Tensor> storages,
                                        ForeignState& state) {
  const std::vector<bool> is_small = ChooseSmall(storages, SmallForeignBytes());
  const auto piece_bytes_max = static_cast<int64_t>(PieceBytesMax(declared_));
  std::vector<at::Tensor> parts;  // by piece; undefined when it is in no slot
  for (size_t i = 0; i < storages.size(); ++i) {
    if (is_small[i]) {
      state.pieces.push_back({.size_bytes = SizeBytes(storages[i]), .bytes = BytesOf(storages[i])});
      parts.emplace_back();
      continue;
    }
    const at::Tensor bytes = storages[i].detach().contiguous();
    for (int64_t begin = 0; begin < bytes.numel(); begin += piece_bytes_max) {
      const int64_t size_bytes = std::min(piece_bytes_max, bytes.numel() - begin);
      state.pieces.push_back(
          {.continues = begin > 0, .size_bytes = static_cast<uint64_t>(size_bytes)});
      parts.push_back(bytes.narrow(0, begin, size_bytes));
    }
  }
  std::vector<uint64_t> missing = GiveSlots(number, parts, state);
  if (missing.empty()) return absl::OkStatus();
  if (absl::Status status = MakeRoom(std::move(missing)); !status.ok()) return status;
  OFFLOAD_CHECK(GiveSlots(number, parts, state).empty());
  return absl::OkStatus();
}

// What is in a slot already stays there. The others take slots of their size, then larger ones, the
// largest part first. Returns the sizes of the slots that are missing.
std::vector<uint64_t> TensorEngine::GiveSlots(size_t number, std::span<const at::Tensor> parts,
                                              ForeignState& state) {
  const std::unordered_set<uint32_t> others = SlotsOfOthers(number);
  const std::vector<Buffers::Large*> slots = buffers_.slots();
  std::multimap<uint64_t, uint32_t> free;                          // by size
  std::map<std::pair<const void*, int64_t>, uint32_t> by_storage;  // and offset: what is in one
  const auto place = [](const at::Tensor& tensor) {
    return std::pair<const void*, int64_t>(tensor.storage().unsafeGetStorageImpl(),
                                           tensor.storage_offset());
  };
  std::vector<size_t> left;
  const auto give = [&](size_t i, uint32_t slot) {
    state.pieces[i].slot = slot;
    slots[slot]->tensor = parts[i];
  };
  for (uint32_t slot = 0; slot < slots.size(); ++slot) {
    if (!others.contains(slot) && slots[slot]->tensor.defined())
      by_storage.emplace(place(slots[slot]->tensor), slot);
  }
  std::unordered_set<uint32_t> taken;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) continue;
    const auto found = by_storage.find(place(parts[i]));
    if (found == by_storage.end() || slots[found->second]->tensor.numel() != parts[i].numel() ||
        !taken.insert(found->second).second) {
      left.push_back(i);
    } else {
      give(i, found->second);
    }
  }
  for (uint32_t slot = 0; slot < slots.size(); ++slot) {
    if (!others.contains(slot) && !taken.contains(slot))
      free.emplace(state_.slot_bytes[slot], slot);
  }
  const auto size_bytes = [&](size_t i) { return state.pieces[i].size_bytes; };
  std::erase_if(left, [&](size_t i) {
    const auto found = free.find(size_bytes(i));
    if (found == free.end()) return false;
    give(i, found->second);
    free.erase(found);
    return true;
  });
  std::ranges::stable_sort(left, std::greater(), size_bytes);
  std::vector<uint64_t> missing;
  for (const size_t i : left) {
    const auto found = free.lower_bound(size_bytes(i));
    if (found == free.end()) {
      missing.push_back(size_bytes(i));
      continue;
    }
    give(i, found->second);
    free.erase(found);
  }
  return missing;
}

// An optimizer that asks again for tensors of a size (a history that grows) will once more.
absl::Status TensorEngine::MakeRoom(std::vector<uint64_t> sizes_bytes) {
  std::vector<uint64_t> more = sizes_bytes;
  std::map<uint64_t, size_t> wanted, there;
  for (const uint64_t size_bytes : sizes_bytes) ++wanted[size_bytes];
  for (const uint64_t size_bytes : state_.slot_bytes) ++there[size_bytes];
  for (const auto& [size_bytes, count] : wanted) {
    if (there[size_bytes] > count) more.insert(more.end(), there[size_bytes] - count, size_bytes);
  }
  missing_slots_.clear();
  return AddSlots(FitsWith(more) ? more : sizes_bytes);
}

bool TensorEngine::FitsWith(std::span<const uint64_t> slots) const {
  Buffers buffers = buffers_;
  buffers.AddSlots(slots);
  return MakePlan(DescribeJob({}, optimizer_, buffers)).ok();
}

bool TensorEngine::MakeRoomForForeign() {
  if (missing_slots_.empty()) return true;
  if (!MayLayOutNow()) return false;
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  const absl::Status status = AddSlots(std::exchange(missing_slots_, {}));
  if (!missing_slots_.empty()) return false;
  if (!status.ok()) Log().warn("{}", std::string(status.message()));
  return true;
}

absl::Status TensorEngine::AddSlots(const std::vector<uint64_t>& sizes_bytes) {
  if (!no_slots_.ok()) return no_slots_;
  if (!may_grow()) {
    const uint64_t bytes = std::accumulate(sizes_bytes.begin(), sizes_bytes.end(), uint64_t{0});
    return no_slots_ = absl::FailedPreconditionError(
               absl::StrCat("it is ", FormatBytes(bytes), " more than the job has had room for ",
                            "since it was made, and ", std::string(why_fixed())));
  }
  const LayoutPass alone(*this);
  attachment_->EndRaw();
  if (!MayLayOutNow()) {
    missing_slots_ = sizes_bytes;
    return absl::UnavailableError("its store has no room for it yet");
  }
  const BeforeGrowth before = TakeBeforeGrowth();
  OFFLOAD_CHECK(before.edits.has_value()) << "edits that do not fit into memory";
  buffers_.AddSlots(sizes_bytes);
  absl::Status fits = MakePlan(DescribeJob({}, optimizer_, buffers_)).status();
  // As long as it may become, without what they keep.
  constexpr size_t kOtherBytes = 64 << 10;
  struct TrainerState next = LaidOut(epoch_state_, NamesInStore(buffers_), sizes_bytes);
  next.buffers.append(kOtherBytes, ' ');
  fits.Update(EncodeTrainerState(next).status());
  if (!fits.ok()) {
    buffers_ = before.buffers;
    return no_slots_ = fits;
  }
  Log().info(
      "the store of job {} is laid out anew with room for what the optimizer keeps that runs in "
      "this process",
      options_.job);
  BringHome(attachment_.get());
  const std::vector<at::Tensor> trained = LeaveGradients();
  for (struct TrainerState* const state : {&state_, &epoch_state_})
    state->slot_bytes.insert(state->slot_bytes.end(), sizes_bytes.begin(), sizes_bytes.end());
  LayOutMore(before, trained);
  return absl::OkStatus();
}

}  // namespace offload::zero3

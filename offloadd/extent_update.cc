#include "offloadd/extent_update.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/averaging.h"
#include "base/bytes_digest.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/average.h"

namespace offload::daemon {
namespace {

// Four planes and a gradient of so many elements stay in a core's own cache between verification,
// update and checksum.
constexpr uint32_t kTileElements = 16 * 1024;
constexpr uint32_t kTieWordBits = 64;
constexpr uint64_t kTieBytesMax = proto::kExtentElements / 8;

template <typename T>
T* At(const PlaneMemory& plane, uint64_t element) {
  return plane.bytes == nullptr ? nullptr : reinterpret_cast<T*>(plane.bytes) + element;
}

// What a worker has of its own is made when it first needs it: a thread begins by clearing all that
// is thread_local, and most threads of the daemon are no workers.
template <typename Room>
Room& OfThread() {
  static thread_local const std::unique_ptr<Room> room = std::make_unique<Room>();
  return *room;
}

// A copy of a tile's gradients.
struct TileGradients {
  alignas(64) std::byte bytes[kTileElements * sizeof(double)];
};

// Checksums of one plane before and after the update.
struct PlaneChecksums {
  std::optional<swap::Checksum> before, after;
};

// The pass over one extent.
class Pass {
 public:
  explicit Pass(ExtentUpdate& update)
      : update_(update), ties_in_(update.ties_in), ties_out_(update.elements) {
    for (const proto::Plane plane : proto::kUpdatedPlanes) {
      const PlaneMemory& memory = update.planes[plane];
      if (memory.bytes == nullptr) continue;
      const swap::ExtentId id = Id(plane);
      if (!update.norms_only && !update.left[plane])
        checksums_[plane].after = update.store->StartChecksum(id, update.sequence);
      if (!update.verifies_first && memory.stamp.has_value() && !memory.stamp->never_written()) {
        checksums_[plane].before = update.store->StartChecksum(id, memory.stamp->sequence);
      }
    }
  }

  void Run() {
    if (update_.norms_only) update_.norms.assign(update_.members.size(), {});
    for (uint32_t begin = 0; begin < update_.elements; begin += kTileElements) {
      const uint32_t end = std::min(begin + kTileElements, update_.elements);
      CopyWeights(begin, end);
      TakeChecksums(begin, end, /*before=*/true);
      UpdateTile(begin, end);
      TakeChecksums(begin, end, /*before=*/false);
    }
    Finish();
  }

 private:
  swap::ExtentId Id(proto::Plane plane) const {
    return ExtentIdOf(update_.store_tensor, plane, update_.index);
  }

  struct Bytes {
    uint64_t from = 0, to = 0;
  };
  // Of a tile in a plane; the last one takes the padding along.
  Bytes BytesOf(proto::Plane plane, uint32_t begin, uint32_t end) const {
    const uint64_t element_bytes = update_.plane_set->Bits(plane) / 8;
    return {begin * element_bytes,
            end == update_.elements ? update_.planes[plane].size_bytes : end * element_bytes};
  }

  void CopyWeights(uint32_t begin, uint32_t end) {
    if (update_.weight_source == nullptr) return;
    const auto [from, to] = BytesOf(proto::Plane::kWeight, begin, end);
    std::memcpy(update_.planes[proto::Plane::kWeight].bytes + from, update_.weight_source + from,
                to - from);
  }

  void TakeChecksums(uint32_t begin, uint32_t end, bool before) {
    for (const proto::Plane plane : proto::kUpdatedPlanes) {
      std::optional<swap::Checksum>& checksum =
          before ? checksums_[plane].before : checksums_[plane].after;
      if (!checksum.has_value()) continue;
      const auto [from, to] = BytesOf(plane, begin, end);
      checksum->Update({update_.planes[plane].bytes + from, to - from});
    }
  }

  void UpdateTile(uint32_t begin, uint32_t end) {
    uint32_t position = begin;
    while (position < end) {
      const MemberUpdate* member = NextMember(position);
      const uint32_t member_begin =
          member == nullptr ? end : std::clamp<uint64_t>(Local(member->begin), position, end);
      SkipTies(position, member_begin);
      if (member_begin == end) return;
      const auto run_end =
          static_cast<uint32_t>(std::min<uint64_t>(Local(member->begin + member->count), end));
      UpdateRun(*member, member_begin, run_end);
      position = run_end;
    }
  }

  // In elements of the extent. Members that began in an earlier extent begin here at 0.
  uint64_t Local(uint64_t element) const {
    return element < update_.begin ? 0 : element - update_.begin;
  }

  // The first member that ends after `position`; members are asked for in ascending order.
  const MemberUpdate* NextMember(uint32_t position) {
    while (next_member_ < update_.members.size()) {
      const MemberUpdate& member = update_.members[next_member_];
      if (member.begin + member.count > update_.begin + position) return &member;
      ++next_member_;
    }
    return nullptr;
  }

  // Elements that are not updated keep their tie bits.
  void SkipTies(uint32_t begin, uint32_t end) {
    const int16_t* residual = At<int16_t>(update_.planes[proto::Plane::kResidual], 0);
    if (residual == nullptr || !update_.plane_set->Has(proto::Plane::kTies)) return;
    for (uint32_t i = begin; i < end; ++i) {
      if (residual[i] == INT16_MIN) ties_out_.writer().Append(ties_in_.reader().Next());
    }
  }

  void UpdateRun(const MemberUpdate& member, uint32_t begin, uint32_t end) {
    kernels::Run run;
    run.count = end - begin;
    run.begin = update_.begin + begin - member.begin;
    run.tensor_count = member.count;
    run.weight_dtype = update_.dtype;
    run.gradient_dtype = run.weight_dtype;
    const uint64_t weight_bytes = proto::DtypeBytes(update_.dtype);
    run.weight = update_.planes[proto::Plane::kWeight].bytes + begin * weight_bytes;
    if (update_.dtype == proto::Dtype::kFloat16) {
      run.half_residual = At<uint32_t>(update_.planes[proto::Plane::kResidual], begin);
    } else {
      run.residual = At<int16_t>(update_.planes[proto::Plane::kResidual], begin);
    }
    run.ties_in = &ties_in_.reader();
    run.ties_out = &ties_out_.writer();
    for (size_t i = 0; i < proto::kStatePlanes.size(); ++i) {
      const PlaneMemory& plane = update_.planes[proto::kStatePlanes[i]];
      if (update_.dtype == proto::Dtype::kFloat64) {
        run.double_state[i] = At<double>(plane, begin);
      } else {
        run.state[i] = At<float>(plane, begin);
      }
    }
    run.gradient = member.gradient != nullptr ? member.gradient + run.begin * weight_bytes
                                              : update_.spilled_gradient + begin * weight_bytes;
    if (update_.takes_gradient_digest) run.gradient = TakeGradients(run, weight_bytes);
    run.gradient_scale = member.gradient_scale;
    run.trust_ratio = member.trust_ratio;
    run.roots = update_.roots;
    if (update_.norms_only) {
      kernels::AddNorms(*member.optimizer, member.step, run, &update_.norms[next_member_]);
    } else {
      const size_t first_tie = ties_out_.writer().position;
      kernels::Update(*member.optimizer, member.step, run);
      MoveAverage(member, begin, run, {ties_out_.writer().bits, first_tie});
    }
  }

  // Behind the update of a run, whose tie bits begin there.
  void MoveAverage(const MemberUpdate& member, uint32_t begin, const kernels::Run& run,
                   kernels::TieReader ties) {
    const PlaneMemory& plane = update_.planes[proto::Plane::kAverage];
    if (plane.bytes == nullptr) return;
    kernels::MoveAverage(StepOf(member.optimizer->averaging(), member.step),
                         {.count = run.count,
                          .weight_dtype = run.weight_dtype,
                          .weight = run.weight,
                          .residual = run.residual,
                          .half_residual = run.half_residual,
                          .ties = ties,
                          .average = plane.bytes + begin * kernels::MasterBytes(update_.dtype)});
  }

  const void* TakeGradients(const kernels::Run& run, uint64_t element_bytes) {
    std::byte* const copy = OfThread<TileGradients>().bytes;
    std::memcpy(copy, run.gradient, run.count * element_bytes);
    digest_.Update(copy, run.count * element_bytes);
    return copy;
  }

  void Finish() {
    update_.gradient_digest = digest_.Finish();
    for (const proto::Plane plane : proto::kUpdatedPlanes) {
      PlaneChecksums& checksums = checksums_[plane];
      if (checksums.after.has_value()) update_.crc[plane] = checksums.after->Finish();
      if (!checksums.before.has_value()) continue;
      if (checksums.before->Finish() == update_.planes[plane].stamp->crc) continue;
      update_.wrong[plane] = true;
      update_.is_spoiled = !update_.norms_only;
    }
    absl::StatusOr<TieBits> ties = ties_out_.Finish();
    update_.status.Update(ties.status());
    if (ties.ok()) update_.ties_out = *std::move(ties);
  }

  ExtentUpdate& update_;
  ByPlane<PlaneChecksums> checksums_;
  BytesDigest digest_;
  TieSource ties_in_;
  TieSink ties_out_;
  size_t next_member_ = 0;
};

// Room for the tie bits of an extent before and after, zeros between two uses.
struct TieBytes {
  alignas(64) uint8_t before[kTieBytesMax] = {};
  alignas(64) uint8_t after[kTieBytesMax] = {};
};

}  // namespace

TieSource::TieSource(const TieBits& ties) : word_bytes_(OfThread<TieBytes>().before) {
  std::memcpy(word_bytes_, &ties.word, sizeof(ties.word));
  reader_.bits =
      ties.plane.has_value() ? reinterpret_cast<const uint8_t*>(ties.plane->data()) : word_bytes_;
}

TieSource::~TieSource() { std::memset(word_bytes_, 0, sizeof(uint64_t)); }

TieSink::TieSink(uint32_t elements) : elements_(elements) {
  writer_.bits = OfThread<TieBytes>().after;
}

TieSink::~TieSink() {
  std::memset(writer_.bits, 0, std::min<uint64_t>(writer_.position / 8 + 1, kTieBytesMax));
}

absl::StatusOr<TieBits> TieSink::Finish() {
  TieBits ties;
  if (writer_.position <= kTieWordBits) {
    std::memcpy(&ties.word, writer_.bits, sizeof(ties.word));
    return ties;
  }
  OFFLOAD_ASSIGN_OR_RETURN(ties.plane,
                           MappedRegion::Anonymous(proto::PaddedBytes((elements_ + 7) / 8)));
  std::memcpy(ties.plane->data(), writer_.bits, (writer_.position + 7) / 8);
  return ties;
}

absl::Status ChecksumError(const swap::Store& store, const swap::ExtentId& id) {
  return MakeError(ErrorId::kChecksum,
                   absl::StrCat("\"", store.path(), "\": extent ", id.index, " of plane ",
                                static_cast<int>(id.plane), " of store tensor ", id.tensor,
                                " does not have its checksum"));
}

bool ExtentUpdate::HasWrong() const {
  return std::find(wrong.values.begin(), wrong.values.end(), true) != wrong.values.end();
}

// Before anything is changed.
static void Verify(ExtentUpdate& update) {
  const auto is_wrong = [&](proto::Plane plane, const std::optional<swap::Stamp>& stamp,
                            std::span<const std::byte> bytes) {
    const swap::ExtentId id = ExtentIdOf(update.store_tensor, plane, update.index);
    return stamp.has_value() && !update.store->Verify(id, *stamp, bytes);
  };
  if (update.ties_in.plane.has_value()) {
    update.wrong[proto::Plane::kTies] =
        is_wrong(proto::Plane::kTies, update.ties_in.stamp, update.ties_in.plane->span());
  }
  if (!update.verifies_first) return;
  for (const proto::Plane plane : proto::kUpdatedPlanes) {
    const PlaneMemory& memory = update.planes[plane];
    update.wrong[plane] = is_wrong(plane, memory.stamp, {memory.bytes, memory.size_bytes});
  }
}

void RunExtentUpdate(ExtentUpdate& update) {
  update.wrong = {};
  update.is_spoiled = false;
  Verify(update);
  if (!update.HasWrong()) Pass(update).Run();
}

uint64_t DigestGradients(const ExtentUpdate& update) {
  const uint64_t element_bytes = proto::DtypeBytes(update.dtype);
  BytesDigest digest;
  for (const MemberUpdate& member : update.members) {
    const uint64_t begin = std::max(member.begin, update.begin);
    const uint64_t end = std::min(member.begin + member.count, update.begin + update.elements);
    if (begin < end)
      digest.Update(member.gradient + (begin - member.begin) * element_bytes,
                    (end - begin) * element_bytes);
  }
  return digest.Finish();
}

absl::StatusOr<TieBits> ClearResidual(std::span<int16_t> residual, uint64_t dropped_begin,
                                      uint64_t dropped_end, const TieBits& in) {
  TieSource source(in);
  TieSink sink(static_cast<uint32_t>(residual.size()));
  for (uint64_t i = 0; i < residual.size(); ++i) {
    const bool dropped = i >= dropped_begin && i < dropped_end;
    if (residual[i] == INT16_MIN) {
      const bool bit = source.reader().Next();
      if (!dropped) sink.writer().Append(bit);
    }
    if (dropped) residual[i] = 0;
  }
  return sink.Finish();
}

}  // namespace offload::daemon

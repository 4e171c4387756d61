#include "offloadd/relayout.h"

#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "kernels/split.h"
#include "offloadd/extent_update.h"
#include "swap/verified_read.h"

namespace offload::daemon {
namespace {

constexpr std::array<proto::Plane, proto::kPlaneCount> kPlanes = {
    proto::Plane::kWeight, proto::Plane::kResidual, proto::Plane::kState0, proto::Plane::kState1,
    proto::Plane::kState2, proto::Plane::kAverage,  proto::Plane::kTies};

// The planes of one extent as they are on the drive. One that is not mapped is zeros.
struct Extent {
  ByPlane<MappedRegion> bytes;
  ByPlane<swap::Stamp> stamps;  // with what is to be written, of them only word and flags
};

absl::Status ReadPlane(swap::Store& store, const swap::ExtentId& id, MappedRegion* bytes,
                       swap::Stamp* stamp) {
  *stamp = store.stamp(id);
  if (stamp->never_written()) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(*bytes, MappedRegion::Anonymous(store.ExtentBytes(id)));
  return swap::ReadVerified(store, {id, bytes->data()}, stamp);
}

absl::StatusOr<Extent> ReadExtent(const LaidOutStore& from, uint32_t store_tensor, uint32_t index) {
  Extent extent;
  const proto::PlaneSet& planes = from.catalogue->store_tensors[store_tensor].planes;
  for (const proto::Plane plane : kPlanes) {
    if (!planes.Has(plane)) continue;
    OFFLOAD_RETURN_IF_ERROR(ReadPlane(*from.store, ExtentIdOf(store_tensor, plane, index),
                                      &extent.bytes[plane], &extent.stamps[plane]));
  }
  return extent;
}

absl::Status WriteExtent(swap::Store& store, uint32_t store_tensor, uint32_t index,
                         const Extent& extent) {
  std::vector<swap::WriteRequest> requests;
  for (const proto::Plane plane : kPlanes) {
    const MappedRegion& bytes = extent.bytes[plane];
    if (!bytes.valid()) continue;
    const swap::ExtentId id = ExtentIdOf(store_tensor, plane, index);
    swap::Checksum checksum = store.StartChecksum(id, store.open_sequence());
    checksum.Update(bytes.span());
    const swap::Stamp& stamp = extent.stamps[plane];
    requests.push_back({id, bytes.data(), checksum.Finish(), stamp.word, stamp.flags});
  }
  if (requests.empty()) return absl::OkStatus();
  return RunToEnd(store, [&](swap::Store::Done done) { store.Write(requests, std::move(done)); });
}

// A bundle with its values by element.
struct Bundle {
  uint32_t store_tensor = 0;
  Extent extent;
  std::vector<uint32_t> masters;  // the bits of fp32, of bf16 tensors; else empty
};

template <typename T>
T* Elements(const MappedRegion& bytes) {
  return reinterpret_cast<T*>(bytes.data());
}

// Of bf16 weights with residuals, or without, where they are zeros.
std::vector<uint32_t> Masters(Extent& extent, uint64_t count) {
  std::vector<uint32_t> masters(count);
  if (!extent.bytes[proto::Plane::kWeight].valid()) return masters;
  const auto* const weights = Elements<uint16_t>(extent.bytes[proto::Plane::kWeight]);
  const MappedRegion& residual = extent.bytes[proto::Plane::kResidual];
  if (!residual.valid()) {
    for (uint64_t i = 0; i < count; ++i) masters[i] = uint32_t{weights[i]} << 16;
    return masters;
  }
  const swap::Stamp& stamp = extent.stamps[proto::Plane::kResidual];
  TieBits ties{.word = stamp.word, .plane = {}, .stamp = {}};
  if ((stamp.flags & swap::kFlagTiesPlane) != 0)
    ties.plane = std::move(extent.bytes[proto::Plane::kTies]);
  TieSource source(ties);
  kernels::Merge(weights, Elements<int16_t>(residual), count, masters.data(), &source.reader());
  return masters;
}

absl::Status Split(const std::vector<uint32_t>& masters, Extent& extent) {
  TieSink sink(static_cast<uint32_t>(masters.size()));
  kernels::Split(masters.data(), masters.size(),
                 Elements<uint16_t>(extent.bytes[proto::Plane::kWeight]),
                 Elements<int16_t>(extent.bytes[proto::Plane::kResidual]), &sink.writer());
  OFFLOAD_ASSIGN_OR_RETURN(TieBits ties, sink.Finish());
  swap::Stamp& stamp = extent.stamps[proto::Plane::kResidual];
  stamp.word = ties.word;
  if (!ties.plane.has_value()) return absl::OkStatus();
  stamp.flags = swap::kFlagTiesPlane;
  extent.bytes[proto::Plane::kTies] = *std::move(ties.plane);
  return absl::OkStatus();
}

// Reads bundles as their members are asked for. Members of one kind come in the order of their
// bundles, so the last bundle of each kind is enough.
class BundleReader {
 public:
  explicit BundleReader(const LaidOutStore& from) : from_(from) {}

  absl::StatusOr<const Bundle*> Find(uint32_t store_tensor) {
    const proto::StoreTensor& tensor = from_.catalogue->store_tensors[store_tensor];
    std::optional<Bundle>& last = last_[static_cast<size_t>(tensor.dtype)][tensor.trainable];
    if (last.has_value() && last->store_tensor == store_tensor) return &*last;
    last.emplace();
    last->store_tensor = store_tensor;
    OFFLOAD_ASSIGN_OR_RETURN(last->extent, ReadExtent(from_, store_tensor, /*index=*/0));
    if (tensor.dtype == proto::Dtype::kBFloat16)
      last->masters = Masters(last->extent, tensor.element_count);
    return &*last;
  }

 private:
  const LaidOutStore from_;
  std::optional<Bundle> last_[proto::kDtypeCount][2];  // frozen, trained
};

// Makes a bundle of members that come from one or several.
class BundleWriter {
 public:
  BundleWriter(const LaidOutStore& from, const LaidOutStore& to, const Moves& moves)
      : from_(from), to_(to), moves_(moves), bundles_(from) {}

  absl::Status Write(uint32_t store_tensor) {
    const proto::StoreTensor& tensor = to_.catalogue->store_tensors[store_tensor];
    OFFLOAD_ASSIGN_OR_RETURN(Extent extent, MakeZeros(store_tensor));
    // Residuals without tie bits are copied as they are.
    std::vector<uint32_t> masters(tensor.planes.Has(proto::Plane::kTies) ? tensor.element_count
                                                                         : 0);
    for (const uint32_t member : tensor.members) {
      if (moves_.sources[member].has_value())
        OFFLOAD_RETURN_IF_ERROR(CopyMember(*moves_.sources[member], member, extent, masters));
    }
    if (!masters.empty()) OFFLOAD_RETURN_IF_ERROR(Split(masters, extent));
    return WriteExtent(*to_.store, store_tensor, /*index=*/0, extent);
  }

 private:
  absl::StatusOr<Extent> MakeZeros(uint32_t store_tensor) const {
    Extent extent;
    for (const proto::Plane plane : proto::kUpdatedPlanes) {
      if (!to_.catalogue->store_tensors[store_tensor].planes.Has(plane)) continue;
      const uint64_t size_bytes = to_.store->ExtentBytes(ExtentIdOf(store_tensor, plane, 0));
      OFFLOAD_ASSIGN_OR_RETURN(extent.bytes[plane], MappedRegion::Anonymous(size_bytes));
    }
    return extent;
  }

  absl::Status CopyMember(uint32_t from_member, uint32_t to_member, Extent& extent,
                          std::vector<uint32_t>& masters) {
    const proto::Placement& source = from_.catalogue->placements[from_member];
    const proto::Placement& target = to_.catalogue->placements[to_member];
    const proto::PlaneSet& planes = from_.catalogue->planes(from_member);
    const uint64_t count = to_.catalogue->tensors[to_member].element_count;
    OFFLOAD_ASSIGN_OR_RETURN(const Bundle* const bundle, bundles_.Find(source.store_tensor));
    if (!masters.empty()) {
      std::memcpy(masters.data() + target.element_offset,
                  bundle->masters.data() + source.element_offset, count * sizeof(uint32_t));
    }
    for (const proto::Plane plane : proto::kUpdatedPlanes) {
      if (!bundle->extent.bytes[plane].valid()) continue;
      std::memcpy(extent.bytes[plane].data() + planes.Bytes(plane, target.element_offset),
                  bundle->extent.bytes[plane].data() + planes.Bytes(plane, source.element_offset),
                  planes.Bytes(plane, count));
    }
    return absl::OkStatus();
  }

  const LaidOutStore from_, to_;
  const Moves& moves_;
  BundleReader bundles_;
};

}  // namespace

absl::Status CopyEpoch(const LaidOutStore& from, const LaidOutStore& to, const Moves& moves,
                       const std::function<bool()>& cancelled) {
  BundleWriter bundles(from, to, moves);
  const std::vector<proto::StoreTensor>& tensors = to.catalogue->store_tensors;
  for (uint32_t store_tensor = 0; store_tensor < tensors.size(); ++store_tensor) {
    if (tensors[store_tensor].bundle) {
      OFFLOAD_RETURN_IF_ERROR(bundles.Write(store_tensor));
      continue;
    }
    const std::optional<uint32_t> tensor = moves.sources[tensors[store_tensor].members.front()];
    if (!tensor.has_value()) continue;
    const uint32_t source = from.catalogue->placements[*tensor].store_tensor;
    for (uint32_t index = 0; index < to.store->ExtentCount(store_tensor); ++index) {
      if (cancelled && cancelled())
        return MakeError(ErrorId::kSessionEnded, "the session ended before its job was open");
      OFFLOAD_ASSIGN_OR_RETURN(const Extent extent, ReadExtent(from, source, index));
      OFFLOAD_RETURN_IF_ERROR(WriteExtent(*to.store, store_tensor, index, extent));
    }
  }
  const swap::CommitInfo& committed = from.store->committed();
  return RunToEnd(*to.store, [&](swap::Store::Done done) {
    to.store->Commit(committed.epoch, moves.blob.value_or(committed.blob), std::move(done));
  });
}

}  // namespace offload::daemon

// offloadd/extent_update.h
//
// The work of one extent between its read and its write, in one pass over tiles that fit into a
// core's cache: verify what came from the drive, update, take the checksums of what goes back.
//
// Thread safety: pure over its arguments; workers run it on memory that the loop lends them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mapped_region.h"
#include "kernels/update.h"
#include "proto/plane_set.h"
#include "proto/slab_layout.h"
#include "swap/store.h"

namespace offload::daemon {

// Something for each plane that is kept.
template <typename T>
struct ByPlane {
  std::array<T, proto::kPlaneCount> values{};
  T& operator[](proto::Plane plane) { return values[proto::IndexOf(plane)]; }
  const T& operator[](proto::Plane plane) const { return values[proto::IndexOf(plane)]; }
};
using PlaneFlags = ByPlane<bool>;

// The extent as the store calls it: the numbers of the planes are one set (job_catalogue.cc).
inline swap::ExtentId ExtentIdOf(uint32_t store_tensor, proto::Plane plane, uint32_t index) {
  return {store_tensor, static_cast<swap::Plane>(plane), index};
}

// Where a plane of an extent is in memory; null when the tensor has no such plane.
struct PlaneMemory {
  std::byte* bytes = nullptr;
  uint64_t size_bytes = 0;           // padded, as on the drive
  std::optional<swap::Stamp> stamp;  // set when the bytes have just been read and must be verified
};

using ExtentPlanes = ByPlane<PlaneMemory>;

// The tie bits of an extent's residual (kernels/split.h): up to 64 in a word, more in memory.
struct TieBits {
  uint64_t word = 0;
  std::optional<MappedRegion> plane;  // as on the drive, padded
  std::optional<swap::Stamp> stamp;   // of `plane`, when it has just been read
};

// A member of the store tensor that this step updates.
struct MemberUpdate {
  uint64_t begin = 0;  // in elements of the store tensor
  uint64_t count = 0;
  std::shared_ptr<const kernels::OptimizerSpec> optimizer;
  int64_t step = 1;        // of this tensor, 1 for its first update
  double trust_ratio = 1;  // of optimizers that need norms, from the sweep before
  const std::byte* gradient =
      nullptr;  // of its first element; null: the extent's bytes are in `spilled_gradient`
  double gradient_scale = 1;
};

struct ExtentUpdate {
  const swap::Store* store = nullptr;
  uint32_t store_tensor = 0;
  uint32_t index = 0;
  uint64_t begin = 0;  // first element of the extent in the store tensor
  uint32_t elements = 0;
  proto::Dtype dtype = proto::Dtype::kFloat32;
  const proto::PlaneSet* plane_set = nullptr;
  const uint32_t* roots = nullptr;  // as kernels::Run has them
  // The weights as they are before, in memory that keeps them; null: where the plane is.
  const std::byte* weight_source = nullptr;
  uint64_t sequence = 0;  // that the outputs are bound to
  PlaneFlags left;        // stays in memory unwritten: gets no checksum
  // Nothing is changed before all that was read has its checksum: planes in memory are nowhere
  // else.
  bool verifies_first = false;
  ExtentPlanes planes;
  TieBits ties_in;
  const std::byte* spilled_gradient = nullptr;
  std::span<const MemberUpdate> members;  // ascending, those that are updated
  bool norms_only = false;  // the first of two sweeps: verify and add up, and change nothing
  // The gradient may change meanwhile: it is read once, and its digest is that of what was read.
  bool takes_gradient_digest = false;

  // Results.
  ByPlane<uint32_t> crc;
  TieBits ties_out;
  std::vector<kernels::Norms> norms;  // of the first of two sweeps: one for each member
  uint64_t gradient_digest = 0;       // with takes_gradient_digest; as DigestGradients()
  PlaneFlags wrong;  // were read and do not have their checksum: the other results are worthless
  bool is_spoiled = false;  // and so are all planes: the update has gone over them
  absl::Status status;

  bool HasWrong() const;
};

// Fills the results. May run again when planes that are wrong or spoiled have been read anew.
void RunExtentUpdate(ExtentUpdate& update);

// GradientDigest over the members' gradients inside the extent, in order; of those in memory.
uint64_t DigestGradients(const ExtentUpdate& update);

// Copies the tie bits of elements [begin, end) that stay, dropping those of [dropped_begin,
// dropped_end), whose residual becomes zero. Used when a member of a bundle is put.
absl::StatusOr<TieBits> ClearResidual(std::span<int16_t> residual, uint64_t dropped_begin,
                                      uint64_t dropped_end, const TieBits& in);

// The bits as the kernels read them. Unverified planes may ask for more bits than there are: they
// get zeros. One per thread at a time; outlived by `ties`.
class TieSource {
 public:
  explicit TieSource(const TieBits& ties);
  ~TieSource();
  TieSource(const TieSource&) = delete;
  TieSource& operator=(const TieSource&) = delete;
  kernels::TieReader& reader() { return reader_; }

 private:
  uint8_t* word_bytes_;
  kernels::TieReader reader_;
};

// Collects tie bits; more than 64 end up in a plane of memory. One per thread at a time.
class TieSink {
 public:
  explicit TieSink(uint32_t elements);
  ~TieSink();
  TieSink(const TieSink&) = delete;
  TieSink& operator=(const TieSink&) = delete;
  kernels::TieWriter& writer() { return writer_; }
  absl::StatusOr<TieBits> Finish();

 private:
  uint32_t elements_;
  kernels::TieWriter writer_;
};

// OFD-1208 naming the extent.
absl::Status ChecksumError(const swap::Store& store, const swap::ExtentId& id);

}  // namespace offload::daemon

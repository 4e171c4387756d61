// proto/plane_set.h
//
// Which values are kept for each element of a tensor, how many bits each has, and what it is
// called: the one description that the store's catalogue, the planner, residency, ring validation,
// transfers, updates and Gather go by. Asked per tensor: tensors of one job may differ.
//
//   bf16, trained by AdamW   weight 16, residual 16, exp_avg 32, exp_avg_sq 32, ties 1
//   fp16, trained by AdamW   weight 16, residual 32, exp_avg 32, exp_avg_sq 32
//   fp32, trained by AdamW   weight 32 (the master itself), exp_avg 32, exp_avg_sq 32
//   fp64, trained by AdamW   weight 64 (the master itself), exp_avg 64, exp_avg_sq 64
//   frozen                   weight
//
// and, where an average is kept, average in the dtype of the master.
//
// Pure values, no input from outside: names come from the optimizer's row (kernels/optimizer.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/dtype.h"
#include "kernels/optimizer.h"

namespace offload::proto {

using kernels::Dtype;
using kernels::DtypeBytes;
using kernels::DtypeName;
using kernels::kDtypeCount;

// The numbers are part of the store's format (swap::Plane) and of the rings. What an optimizer
// keeps in its states is its row's business.
enum class Plane : uint32_t {
  kWeight = 0,  // working dtype: fp32, fp64 (the master itself), bf16 or fp16 (the master's cast)
  kResidual =
      1,        // what the cast has left of the fp32 master (bf16 and fp16 models; kernels/split.h)
  kState0 = 2,  // in the dtype of the master, like the other states
  kState1 = 3,
  kTies = 4,  // tie bits of the residual, only where they do not fit into a word
  kState2 = 5,
  kAverage = 6,  // of the master (base/averaging.h); in its dtype
  kMaster = 16,  // fp32, of fp64 models fp64; kept as weight and residual, so only to be asked for
};
inline constexpr size_t kPlaneCount = 7;  // of those that are kept; the size of arrays by plane
inline constexpr std::array<Plane, kernels::kStatePlanesMax> kStatePlanes = {
    Plane::kState0, Plane::kState1, Plane::kState2};
// What an update reads and writes whole, in the order in which it stands on the drive. Tie bits
// come beside the residual.
inline constexpr std::array<Plane, 6> kUpdatedPlanes = {Plane::kWeight, Plane::kResidual,
                                                        Plane::kState0, Plane::kState1,
                                                        Plane::kState2, Plane::kAverage};
// Those of them that only the update needs.
inline constexpr std::array<Plane, 5> kUpdateOnlyPlanes = {
    Plane::kResidual, Plane::kState0, Plane::kState1, Plane::kState2, Plane::kAverage};
inline constexpr size_t IndexOf(Plane plane) { return static_cast<size_t>(plane); }

class PlaneSet {
 public:
  PlaneSet() = default;
  PlaneSet(Dtype dtype, bool trainable, const kernels::OptimizerSpec& optimizer);

  bool Has(Plane plane) const { return Bits(plane) != 0; }
  uint32_t Bits(Plane plane) const;  // of one element; 0 when there is no such plane
  // Whole bytes for so many elements.
  uint64_t Bytes(Plane plane, uint64_t elements) const { return (elements * Bits(plane) + 7) / 8; }
  // Of kUpdatedPlanes.
  uint32_t updated_count() const;
  const char* name(Plane plane) const;
  // The plane of that name, "master" included.
  std::optional<Plane> Find(std::string_view name) const;
  // "weight, master, exp_avg, average", for messages.
  std::string Names() const;
  // True when the tensor has what an optimizer with these values keeps, under the same names.
  bool Serves(const kernels::OptimizerSpec& optimizer) const;

 private:
  std::array<uint8_t, kPlaneCount> bits_{};
  std::array<const kernels::StatePlane*, kernels::kStatePlanesMax> states_{};
  uint8_t master_bits_ = 0;  // of what is trained
};

}  // namespace offload::proto

// swap/stripe_map.h
//
// How the bytes of one store are dealt out to the files of several pools: a pure function of
// numbers that are fixed at format, so that the layout never depends on anything measured later.
//
// The head of the store (everything but the extents) lies on member 0, so that tools can read
// commits from the main file alone. Behind it stripe units go round: in each cycle member m gets
// weights[m] units, spread as evenly as whole units can be.
//
// Invariants
//   * Every byte of the store lies in exactly one byte of one member, and the members have no
//   holes.
//   * The units of one member are neighbours in its file: a long transfer is one run per member.
//
// Thread safety: immutable after Make().
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace offload::swap {

inline constexpr uint32_t kMembersMax = 16;
inline constexpr uint32_t kWeightMax = 16;
inline constexpr uint32_t kStripeUnitBytes = 1u << 20;
inline constexpr uint64_t kStripedBytesMax = uint64_t{1} << 60;

struct StripeNumbers {
  uint64_t head_bytes = 0;  // a multiple of 4096
  uint32_t unit_bytes = kStripeUnitBytes;
  std::vector<uint32_t> weights;  // of each member, 1 to kWeightMax
};

class StripeMap {
 public:
  // Bytes of the store that lie side by side in one member.
  struct Run {
    uint32_t member = 0;
    uint64_t offset_bytes = 0;     // in the member
    uint64_t unit_left_bytes = 0;  // so many, to the end of the unit
  };

  // INVALID_ARGUMENT for numbers outside their limits.
  static absl::StatusOr<StripeMap> Make(const StripeNumbers& numbers);

  // Of a byte of the store, below kStripedBytesMax.
  Run Find(uint64_t offset_bytes) const;
  // What `member` holds of the first `store_bytes` bytes.
  uint64_t MemberBytes(uint32_t member, uint64_t store_bytes) const;
  const StripeNumbers& numbers() const { return numbers_; }
  uint32_t member_count() const { return static_cast<uint32_t>(numbers_.weights.size()); }

 private:
  StripeNumbers numbers_;
  struct Slot {
    uint32_t member;
    uint32_t rank;  // among the member's slots of the cycle
  };
  std::vector<Slot> cycle_;
};

// Weights in proportion to bandwidths, the fastest kWeightMax, none below 1, reduced. A bandwidth
// that is not a positive number counts as the slowest.
std::vector<uint32_t> WeightsOf(std::span<const double> bandwidths);

}  // namespace offload::swap

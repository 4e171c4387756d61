// zero3/zero_policy.h
//
// What a user asks of a plan beside `ram`: a stage of ZeRO, homes of planes, hints. A policy
// changes memory and traffic, never what is computed.
//
// On a node ranks share one copy of the weights and of the state, so that a stage is a preference,
// which never makes a plan impossible:
//
//   0, 1  every rank's ring takes its whole gradients, which comes before weights
//   2     gradients pass through rings of buckets
//   3     and weights through their window: memory goes to the state first
//
// Without one, memory goes where it saves most: rings of buckets, weights, state, whole rings.
//
// A home is a demand: what does not fit is refused, with the sum.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace offload::zero3 {

inline constexpr int kZeroStageMax = 3;

// The share of a plane's bytes that stays in memory for good: 1 is ram; 0 is nvme, all of it passes
// through memory only. None: auto, as much as `ram` holds. What is always in memory: bundles, and
// weights for which a window would take more than they do.
using Home = std::optional<double>;

struct ZeroPolicy {
  std::optional<int> stage;  // 0 to kZeroStageMax; none: auto
  Home weights;
  Home state;  // masters and moments
  // Hints, in elements; 0: none. Weights of at most so many elements are the first to stay; the
  // window reads so many ahead; weights have at most so many in memory, if that can be.
  uint64_t persistence = 0, prefetch = 0, max_live = 0;

  friend bool operator==(const ZeroPolicy&, const ZeroPolicy&) = default;
};

// Of "auto", "ram", "nvme", or a share between 0 and 1. `name` is what messages call it. OFD-1002
// for anything else.
absl::StatusOr<Home> ParseHome(std::string_view name, std::string_view text);
// Of a number, -1 for none. OFD-1002.
absl::StatusOr<std::optional<int>> CheckStage(int64_t stage);

// "ZeRO stage 3, weights nvme, state 0.25": what was asked for; empty when nothing was.
std::string DescribePolicy(const ZeroPolicy& policy);

}  // namespace offload::zero3

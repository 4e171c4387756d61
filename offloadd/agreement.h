// offloadd/agreement.h
//
// Whether two ranks mean the same model by what they declared, and the same plan by what they
// sealed. Every rank computes its plan by itself from equal input, so a difference is a difference
// of programs, options or libraries.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/offload.pb.h"
#include "proto/slab_layout.h"

namespace offload::daemon {

// What a rank has declared, or sealed with.
template <typename Said>
struct OfRank {
  uint32_t rank;
  const Said& said;
};

// OFD-1805 naming the first tensor that differs, how, and both ranks.
absl::Status CompareTensors(OfRank<std::vector<proto::Tensor>> a,
                            OfRank<std::vector<proto::Tensor>> b);

// How the optimizer of rank `b` is another one than that of rank `a`, with the name of the first
// parameter that differs: "lr is 0.001 in rank 0 and 0.5 in rank 1". Empty: it is not.
std::string DifferenceOf(OfRank<proto::v1::Optimizer> a, OfRank<proto::v1::Optimizer> b);

// OFD-1805 naming the first field, of the optimizer the first parameter, that differs and both
// ranks.
absl::Status ComparePlans(OfRank<std::vector<proto::v1::SealRequest>> a,
                          OfRank<std::vector<proto::v1::SealRequest>> b);

}  // namespace offload::daemon

// offloadd/job_catalogue.h
//
// Between messages, the tensors of a job and the specification of its store.
//
// Thread safety: pure functions. Their input comes from a peer or a file: they return errors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/offload.pb.h"
#include "proto/slab_layout.h"
#include "swap/store.h"

namespace offload::daemon {

// OFD-1601 for an unknown dtype.
absl::StatusOr<proto::Tensor> TensorFromMessage(const proto::v1::Tensor& message);

struct SealedPlan {
  proto::OptimizerState optimizer = proto::OptimizerState::kNone;
  proto::MemoryPlan plan;
  uint64_t pins_offset = 0;
};
// Joins the messages of a Seal. Lengths and sums are checked by ComputeSlabLayout. OFD-1503.
absl::StatusOr<SealedPlan> PlanFromMessages(const std::vector<proto::v1::SealRequest>& messages);

// What a store keeps of the trainer's tensors.
struct StoredCatalogue {
  std::vector<proto::Tensor> tensors;
  proto::OptimizerState optimizer = proto::OptimizerState::kNone;
};
std::string EncodeCatalogue(const proto::Catalogue& catalogue, proto::OptimizerState optimizer);
absl::StatusOr<StoredCatalogue> DecodeCatalogue(std::string_view bytes);  // OFD-1207

// The planes of every store tensor, in the order in which an update reads and writes them.
swap::StoreSpec MakeStoreSpec(const std::string& job, const proto::Catalogue& catalogue,
                              proto::OptimizerState optimizer);

// OFD-1602 naming the first difference.
absl::Status CompareWithStored(const std::string& job, const StoredCatalogue& stored,
                               const proto::Catalogue& catalogue, proto::OptimizerState optimizer);

}  // namespace offload::daemon

// offloadd/job_catalogue.h
//
// Between messages, the tensors of a job and the specification of its store.
//
// Thread safety: pure functions. Their input comes from a peer or a file: they return errors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/offload.pb.h"
#include "proto/slab_layout.h"
#include "swap/store.h"

namespace offload::daemon {

// OFD-1503 for what is none of ours, or whose parameters make no sense.
absl::StatusOr<kernels::OptimizerSpec> OptimizerFromMessage(const proto::v1::Optimizer& message);

// OFD-1601 for an unknown dtype.
absl::StatusOr<proto::Tensor> TensorFromMessage(const proto::v1::Tensor& message);

struct SealedPlan {
  kernels::OptimizerSpec optimizer;
  proto::MemoryPlan plan;
  uint64_t pins_offset = 0;
};
// Joins the messages of a Seal. Lengths and sums are checked by ComputeSlabLayout. OFD-1503.
absl::StatusOr<SealedPlan> PlanFromMessages(const std::vector<proto::v1::SealRequest>& messages);

// What a store keeps of the trainer's tensors: a magic word, the version of what follows, and a
// proto::v1::StoredCatalogue. Version 1 (no magic word, a byte for what the optimizer keeps) is
// refused.
struct StoredCatalogue {
  std::vector<proto::Tensor> tensors;
  std::string optimizer;                                     // its name
  std::vector<std::pair<proto::Plane, std::string>> planes;  // that it keeps, with their names
};
std::string EncodeCatalogue(const proto::Catalogue& catalogue,
                            const kernels::OptimizerSpec& optimizer);
// OFD-1206 for another version, OFD-1207.
absl::StatusOr<StoredCatalogue> DecodeCatalogue(std::string_view bytes);

// The planes of every store tensor, in the order in which an update reads and writes them.
swap::StoreSpec MakeStoreSpec(const std::string& job, const proto::Catalogue& catalogue,
                              const kernels::OptimizerSpec& optimizer);

// OFD-1602 naming the first difference.
absl::Status CompareWithStored(const std::string& job, const StoredCatalogue& stored,
                               const proto::Catalogue& catalogue,
                               const kernels::OptimizerSpec& optimizer);

}  // namespace offload::daemon

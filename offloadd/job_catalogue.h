// offloadd/job_catalogue.h
//
// Between messages, the tensors of a job and the specification of its store.
//
// Thread safety: pure functions. Their input comes from a peer or a file: they return errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/offload.pb.h"
#include "proto/slab_layout.h"
#include "proto/stored_catalogue.h"
#include "swap/store.h"

namespace offload::daemon {

using proto::DecodeCatalogue;
using proto::EncodeCatalogue;
using proto::StoredCatalogue;
using proto::TensorFromMessage;

// OFD-1503 for what is none of ours, or whose parameters make no sense.
absl::StatusOr<kernels::OptimizerSpec> OptimizerFromMessage(const proto::v1::Optimizer& message);

// For a store that has other tensors than the model.
struct OtherTensors {
  std::vector<std::string> stored_names;  // by tensor; empty: the store does not have it
  std::string trainer_state;              // of what is laid out for it
};
struct SealedPlan {
  kernels::OptimizerSpec optimizer;
  proto::MemoryPlan plan;
  uint64_t pins_offset = 0;
  std::optional<OtherTensors> other_tensors;
};
// Joins the messages of a Seal. Lengths and sums are checked by ComputeSlabLayout. OFD-1503.
absl::StatusOr<SealedPlan> PlanFromMessages(const std::vector<proto::v1::SealRequest>& messages);

// The planes of every store tensor, in the order in which an update reads and writes them.
swap::StoreSpec MakeStoreSpec(const std::string& job, const proto::Catalogue& catalogue,
                              const kernels::OptimizerSpec& optimizer);

// OFD-1602 naming the first difference. Tensors that were frozen may be trainable now.
absl::Status CompareWithStored(const std::string& job, const StoredCatalogue& stored,
                               const proto::Catalogue& catalogue,
                               const kernels::OptimizerSpec& optimizer);

// Whether a tensor is trainable now that was frozen; of catalogues that CompareWithStored() takes.
bool HasThawed(const StoredCatalogue& stored, const proto::Catalogue& catalogue);

// Which of the stored tensors each tensor of the model is; nothing: none of them. OFD-1503 for
// names that no stored tensor has, or that two have; 1602 as from CompareWithStored().
absl::StatusOr<std::vector<std::optional<uint32_t>>> FindSources(
    const std::string& job, const StoredCatalogue& stored, const proto::Catalogue& catalogue,
    const kernels::OptimizerSpec& optimizer, const std::vector<std::string>& stored_names);

}  // namespace offload::daemon

// proto/stored_catalogue.h
//
// What a store keeps of the trainer's tensors: a magic word, the version of what follows, and a
// v1::StoredCatalogue. Version 2 has tensors that lie row by row, version 3 others, too; version 1
// (no magic word, a byte for what the optimizer keeps) is refused.
//
// Thread safety: pure functions. Their input comes from a peer or a file: they return errors.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/offload.pb.h"
#include "proto/plane_set.h"
#include "proto/slab_layout.h"

namespace offload::proto {

// OFD-1601 for an unknown dtype.
absl::StatusOr<Tensor> TensorFromMessage(const v1::Tensor& message);

// The planes that an optimizer keeps, with their names.
using KeptPlanes = std::vector<std::pair<Plane, std::string>>;
KeptPlanes KeptBy(const kernels::OptimizerSpec& optimizer);

struct StoredCatalogue {
  std::vector<Tensor> tensors;
  std::string optimizer;  // its name
  KeptPlanes planes;
};
std::string EncodeCatalogue(const Catalogue& catalogue, const kernels::OptimizerSpec& optimizer);
// OFD-1206 for another version, OFD-1207.
absl::StatusOr<StoredCatalogue> DecodeCatalogue(std::string_view bytes);

}  // namespace offload::proto

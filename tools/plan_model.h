// tools/plan_model.h
//
// Finds the tensors that a plan is made for: of a checkpoint, of a configuration, or of a model of
// about so many parameters.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/slab_layout.h"
#include "zero3/model_shapes.h"

namespace offload::tools {

struct ModelSource {
  // One of these four is not empty. `model` is any of a config.json, a directory that holds one, a
  // safetensors file, or a directory that holds a checkpoint without a configuration.
  std::string model, config, safetensors, parameters;
  int64_t vocabulary = zero3::kByteVocabulary;  // with `parameters`
};

struct PlanModel {
  std::string description;
  std::vector<proto::Tensor> tensors;  // all of them trained
};

// OFD-1002 unless there is exactly one source; OFD-140x for a bad file.
absl::StatusOr<PlanModel> ReadModel(const ModelSource& source, proto::Dtype dtype);

}  // namespace offload::tools

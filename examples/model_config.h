// examples/model_config.h
//
// The config.json of a Hugging Face Llama checkpoint, both ways.
//
// What the example's Llama does not compute is refused, never ignored: another activation, scaled
// rotary positions, biases, a head size of its own.
//
// Errors: OFD-1401 not JSON, OFD-1402 another model, OFD-1405 no config.json.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "zero3/model_shapes.h"

namespace offload::examples {

using zero3::ModelShape;

// Reads the text of a config.json; `context` is the longest sequence that will be trained on. A
// pure function.
absl::StatusOr<ModelShape> ParseModelConfig(std::string_view text, int64_t context);

// Reads the config.json of a checkpoint: in the folder, or beside the file.
absl::StatusOr<ModelShape> ReadModelConfig(const std::string& checkpoint_path, int64_t context);

// The config.json of a shape; `dtype` as torch names it: "bfloat16". ParseModelConfig gives the
// shape back.
std::string ModelConfigText(const ModelShape& shape, const std::string& dtype);

}  // namespace offload::examples

// zero3/model_shapes.h
//
// The tensors of a Llama model, from its configuration or from a wanted number of parameters, so
// that a plan can be made for a model that nobody has built yet.
//
// Names and order are those of the Hugging Face checkpoints
// ("model.layers.0.self_attn.q_proj.weight").
//
// Thread safety: pure functions of plain data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/slab_layout.h"

namespace offload::zero3 {

struct LlamaShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t key_value_heads = 0;  // fewer than heads is grouped-query attention
  int64_t head_size = 0;
  int64_t feed_forward = 0;
  int64_t vocabulary = 0;
  bool tied_embedding = false;  // the output matrix is the embedding: one tensor, counted once
  bool attention_bias = false;
  bool feed_forward_bias = false;
  friend bool operator==(const LlamaShape&, const LlamaShape&) = default;
};

// Reads a Hugging Face config.json of model_type llama or mistral. OFD-1401 when it is not JSON,
// OFD-1402 when it is of another model or a number is missing or out of range.
absl::StatusOr<LlamaShape> ParseLlamaConfig(std::string_view json);

// Of byte-level models, as the example trainer's.
inline constexpr int64_t kByteVocabulary = 260;

// Chooses the shape whose parameter count is closest to the wish and whose width is near 64 times
// its depth: the same family, and the same choice, as `examples/train --model llama --params`.
// OFD-1002 below the smallest and above the largest of the family.
absl::StatusOr<LlamaShape> LlamaShapeFor(uint64_t parameters, int64_t vocabulary = kByteVocabulary);

// Every scalar that is trained.
uint64_t ParameterCount(const LlamaShape& shape);

// The parameters in the order in which a trainer registers them, all trainable.
std::vector<proto::Tensor> LlamaTensors(const LlamaShape& shape, proto::Dtype dtype);

// "llama, 12 layers of 768, 12 heads (4 for keys and values), vocabulary 260".
std::string Describe(const LlamaShape& shape);

}  // namespace offload::zero3

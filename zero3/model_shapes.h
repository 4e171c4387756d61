// zero3/model_shapes.h
//
// Widths and depths of the models that are known by name, from their configuration or from a wanted
// number of parameters: what the planner counts and what the example trainer builds.
//
// For a Llama, its tensors too, so that a plan can be made for a model that nobody has built yet.
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

enum class ModelKind { kLlama, kGpt2 };

// Of byte-level models: the bytes, and room for tokens that mark beginning, end and padding.
inline constexpr int64_t kByteVocabulary = 260;

struct ModelShape {
  ModelKind kind = ModelKind::kLlama;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t key_value_heads = 0;  // llama: fewer than heads is grouped-query attention
  int64_t head_size = 0;
  int64_t feed_forward = 0;
  int64_t vocabulary = kByteVocabulary;
  int64_t context = 0;          // longest sequence; gpt2 has a learned vector for each position
  bool tied_embedding = false;  // the output matrix is the embedding: one tensor, counted once;
                                // always so for gpt2
  // llama; gpt2 has all biases.
  bool attention_bias = false;
  bool feed_forward_bias = false;
  double norm_epsilon = 1e-5;
  double rotary_base = 10000;
  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

// Reads the sizes in a Hugging Face config.json of model_type llama or mistral, not how its norms
// and positions are computed. OFD-1401 when it is not JSON, OFD-1402 when it is of another model or
// a number is missing or out of range.
absl::StatusOr<ModelShape> ParseLlamaConfig(std::string_view json);

// What the caller fixes; the rest follows from the wanted number of parameters.
struct ShapeRequest {
  ModelKind kind = ModelKind::kLlama;
  uint64_t parameters = 0;
  int64_t key_value_heads = 0;  // 0: as many as heads
  int64_t vocabulary = kByteVocabulary;
  int64_t context = 0;
  bool tied_embedding = false;
};

// Chooses the shape whose parameter count is closest to the wish and whose width is near 64 times
// its depth, as in the models of the papers. Off by at most a few percent. OFD-1002 below the
// smallest and above the largest of the family, and for key_value_heads that divide no number of
// heads.
absl::StatusOr<ModelShape> ShapeForParameters(const ShapeRequest& request);

// Every scalar that is trained.
uint64_t ParameterCount(const ModelShape& shape);

// The parameters of a llama in the order in which a trainer registers them, all trainable.
std::vector<proto::Tensor> LlamaTensors(const ModelShape& shape, proto::Dtype dtype);

// "llama, 12 layers of 768, 12 heads (4 for keys and values), vocabulary 260".
std::string Describe(const ModelShape& shape);

}  // namespace offload::zero3

// examples/model_shape.h
//
// Widths and depths of the example models, and how many parameters they make.
//
// Pure functions of plain data: no torch. Thread safety: all may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace offload::examples {

enum class ModelKind { kLlama, kGpt2 };

// Bytes are tokens; three more mark beginning, end and padding, and one keeps the count even.
inline constexpr int64_t kBeginOfText = 256;
inline constexpr int64_t kEndOfText = 257;
inline constexpr int64_t kPadding = 258;
inline constexpr int64_t kVocabulary = 260;

struct ModelShape {
  ModelKind kind = ModelKind::kLlama;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t key_value_heads = 0;  // llama: fewer than heads is grouped-query attention
  int64_t feed_forward = 0;
  int64_t vocabulary = kVocabulary;
  int64_t context = 0;          // longest sequence; gpt2 has a learned vector for each position
  bool tied_embedding = false;  // the output matrix is the embedding (always so for gpt2)
  double norm_epsilon = 1e-5;   // llama
  double rotary_base = 10000;   // llama
};

// Counts every scalar that is trained; a tied matrix counts once.
int64_t ParameterCount(const ModelShape& shape);

// What the caller fixes; the rest follows from the wanted number of parameters.
struct ShapeRequest {
  ModelKind kind = ModelKind::kLlama;
  int64_t parameters = 0;
  int64_t key_value_heads = 0;  // 0: as many as heads
  int64_t context = 0;
  bool tied_embedding = false;
};

// Chooses the shape whose parameter count is closest to the wish and whose width is near 64 times
// its depth, as in the models of the papers. Off by at most a few percent; INVALID_ARGUMENT below
// the smallest model.
absl::StatusOr<ModelShape> ShapeForParameters(const ShapeRequest& request);

// Describes a shape in a few words: "llama, 12 layers of 768, 12 heads, 85.5 M parameters".
std::string Describe(const ModelShape& shape);

}  // namespace offload::examples

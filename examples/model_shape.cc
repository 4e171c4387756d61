#include "examples/model_shape.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/error.h"

namespace offload::examples {
namespace {

constexpr int64_t kMaximumLayers = 128;
constexpr int64_t kMaximumHidden = 16384;
constexpr double kWidthPerLayer = 64.0;
constexpr double kWeightOfAspect = 0.02;  // 2 % of parameters are worth a factor e in aspect

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

ModelShape ShapeOf(const ShapeRequest& request, int64_t layers, int64_t hidden) {
  ModelShape shape;
  shape.kind = request.kind;
  shape.layers = layers;
  shape.hidden = hidden;
  shape.heads = hidden / (hidden % 64 == 0 ? 64 : 16);
  shape.key_value_heads = request.key_value_heads > 0 ? request.key_value_heads : shape.heads;
  shape.context = request.context;
  shape.tied_embedding = request.kind == ModelKind::kGpt2 || request.tied_embedding;
  shape.feed_forward = request.kind == ModelKind::kGpt2 ? 4 * hidden : RoundUp(8 * hidden / 3, 16);
  return shape;
}

// Smaller is better: the distance from the wish, and a little for an unusual aspect.
double Distance(const ModelShape& shape, int64_t parameters) {
  const double count = static_cast<double>(ParameterCount(shape));
  const double aspect = static_cast<double>(shape.hidden) / static_cast<double>(shape.layers);
  return std::abs(std::log(count / static_cast<double>(parameters))) +
         kWeightOfAspect * std::abs(std::log(aspect / kWidthPerLayer));
}

int64_t LlamaLayerParameters(const ModelShape& shape) {
  const int64_t head_size = shape.hidden / shape.heads;
  const int64_t attention =
      2 * shape.hidden * shape.hidden + 2 * shape.hidden * shape.key_value_heads * head_size;
  return attention + 3 * shape.hidden * shape.feed_forward + 2 * shape.hidden;
}

int64_t Gpt2LayerParameters(const ModelShape& shape) {
  const int64_t attention = 4 * shape.hidden * shape.hidden + 4 * shape.hidden;
  const int64_t feed_forward =
      2 * shape.hidden * shape.feed_forward + shape.feed_forward + shape.hidden;
  return attention + feed_forward + 4 * shape.hidden;
}

}  // namespace

int64_t ParameterCount(const ModelShape& shape) {
  const int64_t matrix = shape.vocabulary * shape.hidden;
  if (shape.kind == ModelKind::kGpt2) {
    return shape.layers * Gpt2LayerParameters(shape) + matrix + shape.context * shape.hidden +
           2 * shape.hidden;
  }
  return shape.layers * LlamaLayerParameters(shape) + (shape.tied_embedding ? 1 : 2) * matrix +
         shape.hidden;
}

absl::StatusOr<ModelShape> ShapeForParameters(const ShapeRequest& request) {
  const ModelShape smallest = ShapeOf(request, /*layers=*/1, /*hidden=*/16);
  if (request.parameters < ParameterCount(smallest)) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("--params ", request.parameters, " is below the smallest model, ",
                                  ParameterCount(smallest)));
  }
  ModelShape best;
  double best_distance = std::numeric_limits<double>::infinity();
  for (int64_t hidden = 16; hidden <= kMaximumHidden; hidden += hidden < 256 ? 16 : 64) {
    for (int64_t layers = 1; layers <= kMaximumLayers; ++layers) {
      const ModelShape shape = ShapeOf(request, layers, hidden);
      if (shape.heads % shape.key_value_heads != 0) continue;
      const double distance = Distance(shape, request.parameters);
      if (distance < best_distance) {
        best_distance = distance;
        best = shape;
      }
    }
  }
  if (best.layers == 0) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("--kv-heads ", request.key_value_heads,
                                                      " divides no number of heads"));
  }
  return best;
}

std::string Describe(const ModelShape& shape) {
  return absl::StrFormat(
      "%s, %d layers of %d, %d heads (%d for keys and values), %.1f M parameters",
      shape.kind == ModelKind::kLlama ? "llama" : "gpt2", shape.layers, shape.hidden, shape.heads,
      shape.key_value_heads, static_cast<double>(ParameterCount(shape)) * 1e-6);
}

}  // namespace offload::examples

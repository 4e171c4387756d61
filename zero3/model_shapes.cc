#include "zero3/model_shapes.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::zero3 {
namespace {

using nlohmann::json;

// Wider than every model in sight, and small enough that no product of two overflows.
constexpr int64_t kDimensionMax = 1 << 24;
constexpr int64_t kLayersMax = 1 << 12;

// The family of ShapeForParameters.
constexpr int64_t kFamilyLayersMax = 128;
constexpr int64_t kFamilyHiddenMax = 16384;
constexpr double kWidthPerLayer = 64.0;
constexpr double kWeightOfAspect = 0.02;  // 2 % of parameters are worth a factor e in aspect

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

absl::Status Mismatch(std::string_view key, std::string_view problem) {
  return MakeError(ErrorId::kFileMismatch,
                   absl::StrCat("config.json: \"", std::string(key), "\" ", std::string(problem)));
}

// A positive whole number; missing or null is `otherwise`, if there is one.
absl::StatusOr<int64_t> ReadDimension(const json& config, const char* key, int64_t maximum,
                                      std::optional<int64_t> otherwise = std::nullopt) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) {
    if (otherwise.has_value()) return *otherwise;
    return Mismatch(key, "is missing");
  }
  if (!found->is_number_integer()) return Mismatch(key, "is not a whole number");
  const int64_t value = found->is_number_unsigned() && found->get<uint64_t>() > INT64_MAX
                            ? INT64_MAX
                            : found->get<int64_t>();
  if (value >= 1 && value <= maximum) return value;
  return Mismatch(key, absl::StrCat("is ", value, ", outside of 1 to ", maximum));
}

bool ReadFlag(const json& config, const char* key) {
  const auto found = config.find(key);
  return found != config.end() && found->is_boolean() && found->get<bool>();
}

absl::Status CheckModelType(const json& config) {
  const auto found = config.find("model_type");
  if (found == config.end() || !found->is_string()) return Mismatch("model_type", "is missing");
  const std::string type = found->get<std::string>();
  if (type == "llama" || type == "mistral") return absl::OkStatus();
  return MakeError(ErrorId::kFileMismatch,
                   absl::StrCat("config.json: model_type is \"", type.substr(0, 40), "\""),
                   "Only llama and mistral can be planned from a configuration: use --params N");
}

ModelShape FamilyMember(const ShapeRequest& request, int64_t layers, int64_t hidden) {
  const bool is_gpt2 = request.kind == ModelKind::kGpt2;
  ModelShape shape;
  shape.kind = request.kind;
  shape.layers = layers;
  shape.hidden = hidden;
  shape.head_size = hidden % 64 == 0 ? 64 : 16;
  shape.heads = hidden / shape.head_size;
  shape.key_value_heads = request.key_value_heads > 0 ? request.key_value_heads : shape.heads;
  shape.feed_forward = is_gpt2 ? 4 * hidden : RoundUp(8 * hidden / 3, 16);
  shape.vocabulary = request.vocabulary;
  shape.context = request.context;
  shape.tied_embedding = is_gpt2 || request.tied_embedding;
  return shape;
}

// Smaller is better: the distance from the wish, and a little for an unusual aspect.
double Distance(const ModelShape& shape, uint64_t parameters) {
  const double count = static_cast<double>(ParameterCount(shape));
  const double aspect = static_cast<double>(shape.hidden) / static_cast<double>(shape.layers);
  return std::abs(std::log(count / static_cast<double>(parameters))) +
         kWeightOfAspect * std::abs(std::log(aspect / kWidthPerLayer));
}

int64_t LlamaLayerParameters(const ModelShape& shape) {
  const int64_t wide = shape.heads * shape.head_size;
  const int64_t narrow = shape.key_value_heads * shape.head_size;
  int64_t count =
      2 * shape.hidden * (wide + narrow) + 3 * shape.hidden * shape.feed_forward + 2 * shape.hidden;
  if (shape.attention_bias) count += wide + 2 * narrow + shape.hidden;
  if (shape.feed_forward_bias) count += 2 * shape.feed_forward + shape.hidden;
  return count;
}

int64_t Gpt2LayerParameters(const ModelShape& shape) {
  const int64_t attention = 4 * shape.hidden * shape.hidden + 4 * shape.hidden;
  const int64_t feed_forward =
      2 * shape.hidden * shape.feed_forward + shape.feed_forward + shape.hidden;
  return attention + feed_forward + 4 * shape.hidden;
}

// Collects tensors under the names of their modules.
class TensorList {
 public:
  explicit TensorList(proto::Dtype dtype) : dtype_(dtype) {}

  void Vector(const std::string& name, int64_t size) { Add(name, {size}); }
  void Linear(const std::string& module, int64_t outputs, int64_t inputs, bool bias) {
    Add(module + ".weight", {outputs, inputs});
    if (bias) Add(module + ".bias", {outputs});
  }
  std::vector<proto::Tensor> Take() { return std::move(tensors_); }

 private:
  void Add(std::string name, std::vector<int64_t> shape) {
    proto::Tensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = dtype_;
    tensor.element_count = 1;
    for (const int64_t size : shape) tensor.element_count *= static_cast<uint64_t>(size);
    tensor.shape = std::move(shape);
    tensors_.push_back(std::move(tensor));
  }

  const proto::Dtype dtype_;
  std::vector<proto::Tensor> tensors_;
};

void AddLayer(const ModelShape& shape, const std::string& layer, TensorList& list) {
  const int64_t wide = shape.heads * shape.head_size;
  const int64_t narrow = shape.key_value_heads * shape.head_size;
  const std::string attention = layer + ".self_attn", feed_forward = layer + ".mlp";
  list.Linear(attention + ".q_proj", wide, shape.hidden, shape.attention_bias);
  list.Linear(attention + ".k_proj", narrow, shape.hidden, shape.attention_bias);
  list.Linear(attention + ".v_proj", narrow, shape.hidden, shape.attention_bias);
  list.Linear(attention + ".o_proj", shape.hidden, wide, shape.attention_bias);
  const bool bias = shape.feed_forward_bias;
  list.Linear(feed_forward + ".gate_proj", shape.feed_forward, shape.hidden, bias);
  list.Linear(feed_forward + ".up_proj", shape.feed_forward, shape.hidden, bias);
  list.Linear(feed_forward + ".down_proj", shape.hidden, shape.feed_forward, bias);
  list.Vector(layer + ".input_layernorm.weight", shape.hidden);
  list.Vector(layer + ".post_attention_layernorm.weight", shape.hidden);
}

}  // namespace

absl::StatusOr<ModelShape> ParseLlamaConfig(std::string_view text) {
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return MakeError(ErrorId::kFileFormat, "config.json is not a JSON object",
                     "Name the config.json of a Hugging Face checkpoint");
  }
  OFFLOAD_RETURN_IF_ERROR(CheckModelType(config));
  ModelShape shape;
  OFFLOAD_ASSIGN_OR_RETURN(shape.hidden, ReadDimension(config, "hidden_size", kDimensionMax));
  OFFLOAD_ASSIGN_OR_RETURN(shape.layers, ReadDimension(config, "num_hidden_layers", kLayersMax));
  OFFLOAD_ASSIGN_OR_RETURN(shape.heads,
                           ReadDimension(config, "num_attention_heads", kDimensionMax));
  OFFLOAD_ASSIGN_OR_RETURN(shape.key_value_heads,
                           ReadDimension(config, "num_key_value_heads", shape.heads, shape.heads));
  OFFLOAD_ASSIGN_OR_RETURN(
      shape.head_size,
      ReadDimension(config, "head_dim", kDimensionMax / shape.heads, shape.hidden / shape.heads));
  OFFLOAD_ASSIGN_OR_RETURN(shape.feed_forward,
                           ReadDimension(config, "intermediate_size", kDimensionMax));
  OFFLOAD_ASSIGN_OR_RETURN(shape.vocabulary, ReadDimension(config, "vocab_size", kDimensionMax));
  if (shape.head_size < 1) {
    return Mismatch("num_attention_heads",
                    absl::StrCat("is ", shape.heads, ", more than hidden_size ", shape.hidden));
  }
  shape.tied_embedding = ReadFlag(config, "tie_word_embeddings");
  shape.attention_bias = ReadFlag(config, "attention_bias");
  shape.feed_forward_bias = ReadFlag(config, "mlp_bias");
  return shape;
}

absl::StatusOr<ModelShape> ShapeForParameters(const ShapeRequest& request) {
  const uint64_t smallest = ParameterCount(FamilyMember(request, 1, 16));
  const uint64_t largest =
      ParameterCount(FamilyMember(request, kFamilyLayersMax, kFamilyHiddenMax));
  if (request.parameters < smallest || request.parameters > largest) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("--params ", request.parameters, " is outside of ", smallest,
                                  " to ", largest));
  }
  ModelShape best;
  double best_distance = std::numeric_limits<double>::infinity();
  for (int64_t hidden = 16; hidden <= kFamilyHiddenMax; hidden += hidden < 256 ? 16 : 64) {
    for (int64_t layers = 1; layers <= kFamilyLayersMax; ++layers) {
      const ModelShape shape = FamilyMember(request, layers, hidden);
      if (shape.heads % shape.key_value_heads != 0) continue;
      const double distance = Distance(shape, request.parameters);
      if (distance >= best_distance) continue;
      best_distance = distance;
      best = shape;
    }
  }
  if (best.layers > 0) return best;
  return MakeError(ErrorId::kBadValue, absl::StrCat("--kv-heads ", request.key_value_heads,
                                                    " divides no number of heads"));
}

uint64_t ParameterCount(const ModelShape& shape) {
  const bool is_gpt2 = shape.kind == ModelKind::kGpt2;
  const int64_t layer = is_gpt2 ? Gpt2LayerParameters(shape) : LlamaLayerParameters(shape);
  const int64_t norm = is_gpt2 ? 2 * shape.hidden : shape.hidden;
  const int64_t matrices = shape.tied_embedding ? 1 : 2;
  const int64_t positions = is_gpt2 ? shape.context : 0;
  return static_cast<uint64_t>(shape.layers) * static_cast<uint64_t>(layer) +
         static_cast<uint64_t>((matrices * shape.vocabulary + positions) * shape.hidden + norm);
}

std::vector<proto::Tensor> LlamaTensors(const ModelShape& shape, proto::Dtype dtype) {
  TensorList list(dtype);
  list.Linear("model.embed_tokens", shape.vocabulary, shape.hidden, /*bias=*/false);
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    AddLayer(shape, absl::StrCat("model.layers.", layer), list);
  }
  list.Vector("model.norm.weight", shape.hidden);
  if (!shape.tied_embedding) list.Linear("lm_head", shape.vocabulary, shape.hidden, false);
  return list.Take();
}

std::string Describe(const ModelShape& shape) {
  const std::string grouped =
      shape.key_value_heads == shape.heads
          ? ""
          : absl::StrCat(" (", shape.key_value_heads, " for keys and values)");
  return absl::StrCat(shape.kind == ModelKind::kLlama ? "llama, " : "gpt2, ", shape.layers,
                      " layers of ", shape.hidden, ", ", shape.heads, " heads", grouped,
                      ", vocabulary ", shape.vocabulary);
}

}  // namespace offload::zero3

#include "examples/model_config.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "examples/text_data.h"
#include "zero3/hf_layout.h"

namespace offload::examples {
namespace {

using nlohmann::json;

constexpr double kDefaultEpsilon = 1e-6;  // what transformers takes when the key is missing
constexpr double kDefaultRotaryBase = 10000;
constexpr double kInitializerRange = 0.02;

absl::Status Refuse(const std::string& key, const std::string& problem) {
  return MakeError(ErrorId::kFileMismatch, absl::StrCat("config.json: \"", key, "\" ", problem),
                   "Use a plain Llama checkpoint");
}

bool IsSet(const json& config, const char* key) {
  const auto found = config.find(key);
  return found != config.end() && !found->is_null();
}

absl::StatusOr<double> ReadPositive(const json& config, const char* key, double otherwise) {
  if (!IsSet(config, key)) return otherwise;
  const json& value = config[key];
  if (!value.is_number()) return Refuse(key, "is not a number");
  const double number = value.get<double>();
  if (std::isfinite(number) && number > 0) return number;
  return Refuse(key, absl::StrCat("is ", number, ", not a positive number"));
}

// Of an object that says how rotary positions are made; only the plain way is known.
absl::Status CheckRotaryType(const json& config, const char* key) {
  if (!IsSet(config, key)) return absl::OkStatus();
  const json& rotary = config[key];
  if (!rotary.is_object()) return Refuse(key, "is not an object");
  for (const char* const type : {"rope_type", "type"}) {
    if (IsSet(rotary, type) && rotary[type] != "default") {
      return Refuse(key, absl::StrCat("asks for ", type, " ", rotary[type].dump().substr(0, 40),
                                      "; only \"default\" is computed here"));
    }
  }
  if (IsSet(rotary, "partial_rotary_factor") && rotary["partial_rotary_factor"] != 1.0) {
    return Refuse(key, "turns only a part of each head");
  }
  return absl::OkStatus();
}

absl::StatusOr<double> ReadRotaryBase(const json& config) {
  OFFLOAD_RETURN_IF_ERROR(CheckRotaryType(config, "rope_scaling"));
  OFFLOAD_RETURN_IF_ERROR(CheckRotaryType(config, "rope_parameters"));
  OFFLOAD_ASSIGN_OR_RETURN(const double base,
                           ReadPositive(config, "rope_theta", kDefaultRotaryBase));
  if (!IsSet(config, "rope_parameters")) return base;
  return ReadPositive(config["rope_parameters"], "rope_theta", base);
}

absl::Status CheckComputable(const json& config, const ModelShape& llama) {
  const std::string type = config["model_type"].get<std::string>();
  if (type != "llama") return Refuse("model_type", absl::StrCat("is \"", type, "\""));
  if (IsSet(config, "hidden_act") && config["hidden_act"] != "silu") {
    return Refuse("hidden_act", absl::StrCat("is ", config["hidden_act"].dump().substr(0, 40),
                                             ", silu is computed here"));
  }
  if (llama.attention_bias) return Refuse("attention_bias", "is true");
  if (llama.feed_forward_bias) return Refuse("mlp_bias", "is true");
  if (llama.hidden != llama.heads * llama.head_size || llama.head_size % 2 != 0) {
    return Refuse("head_dim", absl::StrCat("is ", llama.head_size, " for ", llama.heads,
                                           " heads of a hidden_size of ", llama.hidden));
  }
  if (llama.heads % llama.key_value_heads != 0) {
    return Refuse("num_key_value_heads",
                  absl::StrCat("is ", llama.key_value_heads, ", no divisor of ", llama.heads));
  }
  if (llama.vocabulary < zero3::kByteVocabulary) {
    return Refuse("vocab_size",
                  absl::StrCat("is ", llama.vocabulary, ", text needs ", zero3::kByteVocabulary));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelShape> ParseModelConfig(std::string_view text, int64_t context) {
  OFFLOAD_ASSIGN_OR_RETURN(ModelShape shape, zero3::ParseLlamaConfig(text));
  const json config = json::parse(text);  // an object: the line above has read it
  OFFLOAD_RETURN_IF_ERROR(CheckComputable(config, shape));
  shape.context = context;
  OFFLOAD_ASSIGN_OR_RETURN(shape.norm_epsilon,
                           ReadPositive(config, "rms_norm_eps", kDefaultEpsilon));
  OFFLOAD_ASSIGN_OR_RETURN(shape.rotary_base, ReadRotaryBase(config));
  return shape;
}

absl::StatusOr<ModelShape> ReadModelConfig(const std::string& checkpoint_path, int64_t context) {
  const std::filesystem::path path(checkpoint_path);
  std::error_code error;
  const auto folder = std::filesystem::is_directory(path, error) ? path : path.parent_path();
  OFFLOAD_ASSIGN_OR_RETURN(const std::string text,
                           zero3::ReadTextFile((folder / "config.json").string()));
  return ParseModelConfig(text, context);
}

std::string ModelConfigText(const ModelShape& shape, const std::string& dtype) {
  const nlohmann::ordered_json config = {
      {"architectures", nlohmann::ordered_json::array({"LlamaForCausalLM"})},
      {"attention_bias", false},
      {"bos_token_id", kBeginOfText},
      {"eos_token_id", kEndOfText},
      {"head_dim", shape.head_size},
      {"hidden_act", "silu"},
      {"hidden_size", shape.hidden},
      {"initializer_range", kInitializerRange},
      {"intermediate_size", shape.feed_forward},
      {"max_position_embeddings", shape.context},
      {"mlp_bias", false},
      {"model_type", "llama"},
      {"num_attention_heads", shape.heads},
      {"num_hidden_layers", shape.layers},
      {"num_key_value_heads", shape.key_value_heads},
      {"pad_token_id", kPadding},
      {"rms_norm_eps", shape.norm_epsilon},
      {"rope_theta", shape.rotary_base},
      {"tie_word_embeddings", shape.tied_embedding},
      {"torch_dtype", dtype},
      {"vocab_size", shape.vocabulary},
  };
  return config.dump(2) + "\n";
}

}  // namespace offload::examples

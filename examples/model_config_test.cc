#include "examples/model_config.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace offload::examples {
namespace {

using nlohmann::json;

json Plain() {
  return {{"model_type", "llama"},      {"hidden_size", 64},        {"num_hidden_layers", 2},
          {"num_attention_heads", 4},   {"num_key_value_heads", 2}, {"intermediate_size", 176},
          {"vocab_size", 260},          {"rms_norm_eps", 1e-5},     {"rope_theta", 500000.0},
          {"tie_word_embeddings", true}};
}

TEST(ModelConfigTest, ShapeIsRead) {
  const auto shape = ParseModelConfig(Plain().dump(), 128);
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->hidden, 64);
  EXPECT_EQ(shape->layers, 2);
  EXPECT_EQ(shape->heads, 4);
  EXPECT_EQ(shape->key_value_heads, 2);
  EXPECT_EQ(shape->feed_forward, 176);
  EXPECT_EQ(shape->context, 128);
  EXPECT_TRUE(shape->tied_embedding);
  EXPECT_EQ(shape->norm_epsilon, 1e-5);
  EXPECT_EQ(shape->rotary_base, 500000.0);
}

TEST(ModelConfigTest, WhatIsWrittenIsReadBack) {
  ModelShape shape = *ParseModelConfig(Plain().dump(), 128);
  shape.norm_epsilon = 1.25e-6;
  const auto back = ParseModelConfig(ModelConfigText(shape, "bfloat16"), 128);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, shape);
}

TEST(ModelConfigTest, RotaryBaseMayStandInItsOwnObject) {
  json config = Plain();
  config.erase("rope_theta");
  EXPECT_EQ(ParseModelConfig(config.dump(), 1)->rotary_base, 10000.0);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_EQ(ParseModelConfig(config.dump(), 1)->rotary_base, 1e6);
}

TEST(ModelConfigTest, WhatIsNotComputedIsRefusedByItsName) {
  const std::pair<const char*, json> changes[] = {
      {"model_type", "mistral"},
      {"model_type", "qwen2"},
      {"hidden_act", "gelu"},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}},
      {"rope_scaling", {{"type", "linear"}}},
      {"rope_scaling", "linear"},
      {"rope_parameters", {{"rope_type", "yarn"}}},
      {"rope_theta", -1},
      {"rms_norm_eps", "small"},
      {"attention_bias", true},
      {"mlp_bias", true},
      {"head_dim", 32},
      {"num_key_value_heads", 3},
      {"vocab_size", 100},
      {"hidden_size", nullptr},
      {"num_hidden_layers", -1},
  };
  for (const auto& [key, value] : changes) {
    json config = Plain();
    config[key] = value;
    const auto shape = ParseModelConfig(config.dump(), 128);
    ASSERT_FALSE(shape.ok()) << key << " " << value;
    EXPECT_EQ(ErrorIdOf(shape.status()), ErrorId::kFileMismatch) << shape.status();
    EXPECT_NE(shape.status().message().find(key), std::string::npos) << shape.status();
  }
}

TEST(ModelConfigTest, OtherTextIsMalformed) {
  for (const char* const text : {"", "[]", "{", "null"}) {
    EXPECT_EQ(ErrorIdOf(ParseModelConfig(text, 1).status()), ErrorId::kFileFormat) << text;
  }
  EXPECT_EQ(ErrorIdOf(ReadModelConfig("/none/here", 1).status()), ErrorId::kFileRead);
}

}  // namespace
}  // namespace offload::examples

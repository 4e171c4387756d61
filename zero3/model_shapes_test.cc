#include "zero3/model_shapes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/error.h"

namespace offload::zero3 {
namespace {

constexpr char kLlama70B[] = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
  "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
  "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false, "rope_theta": 5e5})";

uint64_t SumOfElements(const ModelShape& shape) {
  uint64_t sum = 0;
  for (const proto::Tensor& tensor : LlamaTensors(shape, proto::Dtype::kBFloat16)) {
    sum += tensor.element_count;
  }
  return sum;
}

TEST(ModelShapesTest, CountsTheParametersOfAPublishedModel) {
  const auto shape = ParseLlamaConfig(kLlama70B);
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(ParameterCount(*shape), 70'553'706'496u);
  EXPECT_EQ(SumOfElements(*shape), 70'553'706'496u);
}

TEST(ModelShapesTest, CountIsTheSumOfTheTensorsWithEveryOption) {
  ModelShape shape = {.layers = 3,
                      .hidden = 48,
                      .heads = 4,
                      .key_value_heads = 2,
                      .head_size = 20,
                      .feed_forward = 100,
                      .vocabulary = 300};
  for (int options = 0; options < 8; ++options) {
    shape.tied_embedding = (options & 1) != 0;
    shape.attention_bias = (options & 2) != 0;
    shape.feed_forward_bias = (options & 4) != 0;
    EXPECT_EQ(ParameterCount(shape), SumOfElements(shape)) << options;
  }
}

TEST(ModelShapesTest, TensorsHaveTheNamesAndShapesOfCheckpoints) {
  const auto shape = ParseLlamaConfig(kLlama70B);
  ASSERT_TRUE(shape.ok()) << shape.status();
  const auto tensors = LlamaTensors(*shape, proto::Dtype::kBFloat16);
  EXPECT_EQ(tensors.size(), 723u);
  EXPECT_EQ(tensors[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(tensors[2].name, "model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(tensors[2].shape, (std::vector<int64_t>{1024, 8192}));
  EXPECT_EQ(tensors.back().name, "lm_head.weight");
}

TEST(ModelShapesTest, CountsTheParametersOfGpt2) {
  const ModelShape shape = {.kind = ModelKind::kGpt2,
                            .layers = 12,
                            .hidden = 768,
                            .heads = 12,
                            .key_value_heads = 12,
                            .head_size = 64,
                            .feed_forward = 3072,
                            .vocabulary = 50257,
                            .context = 1024,
                            .tied_embedding = true};
  EXPECT_EQ(ParameterCount(shape), 124'439'808u);
  EXPECT_EQ(Describe(shape), "gpt2, 12 layers of 768, 12 heads, vocabulary 50257");
}

TEST(ModelShapesTest, ShapeComesCloseToTheWishForEverySize) {
  for (const ModelKind kind : {ModelKind::kLlama, ModelKind::kGpt2}) {
    for (const double wish : {5e4, 2e5, 1e6, 1e7, 1.1e8, 1.5e8, 1e9, 7e9, 7e10}) {
      const auto shape = ShapeForParameters(
          {.kind = kind, .parameters = static_cast<uint64_t>(wish), .context = 64});
      ASSERT_TRUE(shape.ok()) << shape.status();
      const double count = static_cast<double>(ParameterCount(*shape));
      EXPECT_LT(std::abs(count / wish - 1), wish < 1e6 ? 0.15 : 0.03) << Describe(*shape);
      EXPECT_EQ(shape->hidden, shape->heads * shape->head_size);
      EXPECT_EQ(shape->head_size % 2, 0) << "rotary halves";
    }
  }
}

TEST(ModelShapesTest, GroupedQueriesDivideTheHeads) {
  const auto shape = ShapeForParameters({.parameters = 10'000'000, .key_value_heads = 3});
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->key_value_heads, 3);
  EXPECT_EQ(shape->heads % 3, 0);
}

TEST(ModelShapesTest, RefusesWishesOutsideOfTheFamily) {
  for (const uint64_t parameters : {uint64_t{0}, uint64_t{10}, UINT64_MAX}) {
    EXPECT_EQ(ErrorIdOf(ShapeForParameters({.parameters = parameters}).status()),
              ErrorId::kBadValue);
  }
  const auto shape = ShapeForParameters({.parameters = 1'000'000'000, .key_value_heads = 100'000});
  EXPECT_EQ(ErrorIdOf(shape.status()), ErrorId::kBadValue) << shape.status();
}

TEST(ModelShapesTest, RefusesWhatIsNotTheConfigurationOfALlama) {
  EXPECT_EQ(ErrorIdOf(ParseLlamaConfig("{").status()), ErrorId::kFileFormat);
  EXPECT_EQ(ErrorIdOf(ParseLlamaConfig("[1]").status()), ErrorId::kFileFormat);
  EXPECT_EQ(ErrorIdOf(ParseLlamaConfig("{}").status()), ErrorId::kFileMismatch);
  EXPECT_EQ(ErrorIdOf(ParseLlamaConfig(R"({"model_type": "t5"})").status()),
            ErrorId::kFileMismatch);
}

TEST(ModelShapesTest, RefusesNumbersThatNoModelHas) {
  const std::string config = kLlama70B;
  for (const char* bad : {"0", "-8192", "1e300", "99999999999999999999", "18446744073709551615",
                          "\"8192\"", "8192.5", "null", "true"}) {
    std::string text = config;
    text.replace(text.find("8192"), 4, bad);
    EXPECT_EQ(ErrorIdOf(ParseLlamaConfig(text).status()), ErrorId::kFileMismatch) << bad;
  }
}

}  // namespace
}  // namespace offload::zero3

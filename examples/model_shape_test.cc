#include "examples/model_shape.h"

#include <gtest/gtest.h>

#include <cmath>

namespace offload::examples {
namespace {

TEST(ModelShapeTest, CountMatchesPublishedModels) {
  ModelShape gpt2{.kind = ModelKind::kGpt2, .layers = 12, .hidden = 768, .heads = 12};
  gpt2.key_value_heads = 12;
  gpt2.feed_forward = 3072;
  gpt2.vocabulary = 50257;
  gpt2.context = 1024;
  gpt2.tied_embedding = true;
  EXPECT_EQ(ParameterCount(gpt2), 124439808);

  ModelShape llama{.kind = ModelKind::kLlama, .layers = 32, .hidden = 4096, .heads = 32};
  llama.key_value_heads = 8;
  llama.feed_forward = 14336;
  llama.vocabulary = 128256;
  EXPECT_EQ(ParameterCount(llama), 8030261248);
}

TEST(ModelShapeTest, ShapeComesCloseToTheWishForEverySize) {
  for (const ModelKind kind : {ModelKind::kLlama, ModelKind::kGpt2}) {
    for (const double wish : {5e4, 2e5, 1e6, 1e7, 1.1e8, 1.5e8, 1e9, 7e9, 7e10}) {
      ShapeRequest request{.kind = kind, .parameters = static_cast<int64_t>(wish)};
      request.context = 64;
      const auto shape = ShapeForParameters(request);
      ASSERT_TRUE(shape.ok()) << shape.status();
      const double count = static_cast<double>(ParameterCount(*shape));
      EXPECT_LT(std::abs(count / wish - 1), wish < 1e6 ? 0.15 : 0.03) << Describe(*shape);
      EXPECT_EQ(shape->hidden % shape->heads, 0);
      EXPECT_EQ((shape->hidden / shape->heads) % 2, 0) << "rotary halves";
    }
  }
}

TEST(ModelShapeTest, GroupedQueriesDivideTheHeads) {
  ShapeRequest request{.parameters = 10'000'000, .key_value_heads = 3};
  const auto shape = ShapeForParameters(request);
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->key_value_heads, 3);
  EXPECT_EQ(shape->heads % 3, 0);
}

TEST(ModelShapeTest, TooFewParametersAreRefused) {
  EXPECT_FALSE(ShapeForParameters({.parameters = 10}).ok());
  EXPECT_FALSE(ShapeForParameters({.parameters = 1'000'000, .key_value_heads = 100'000}).ok());
}

}  // namespace
}  // namespace offload::examples

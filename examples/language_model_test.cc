#include "examples/language_model.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <offload/torch.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "examples/text_data.h"
#include "zero3/model_shapes.h"

namespace offload::examples {
namespace {

ModelShape Small(ModelKind kind) {
  zero3::ShapeRequest request{
      .kind = kind, .parameters = 60'000, .key_value_heads = 1, .context = 24};
  if (kind == ModelKind::kGpt2) request.key_value_heads = 0;
  return *ShapeForParameters(request);
}

torch::Tensor Loss(LanguageModel& model, const torch::Tensor& tokens) {
  const int64_t length = tokens.size(1) - 1;
  const at::Tensor logits = model.forward(tokens.narrow(1, 0, length)).to(at::kFloat);
  return at::cross_entropy_loss(logits.reshape({-1, zero3::kByteVocabulary}),
                                tokens.narrow(1, 1, length).reshape({-1}));
}

torch::Tensor RepeatingTokens() {
  return (torch::arange(4 * 25, at::kLong) % 7 + 97).view({4, 25});
}

class LanguageModelTest : public ::testing::TestWithParam<ModelKind> {};

TEST_P(LanguageModelTest, HasAsManyParametersAsItsShapeSays) {
  const ModelShape shape = Small(GetParam());
  const auto model = MakeModel(shape);
  uint64_t count = 0;
  for (const torch::Tensor& parameter : model->parameters()) {
    count += static_cast<uint64_t>(parameter.numel());
  }
  EXPECT_EQ(count, ParameterCount(shape));
}

TEST_P(LanguageModelTest, LooksOnlyBackward) {
  const auto model = MakeModel(Small(GetParam()));
  const at::NoGradGuard no_gradients;
  at::Tensor tokens = RepeatingTokens().narrow(1, 0, 24).clone();
  const at::Tensor before = model->forward(tokens);
  tokens.select(1, 20).fill_(5);
  const at::Tensor after = model->forward(tokens);
  EXPECT_TRUE(before.narrow(1, 0, 20).allclose(after.narrow(1, 0, 20), 1e-5, 1e-5));
  EXPECT_FALSE(before.narrow(1, 20, 4).allclose(after.narrow(1, 20, 4), 1e-3, 1e-3));
}

TEST_P(LanguageModelTest, LearnsInBothPrecisions) {
  at::set_num_threads(1);  // tiny products: threads would only wait for each other
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(1);
    const auto model = MakeModel(Small(GetParam()));
    model->to(dtype);
    auto optimizer = InMemoryAdamW(*model, torch::optim::AdamWOptions(5e-3));
    const torch::Tensor tokens = RepeatingTokens();
    const double first = Loss(*model, tokens).item<double>();
    for (int step = 0; step < 60; ++step) {
      Loss(*model, tokens).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
    EXPECT_GT(first, 5.0) << "untrained: about ln 260";
    EXPECT_LT(Loss(*model, tokens).item<double>(), 1.0) << dtype;
  }
}

TEST_P(LanguageModelTest, SeedDecidesTheWeights) {
  torch::manual_seed(3);
  const auto first = MakeModel(Small(GetParam()));
  torch::manual_seed(3);
  const auto second = MakeModel(Small(GetParam()));
  for (size_t i = 0; i < first->parameters().size(); ++i) {
    EXPECT_TRUE(first->parameters()[i].equal(second->parameters()[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LanguageModelTest,
                         ::testing::Values(ModelKind::kLlama, ModelKind::kGpt2),
                         [](const auto& info) {
                           return info.param == ModelKind::kLlama ? "Llama" : "Gpt2";
                         });

TEST(LlamaTest, ParametersHaveTheNamesOfTheCheckpoints) {
  const auto model = MakeModel(Small(ModelKind::kLlama));
  const auto named = model->named_parameters();
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight", "lm_head.weight"}) {
    EXPECT_NE(named.find(name), nullptr) << name;
  }
}

TEST(Gpt2Test, ParametersHaveTheNamesOfTheCheckpoints) {
  const auto model = MakeModel(Small(ModelKind::kGpt2));
  const auto named = model->named_parameters();
  for (const char* name :
       {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.mlp.c_fc.bias", "transformer.h.0.ln_1.weight", "transformer.ln_f.bias"}) {
    EXPECT_NE(named.find(name), nullptr) << name;
  }
  EXPECT_EQ(named.find("lm_head.weight"), nullptr) << "the embedding is the output matrix";
}

}  // namespace
}  // namespace offload::examples

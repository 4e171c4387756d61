#include "examples/gpt2.h"

#include <ATen/ATen.h>
#include <torch/types.h>

#include <cmath>
#include <string>

namespace offload::examples {
namespace {

constexpr double kInitialDeviation = 0.02;
constexpr double kEpsilon = 1e-5;

// A module that only gives its children a common name, as "transformer" in "transformer.h.0".
class Folder : public torch::nn::Module {
 public:
  using torch::nn::Module::register_module;
  using torch::nn::Module::register_parameter;
};

torch::Tensor NormalParameter(torch::nn::Module& module, at::IntArrayRef shape, double deviation) {
  torch::Tensor parameter = module.register_parameter("weight", torch::empty(shape));
  const at::NoGradGuard no_gradients;
  parameter.normal_(0, deviation);
  return parameter;
}

// Maps that write to the residual stream start smaller, so that its size does not grow with depth.
double ResidualDeviation(const ModelShape& shape) {
  return kInitialDeviation / std::sqrt(2.0 * static_cast<double>(shape.layers));
}

}  // namespace

LayerNorm::LayerNorm(int64_t hidden) {
  weight_ = register_parameter("weight", torch::ones({hidden}));
  bias_ = register_parameter("bias", torch::zeros({hidden}));
}

torch::Tensor LayerNorm::forward(const torch::Tensor& input) {
  return at::layer_norm(input, weight_.sizes(), weight_, bias_, kEpsilon);
}

TransposedLinear::TransposedLinear(int64_t inputs, int64_t outputs, double initial_deviation) {
  weight_ = NormalParameter(*this, {inputs, outputs}, initial_deviation);
  bias_ = register_parameter("bias", torch::zeros({outputs}));
}

torch::Tensor TransposedLinear::forward(const torch::Tensor& input) {
  const at::Tensor rows = input.reshape({-1, weight_.size(0)});
  return at::addmm(bias_, rows, weight_).view({input.size(0), input.size(1), weight_.size(1)});
}

Gpt2Attention::Gpt2Attention(const ModelShape& shape) : heads_(shape.heads) {
  const int64_t hidden = shape.hidden;
  query_key_value_ = register_module(
      "c_attn", std::make_shared<TransposedLinear>(hidden, 3 * hidden, kInitialDeviation));
  output_ = register_module(
      "c_proj", std::make_shared<TransposedLinear>(hidden, hidden, ResidualDeviation(shape)));
}

torch::Tensor Gpt2Attention::forward(const torch::Tensor& input) {
  const int64_t rows = input.size(0), length = input.size(1), hidden = input.size(2);
  const auto parts = query_key_value_->forward(input).split(hidden, /*dim=*/2);
  const auto split_heads = [&](const at::Tensor& flat) {
    return flat.view({rows, length, heads_, hidden / heads_}).transpose(1, 2);
  };
  const at::Tensor mixed = at::scaled_dot_product_attention(
      split_heads(parts[0]), split_heads(parts[1]), split_heads(parts[2]), /*attn_mask=*/{},
      /*dropout_p=*/0, /*is_causal=*/true);
  return output_->forward(mixed.transpose(1, 2).reshape({rows, length, hidden}));
}

Gpt2FeedForward::Gpt2FeedForward(const ModelShape& shape) {
  widen_ = register_module("c_fc", std::make_shared<TransposedLinear>(
                                       shape.hidden, shape.feed_forward, kInitialDeviation));
  narrow_ =
      register_module("c_proj", std::make_shared<TransposedLinear>(shape.feed_forward, shape.hidden,
                                                                   ResidualDeviation(shape)));
}

torch::Tensor Gpt2FeedForward::forward(const torch::Tensor& input) {
  return narrow_->forward(at::gelu(widen_->forward(input), "tanh"));
}

Gpt2Layer::Gpt2Layer(const ModelShape& shape) {
  attention_norm_ = register_module("ln_1", std::make_shared<LayerNorm>(shape.hidden));
  attention_ = register_module("attn", std::make_shared<Gpt2Attention>(shape));
  feed_forward_norm_ = register_module("ln_2", std::make_shared<LayerNorm>(shape.hidden));
  feed_forward_ = register_module("mlp", std::make_shared<Gpt2FeedForward>(shape));
}

torch::Tensor Gpt2Layer::forward(const torch::Tensor& input) {
  const at::Tensor hidden = input + attention_->forward(attention_norm_->forward(input));
  return hidden + feed_forward_->forward(feed_forward_norm_->forward(hidden));
}

Gpt2::Gpt2(const ModelShape& shape) {
  const auto body = register_module("transformer", std::make_shared<Folder>());
  const auto tokens = body->register_module("wte", std::make_shared<Folder>());
  embedding_ = NormalParameter(*tokens, {shape.vocabulary, shape.hidden}, kInitialDeviation);
  const auto positions = body->register_module("wpe", std::make_shared<Folder>());
  positions_ = NormalParameter(*positions, {shape.context, shape.hidden}, kInitialDeviation / 2);
  const auto layers = body->register_module("h", std::make_shared<Folder>());
  for (int64_t index = 0; index < shape.layers; ++index) {
    layers_.push_back(
        layers->register_module(std::to_string(index), std::make_shared<Gpt2Layer>(shape)));
  }
  norm_ = body->register_module("ln_f", std::make_shared<LayerNorm>(shape.hidden));
}

torch::Tensor Gpt2::forward(const torch::Tensor& tokens) {
  const at::Tensor places = at::arange(tokens.size(1), tokens.options());
  at::Tensor hidden = at::embedding(embedding_, tokens) + at::embedding(positions_, places);
  for (const auto& layer : layers_) hidden = layer->forward(hidden);
  return at::linear(norm_->forward(hidden), embedding_);
}

std::shared_ptr<LanguageModel> MakeGpt2(const ModelShape& shape) {
  return std::make_shared<Gpt2>(shape);
}

}  // namespace offload::examples

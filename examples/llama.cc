#include "examples/llama.h"

#include <ATen/ATen.h>
#include <torch/types.h>

#include <string>

namespace offload::examples {
namespace {

constexpr double kInitialDeviation = 0.02;

// A module that only gives its children a common name, as "model" in "model.layers.0".
class Folder : public torch::nn::Module {
 public:
  using torch::nn::Module::register_module;
  using torch::nn::Module::register_parameter;
};

// Rotates pairs (i, i + half) of every head: x * cos + (-x2, x1) * sin, in x's own type.
at::Tensor Rotate(const at::Tensor& input, const RotaryTable& rotary) {
  const auto halves = input.chunk(2, -1);
  const at::Tensor turned = at::cat({-halves[1], halves[0]}, -1);
  return input * rotary.first.to(input.scalar_type()) +
         turned * rotary.second.to(input.scalar_type());
}

}  // namespace

RmsNorm::RmsNorm(int64_t hidden, double epsilon) : epsilon_(epsilon) {
  weight_ = register_parameter("weight", torch::ones({hidden}));
}

torch::Tensor RmsNorm::forward(const torch::Tensor& input) {
  const at::Tensor wide = input.to(at::kFloat);
  const at::Tensor scale = wide.square().mean(-1, /*keepdim=*/true).add(epsilon_).rsqrt();
  return weight_ * (wide * scale).to(input.scalar_type());
}

Projection::Projection(int64_t inputs, int64_t outputs) {
  weight_ = register_parameter("weight", torch::empty({outputs, inputs}));
  const at::NoGradGuard no_gradients;
  weight_.normal_(0, kInitialDeviation);
}

torch::Tensor Projection::forward(const torch::Tensor& input) { return at::linear(input, weight_); }

LlamaAttention::LlamaAttention(const ModelShape& shape)
    : heads_(shape.heads), key_value_heads_(shape.key_value_heads), head_size_(shape.head_size) {
  const int64_t narrow = key_value_heads_ * head_size_;
  query_ = register_module("q_proj", std::make_shared<Projection>(shape.hidden, shape.hidden));
  key_ = register_module("k_proj", std::make_shared<Projection>(shape.hidden, narrow));
  value_ = register_module("v_proj", std::make_shared<Projection>(shape.hidden, narrow));
  output_ = register_module("o_proj", std::make_shared<Projection>(shape.hidden, shape.hidden));
}

torch::Tensor LlamaAttention::forward(const torch::Tensor& input, const RotaryTable& rotary) {
  const int64_t rows = input.size(0), length = input.size(1);
  const auto split_heads = [&](const at::Tensor& flat, int64_t heads) {
    return flat.view({rows, length, heads, head_size_}).transpose(1, 2);
  };
  const at::Tensor query = Rotate(split_heads(query_->forward(input), heads_), rotary);
  at::Tensor key = Rotate(split_heads(key_->forward(input), key_value_heads_), rotary);
  at::Tensor value = split_heads(value_->forward(input), key_value_heads_);
  if (key_value_heads_ != heads_) {
    key = key.repeat_interleave(heads_ / key_value_heads_, 1);
    value = value.repeat_interleave(heads_ / key_value_heads_, 1);
  }
  const at::Tensor mixed = at::scaled_dot_product_attention(query, key, value, /*attn_mask=*/{},
                                                            /*dropout_p=*/0, /*is_causal=*/true);
  return output_->forward(mixed.transpose(1, 2).reshape({rows, length, heads_ * head_size_}));
}

LlamaFeedForward::LlamaFeedForward(const ModelShape& shape) {
  const int64_t hidden = shape.hidden, wide = shape.feed_forward;
  gate_ = register_module("gate_proj", std::make_shared<Projection>(hidden, wide));
  up_ = register_module("up_proj", std::make_shared<Projection>(hidden, wide));
  down_ = register_module("down_proj", std::make_shared<Projection>(wide, hidden));
}

torch::Tensor LlamaFeedForward::forward(const torch::Tensor& input) {
  return down_->forward(at::silu(gate_->forward(input)) * up_->forward(input));
}

LlamaLayer::LlamaLayer(const ModelShape& shape) {
  attention_norm_ = register_module("input_layernorm",
                                    std::make_shared<RmsNorm>(shape.hidden, shape.norm_epsilon));
  attention_ = register_module("self_attn", std::make_shared<LlamaAttention>(shape));
  feed_forward_norm_ = register_module("post_attention_layernorm",
                                       std::make_shared<RmsNorm>(shape.hidden, shape.norm_epsilon));
  feed_forward_ = register_module("mlp", std::make_shared<LlamaFeedForward>(shape));
}

torch::Tensor LlamaLayer::forward(const torch::Tensor& input, const RotaryTable& rotary) {
  const at::Tensor hidden = input + attention_->forward(attention_norm_->forward(input), rotary);
  return hidden + feed_forward_->forward(feed_forward_norm_->forward(hidden));
}

Llama::Llama(const ModelShape& shape)
    : head_size_(shape.head_size), rotary_base_(shape.rotary_base) {
  const auto body = register_module("model", std::make_shared<Folder>());
  const auto embedding = body->register_module("embed_tokens", std::make_shared<Folder>());
  embedding_ =
      embedding->register_parameter("weight", torch::empty({shape.vocabulary, shape.hidden}));
  {
    const at::NoGradGuard no_gradients;
    embedding_.normal_(0, kInitialDeviation);
  }
  const auto layers = body->register_module("layers", std::make_shared<Folder>());
  for (int64_t index = 0; index < shape.layers; ++index) {
    layers_.push_back(
        layers->register_module(std::to_string(index), std::make_shared<LlamaLayer>(shape)));
  }
  norm_ =
      body->register_module("norm", std::make_shared<RmsNorm>(shape.hidden, shape.norm_epsilon));
  if (!shape.tied_embedding) {
    head_ =
        register_module("lm_head", std::make_shared<Projection>(shape.hidden, shape.vocabulary));
  }
}

torch::Tensor Llama::forward(const torch::Tensor& tokens) {
  const RotaryTable& rotary = Rotary(tokens.size(1), tokens.device());
  at::Tensor hidden = at::embedding(embedding_, tokens);
  for (const auto& layer : layers_) hidden = layer->forward(hidden, rotary);
  hidden = norm_->forward(hidden);
  return head_ != nullptr ? head_->forward(hidden) : at::linear(hidden, embedding_);
}

const RotaryTable& Llama::Rotary(int64_t length, at::Device device) {
  const bool is_there = rotary_.first.defined() && rotary_.first.size(0) == length &&
                        rotary_.first.device() == device;
  if (is_there) return rotary_;
  const at::NoGradGuard no_gradients;
  const at::Tensor exponents = at::arange(0, head_size_, 2, at::kFloat) / double(head_size_);
  const at::Tensor frequencies = at::pow(rotary_base_, -exponents);
  const at::Tensor angles = at::outer(at::arange(length, at::kFloat), frequencies);
  const at::Tensor both = at::cat({angles, angles}, -1);
  rotary_ = {both.cos().to(device), both.sin().to(device)};
  return rotary_;
}

std::shared_ptr<LanguageModel> MakeLlama(const ModelShape& shape) {
  return std::make_shared<Llama>(shape);
}

}  // namespace offload::examples

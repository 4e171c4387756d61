// examples/llama.h
//
// Llama: RMSNorm before each half of a layer, rotary positions, attention with grouped queries, and
// a SwiGLU feed-forward. Parameters have the names of the Hugging Face checkpoints
// ("model.layers.0.self_attn.q_proj.weight"), so that loading one is a match of names.
//
// Thread safety: as torch::nn::Module.
#pragma once

#include <torch/nn/module.h>

#include <utility>
#include <vector>

#include "examples/language_model.h"

namespace offload::examples {

// x / rms(x) * weight, the mean in fp32. Weight: [hidden].
class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(int64_t hidden, double epsilon);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  const double epsilon_;
  torch::Tensor weight_;
};

// A linear map without bias. Weight: [outputs, inputs].
class Projection : public torch::nn::Module {
 public:
  Projection(int64_t inputs, int64_t outputs);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  torch::Tensor weight_;
};

// Cosines and sines of the rotary angles, [length, head_size] each, in fp32.
using RotaryTable = std::pair<torch::Tensor, torch::Tensor>;

class LlamaAttention : public torch::nn::Module {
 public:
  explicit LlamaAttention(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& input, const RotaryTable& rotary);

 private:
  const int64_t heads_, key_value_heads_, head_size_;
  std::shared_ptr<Projection> query_, key_, value_, output_;
};

class LlamaFeedForward : public torch::nn::Module {
 public:
  explicit LlamaFeedForward(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  std::shared_ptr<Projection> gate_, up_, down_;
};

class LlamaLayer : public torch::nn::Module {
 public:
  explicit LlamaLayer(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& input, const RotaryTable& rotary);

 private:
  std::shared_ptr<RmsNorm> attention_norm_, feed_forward_norm_;
  std::shared_ptr<LlamaAttention> attention_;
  std::shared_ptr<LlamaFeedForward> feed_forward_;
};

class Llama : public LanguageModel {
 public:
  explicit Llama(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& tokens) override;

 private:
  // Computed on first use and kept, outside of the parameters: a cast of the model must not round
  // it.
  const RotaryTable& Rotary(int64_t length, at::Device device);

  const int64_t head_size_;
  const double rotary_base_;
  torch::Tensor embedding_;
  std::vector<std::shared_ptr<LlamaLayer>> layers_;
  std::shared_ptr<RmsNorm> norm_;
  std::shared_ptr<Projection> head_;  // null when the embedding is the output matrix
  RotaryTable rotary_;
};

}  // namespace offload::examples

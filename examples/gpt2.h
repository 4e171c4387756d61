// examples/gpt2.h
//
// GPT-2: learned positions, LayerNorm before each half of a layer, GELU, and the embedding used
// again as output matrix. Parameters have the names and layouts of the Hugging Face checkpoints
// ("transformer.h.0.attn.c_attn.weight"); its linear maps keep their weight as [inputs, outputs].
//
// Thread safety: as torch::nn::Module.
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "examples/language_model.h"

namespace offload::examples {

class LayerNorm : public torch::nn::Module {
 public:
  explicit LayerNorm(int64_t hidden);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  torch::Tensor weight_, bias_;
};

// input * weight + bias. Weight: [inputs, outputs], the transpose of the usual layout.
class TransposedLinear : public torch::nn::Module {
 public:
  TransposedLinear(int64_t inputs, int64_t outputs, double initial_deviation);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  torch::Tensor weight_, bias_;
};

class Gpt2Attention : public torch::nn::Module {
 public:
  explicit Gpt2Attention(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  const int64_t heads_;
  std::shared_ptr<TransposedLinear> query_key_value_, output_;
};

class Gpt2FeedForward : public torch::nn::Module {
 public:
  explicit Gpt2FeedForward(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  std::shared_ptr<TransposedLinear> widen_, narrow_;
};

class Gpt2Layer : public torch::nn::Module {
 public:
  explicit Gpt2Layer(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& input);

 private:
  std::shared_ptr<LayerNorm> attention_norm_, feed_forward_norm_;
  std::shared_ptr<Gpt2Attention> attention_;
  std::shared_ptr<Gpt2FeedForward> feed_forward_;
};

class Gpt2 : public LanguageModel {
 public:
  explicit Gpt2(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& tokens) override;

 private:
  torch::Tensor embedding_, positions_;
  std::vector<std::shared_ptr<Gpt2Layer>> layers_;
  std::shared_ptr<LayerNorm> norm_;
};

}  // namespace offload::examples

// examples/language_model.h
//
// What the trainer needs of a model. Llama and GPT-2 are ordinary libtorch modules behind it: they
// know nothing of offloading.
//
// Thread safety: as torch::nn::Module.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "zero3/model_shapes.h"

namespace offload::examples {

using zero3::ModelKind;
using zero3::ModelShape;

class LanguageModel : public torch::nn::Module {
 public:
  // tokens: int64 [rows, length], length at most the shape's context.
  // Returns the logits [rows, length, vocabulary] in the type of the weights.
  virtual torch::Tensor forward(const torch::Tensor& tokens) = 0;
};

// Both draw their weights from torch's generator: torch::manual_seed() decides them.
std::shared_ptr<LanguageModel> MakeLlama(const ModelShape& shape);
std::shared_ptr<LanguageModel> MakeGpt2(const ModelShape& shape);

inline std::shared_ptr<LanguageModel> MakeModel(const ModelShape& shape) {
  return shape.kind == ModelKind::kGpt2 ? MakeGpt2(shape) : MakeLlama(shape);
}

}  // namespace offload::examples

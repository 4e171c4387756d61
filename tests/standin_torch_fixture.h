// tests/standin_torch_fixture.h
//
// What tests that train a model on the stand-in device have in common: what a run shows, compared
// bit by bit, and the device that judges it. Beside torch_fixture.h.
#pragma once

#include <ATen/Functions.h>
#include <torch/nn/functional.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "gmock/gmock.h"
#include "proto/slab_layout.h"
#include "tests/standin_torch.h"

namespace offload {

// What a run shows, in order.
using Seen = std::vector<std::pair<std::string, at::Tensor>>;

inline void See(Seen& seen, const std::string& what, const at::Tensor& value) {
  seen.emplace_back(what, value.detach().cpu().clone());
}
inline void See(Seen& seen, const std::string& what, double value) {
  seen.emplace_back(what, torch::tensor(value, at::kDouble));
}

inline void ExpectEqual(const Seen& expected, const Seen& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [what, value] = expected[i];
    ASSERT_EQ(what, actual[i].first);
    EXPECT_TRUE(torch::equal(value, actual[i].second))
        << i << ", " << what << " differs in " << (value != actual[i].second).sum().item<int64_t>()
        << " of " << value.numel();
  }
}

// The checker has found nothing, and nothing is left on the device.
inline void ExpectClean(accelerator::HostAccelerator& device) {
  EXPECT_THAT(device.Violations(), testing::IsEmpty());
  EXPECT_THAT(device.Leftovers(), testing::IsEmpty());
}

// Batch `number` of a training set: [sequences, length].
inline at::Tensor TokensOnStandin(int64_t number, int64_t vocabulary, int64_t sequences,
                                  int64_t length) {
  torch::manual_seed(100 + number);
  return torch::randint(vocabulary, {sequences, length}).to(StandinDevice());
}

// How well `logits` foretell the token that follows each.
inline at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& tokens) {
  return torch::nn::functional::cross_entropy(logits.to(at::kFloat).reshape({-1, logits.size(-1)}),
                                              tokens.slice(1, 1).reshape({-1}));
}

// As the job knows the parameters of a model, tied ones once.
inline std::vector<proto::Tensor> TensorsOf(const torch::nn::Module& model) {
  std::vector<proto::Tensor> tensors;
  std::set<const void*> known;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!known.insert(tensor.unsafeGetTensorImpl()).second) continue;
    tensors.push_back({.name = item.key(),
                       .shape = tensor.sizes().vec(),
                       .dtype = tensor.scalar_type() == at::kFloat ? proto::Dtype::kFloat32
                                                                   : proto::Dtype::kBFloat16,
                       .trainable = tensor.requires_grad(),
                       .element_count = static_cast<uint64_t>(tensor.numel())});
  }
  return tensors;
}

}  // namespace offload

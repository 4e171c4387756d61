// tests/device_torch_fixture.h
//
// What tests that train a model on a device have in common, the stand-in or a GPU: what a run
// shows, compared bit by bit, and pieces of programs. Beside torch_fixture.h.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/functional.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "proto/slab_layout.h"

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

// Gradients, which are where the parameters are.
inline void SeeGradients(Seen& seen, const torch::nn::Module& model, c10::Device device) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor gradient = item.value().grad();
    if (!gradient.defined()) continue;
    EXPECT_EQ(gradient.device(), device);
    See(seen, item.key() + " gradient", gradient);
  }
}

// Weights as operators find them.
inline Seen WeightsOf(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  Seen seen;
  for (const auto& item : model.named_parameters()) See(seen, item.key(), item.value() * 1);
  return seen;
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
                       .dtype = tensor.scalar_type() == at::kFloat    ? proto::Dtype::kFloat32
                                : tensor.scalar_type() == at::kDouble ? proto::Dtype::kFloat64
                                : tensor.scalar_type() == at::kHalf   ? proto::Dtype::kFloat16
                                                                      : proto::Dtype::kBFloat16,
                       .trainable = tensor.requires_grad(),
                       .element_count = static_cast<uint64_t>(tensor.numel())});
  }
  return tensors;
}

// The trainer writes weights: all of one, and parts.
inline void WriteWeights(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters = model.parameters();
  parameters[0].mul_(0.5);
  parameters[1].fill_(0.25);
  parameters[2].slice(0, 1, 3).copy_(torch::full_like(parameters[2].slice(0, 1, 3), 0.125));
}

// Work on another stream, which begins behind the present one and before what comes next.
template <typename Work>
at::Tensor InStream(const c10::Stream& side, const Work& work) {
  const c10::Stream present =
      c10::impl::VirtualGuardImpl(side.device_type()).getStream(side.device());
  c10::Event begun(side.device_type()), done(side.device_type());
  begun.record(present);
  begun.block(side);
  at::Tensor result;
  {
    const c10::StreamGuard on_side(side);
    result = work();
  }
  done.record(side);
  done.block(present);
  result.record_stream(present);
  return result;
}

// Threads evaluate the model, one for each input, and none sees anything else than alone.
template <typename Model>
void ExpectThreadsSeeWhatOneSees(Model& model, const std::vector<at::Tensor>& inputs) {
  const auto evaluate = [&](const at::Tensor& input) {
    const at::NoGradGuard no_grad;
    return model.forward(input).cpu();
  };
  std::vector<at::Tensor> expected;
  for (const at::Tensor& input : inputs) expected.push_back(evaluate(input));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < inputs.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 3; ++round)
        EXPECT_TRUE(torch::equal(evaluate(inputs[i]), expected[i])) << i << ", " << round;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace offload

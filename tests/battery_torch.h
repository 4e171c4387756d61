// tests/battery_torch.h
//
// Ordinary trainer programs, each of which computes in memory (OFFLOADD_DISABLE=1) what it computes
// offloaded, bit for bit, or is refused with an identified error. A program is a function of a Run,
// to which it shows what it sees: losses, gradients, weights. It makes everything anew from fixed
// seeds, so that runs differ in where the bytes live and in nothing else.
//
// Thread safety: none; a program that has threads shows things from the one that runs it.
#pragma once

#include <offload/torch.h>
#include <stdlib.h>
#include <torch/nn.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace offload::battery {

namespace nn = torch::nn;
namespace optim = torch::optim;
using at::Tensor;

class Run {
 public:
  Run(Options options, at::ScalarType dtype) : options_(std::move(options)), dtype_(dtype) {}

  // An engine with a job of its own; the n-th call of every run opens the n-th job.
  std::shared_ptr<Engine> Open() {
    return Open([](Options&) {});
  }
  std::shared_ptr<Engine> Open(const std::function<void(Options&)>& change);
  // The same job again, as after a restart.
  std::shared_ptr<Engine> Reopen();

  at::ScalarType dtype() const { return dtype_; }
  const Options& options() const { return options_; }
  template <class Module>
  Module Cast(Module module) const {
    module->to(dtype_);
    return module;
  }
  // Numbers by their seed, without touching the generator that dropout takes from.
  Tensor Noise(uint64_t seed, at::IntArrayRef sizes) const;
  Tensor Indices(uint64_t seed, int64_t end, at::IntArrayRef sizes) const;

  void See(const Tensor& tensor);
  void See(double value) { seen_.push_back(torch::tensor(value, at::kDouble)); }
  void See(const nn::Module& module);  // parameters and buffers
  void SeeGradients(const nn::Module& module);
  const std::vector<Tensor>& seen() const { return seen_; }

 private:
  Options options_;
  at::ScalarType dtype_;
  int jobs_ = 0;
  std::vector<Tensor> seen_;
};

struct Program {
  std::string name;
  std::function<void(Run&)> run;
  int refused = 0;  // offloaded, with this error
  bool fp32_only = false;
};
using Programs = std::vector<Program>;

Programs ModulePrograms();
Programs LoopPrograms();
Programs EditPrograms();
Programs LifePrograms();
Programs StridePrograms();
Programs PaperPrograms();
Programs AnewPrograms();

// ---- What many programs do ---------------------------------------------------------------------

constexpr int64_t kWidth = 256, kInner = 640;

// Whether this is the run in memory, with which the others are compared.
inline bool IsInMemory() {
  const char* const disabled = getenv("OFFLOADD_DISABLE");
  return disabled != nullptr && disabled[0] == '1';
}

// Three matrices, two of them of several hundred KiB.
inline nn::Sequential Perceptron(const Run& run) {
  torch::manual_seed(11);
  return run.Cast(nn::Sequential(nn::Linear(kWidth, kInner), nn::Tanh(), nn::Linear(kInner, kWidth),
                                 nn::GELU(), nn::Linear(kWidth, kWidth)));
}
inline nn::LinearImpl& LinearAt(nn::Sequential& model, size_t at) {
  return model->at<nn::LinearImpl>(at);
}
inline Tensor Mean(const Tensor& values) { return values.to(at::kFloat).square().mean(); }

// The loss of a perceptron that learns to give back its input.
inline Tensor Loss(const Run& run, nn::Sequential& model, uint64_t batch) {
  const Tensor x = run.Noise(batch, {6, kWidth});
  return Mean(model->forward(x) - x);
}

inline void TrainStep(Run& run, nn::Sequential& model, optim::Optimizer& optimizer,
                      uint64_t batch) {
  const Tensor loss = Loss(run, model, batch);
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  run.See(loss);
}
inline void Train(Run& run, nn::Sequential& model, optim::Optimizer& optimizer, uint64_t begin,
                  uint64_t end) {
  for (uint64_t batch = begin; batch < end; ++batch) TrainStep(run, model, optimizer, batch);
}

}  // namespace offload::battery

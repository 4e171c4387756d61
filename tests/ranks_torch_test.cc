// Several ranks must compute what one process computes that takes their micro-batches in the order
// (micro-batch, rank): every scenario runs once in memory, in one process, and once in N processes
// against a real daemon; what they can see of gradients, norms, weights, masters and moments is
// compared bit by bit. On devices, too: each rank has its own stand-in, which judges what it is
// told.
//
// Ranks are forks of a process that has loaded torch and computed nothing: loading it anew takes
// longer than most scenarios.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <offload/grad_scaler.h>
#include <offload/torch.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "tests/standin_torch.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kTokens = 600, kWidth = 192, kInner = 1536;

// An embedding that is the head, too, layer norms (bundled), matrices of several extents, a frozen
// one, and one that only some paths use.
struct Model : nn::Module {
  Model() {
    embedding = register_module("embedding", nn::Embedding(kTokens, kWidth));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, kInner));
    down = register_module("down", nn::Linear(kInner, kWidth));
    frozen = register_module("frozen", nn::Linear(kWidth, kWidth));
    sometimes = register_module("sometimes", nn::Linear(kWidth, kWidth));
    scale = register_parameter("scale", torch::ones({}));
    for (Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }

  Tensor forward(const Tensor& tokens, bool detour) {
    Tensor x = embedding(tokens);
    if (amid_forward) amid_forward();
    if (amid_backward) {
      x.register_hook([this](const Tensor& g) {
        amid_backward();
        return g;
      });
    }
    x = x + down(torch::gelu(up(norm(x))));
    if (amid_forward) amid_forward();
    x = x + torch::tanh(frozen(x)) * scale;
    if (detour) x = x + sometimes(x);
    return nn::functional::linear(norm(x), embedding->weight);
  }

  nn::Embedding embedding{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr}, frozen{nullptr}, sometimes{nullptr};
  Tensor scale;
  std::function<void()> amid_forward, amid_backward;
};

// What a run shows, in order.
struct Log {
  std::vector<std::string> names;
  std::vector<Tensor> values;
  void Add(const std::string& name, const Tensor& value) {
    names.push_back(name);
    values.push_back(value.detach().cpu().clone());
  }
  void Save(const std::string& path) const {
    torch::save(values, path);
    std::ofstream list(path + ".names");
    for (const std::string& name : names) list << name << '\n';
  }
  static Log Load(const std::string& path) {
    Log log;
    torch::load(log.values, path);
    std::ifstream list(path + ".names");
    for (std::string name; std::getline(list, name);) log.names.push_back(name);
    return log;
  }
};

// Not torch's: runs in the process. Its averages are its own.
class OwnOptimizer : public torch::optim::Optimizer {
 public:
  explicit OwnOptimizer(std::vector<Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(0.01)) {}
  Tensor step(LossClosure) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (Tensor& parameter : group.params()) {
        const Tensor& grad = parameter.grad();
        if (!grad.defined()) continue;
        Tensor& average = averages_[parameter.unsafeGetTensorImpl()];
        if (!average.defined()) average = torch::zeros_like(grad);
        average.mul_(0.9).add_(grad, 0.1);
        parameter.mul_(0.999);
        parameter.data().addcdiv_(average, average.abs().add_(1e-3), -0.01);
      }
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    for (const auto& [name, parameter] : Named()) {
      const auto found = averages_.find(parameter.unsafeGetTensorImpl());
      if (found != averages_.end()) archive.write(name, found->second);
    }
  }
  void load(torch::serialize::InputArchive& archive) override {
    for (const auto& [name, parameter] : Named()) {
      Tensor average;
      if (archive.try_read(name, average)) averages_[parameter.unsafeGetTensorImpl()] = average;
    }
  }

 private:
  std::map<std::string, Tensor> Named() const {
    std::map<std::string, Tensor> named;
    for (const auto& group : param_groups_) {
      for (const Tensor& parameter : group.params())
        named.emplace(std::to_string(named.size()), parameter);
    }
    return named;
  }

  std::map<const void*, Tensor> averages_;
};

// One process of a run: a rank of several, or the one that does the work of all of them.
class Run {
 public:
  Run(int ranks, at::ScalarType dtype, const Options& options, c10::Device device,
      bool owns_optimizer)
      : ranks_(ranks), options_(options), device_(device) {
    at::set_num_threads(1);
    torch::manual_seed(3);
    model = std::make_shared<Model>();
    model->to(dtype);
    model->to(device);
    engine = Engine::Open(options);
    alone_ = engine->world_size() == 1;
    // Whose roots are the nearest, which those of fp64 have to be.
    const auto flavour = dtype == at::kDouble ? AdamWFlavour::kFused : AdamWFlavour::kMulAdd;
    if (owns_optimizer) {
      optimizer = std::make_unique<OwnOptimizer>(model->parameters());
      engine->Attach(*model, *optimizer);
    } else {
      optimizer =
          engine->AdamW(*model, torch::optim::AdamWOptions(1e-3).weight_decay(0.1), flavour);
    }
    for (const Tensor& parameter : model->parameters()) Share(parameter);
  }

  // In all ranks, between steps.
  void Thaw(Tensor parameter) {
    parameter.requires_grad_(true);
    Share(parameter);
  }

  int ranks() const { return ranks_; }
  bool owns_optimizer() const { return dynamic_cast<OwnOptimizer*>(optimizer.get()) != nullptr; }
  // Whether this process does what only one rank does: true for the one that is all of them.
  bool Is(int rank) const { return alone_ || engine->rank() == rank; }
  // Takes a step that the daemon refuses, in all ranks; in memory nobody looks, so there is none.
  void RefusedStep(int id) {
    if (alone_) return;
    try {
      optimizer->step();
    } catch (const Error& error) {
      if (error.id() == id) return;
      throw;
    }
    throw std::runtime_error("the step was taken");
  }
  // Micro-batch `pass` of the step, of every rank. `takes_part` and `detour`: of a rank.
  using OfRank = std::function<bool(int rank)>;
  void Backward(int64_t step, int64_t pass, const OfRank& detour = Never,
                const OfRank& takes_part = Always) {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!alone_ && rank != engine->rank()) continue;
      if (!takes_part(rank)) continue;
      const Tensor loss = Loss((step * 10 + pass) * 10 + rank, detour(rank));
      (scaled ? scaled(loss, rank) : loss).backward();
    }
  }
  static bool Never(int) { return false; }
  static bool Always(int) { return true; }

  Tensor Loss(int64_t batch, bool detour) {
    torch::manual_seed(1000 + batch);
    const Tensor tokens = torch::randint(kTokens, {2, 5}).to(device_);
    const Tensor logits = model->forward(tokens.slice(1, 0, 4), detour);
    return nn::functional::cross_entropy(logits.to(at::kFloat).view({-1, kTokens}),
                                         tokens.slice(1, 1, 5).reshape({-1}));
  }
  // Waits for the other ranks, by means that the engine knows nothing of.
  void Meet() {
    if (alone_) return;
    const std::string meeting =
        options_.nvme_path + "/" + options_.job + ".meeting" + std::to_string(meetings_++) + ".";
    std::ofstream(meeting + std::to_string(engine->rank()));
    for (int rank = 0; rank < ranks_; ++rank) {
      while (!std::filesystem::exists(meeting + std::to_string(rank))) usleep(1000);
    }
  }
  std::string folder() const { return options_.nvme_path + "/" + options_.job + ".files"; }
  std::string EmptyFolder() const {
    std::filesystem::remove_all(folder());
    std::filesystem::create_directories(folder());
    return folder();
  }
  void Clip(double norm) {
    log.Add("norm", torch::tensor(nn::utils::clip_grad_norm_(model->parameters(), norm)));
  }
  void LogGradients() {
    for (const auto& item : model->named_parameters()) {
      const Tensor& grad = item.value().grad();
      log.Add(item.key() + (grad.defined() ? " gradient" : " has no gradient"),
              !grad.defined()    ? torch::zeros({})
              : grad.is_sparse() ? grad.to_dense()
                                 : grad * 1);
    }
  }
  void LogWeights() {
    for (const auto& item : model->named_parameters()) {
      log.Add(item.key() + " weight", engine->Gather(item.value(), "weight"));
    }
  }
  void LogState() {
    LogWeights();
    for (const auto& item : model->named_parameters()) {
      if (!item.value().requires_grad() || owns_optimizer()) continue;
      for (const char* plane : {"master", "exp_avg", "exp_avg_sq"})
        log.Add(item.key() + " " + plane, engine->Gather(item.value(), plane));
    }
  }

  std::shared_ptr<Model> model;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::function<Tensor(const Tensor& loss, int rank)> scaled;  // what backward begins with
  Log log;

 private:
  // What the daemon makes of each rank's gradient.
  void Share(const Tensor& parameter) const {
    if (!alone_ || ranks_ == 1 || !parameter.requires_grad()) return;
    parameter.register_hook([share = 1.0 / ranks_](const Tensor& g) { return g * share; });
  }

  const int ranks_;
  const Options options_;
  const c10::Device device_;
  bool alone_ = false;
  int meetings_ = 0;
};

// ---- Scenarios ---------------------------------------------------------------------------------

// Two micro-batches, clipped, both forms of zero_grad.
void Ordinary(Run& run) {
  for (int64_t step = 0; step < 4; ++step) {
    run.Backward(step, 0);
    run.Backward(step, 1);
    run.Clip(step % 2 == 0 ? 0.2 : 1e6);
    if (step == 1) run.LogGradients();
    run.optimizer->step();
    if (step == 2) run.LogGradients();  // right after the step they are still there
    run.optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    run.LogWeights();
  }
}

// The same, in step: what one rank has announced amid its forward the others have, too, and what
// it has given amid its backward.
void InStep(Run& run) {
  run.model->amid_forward = run.model->amid_backward = [&] { run.Meet(); };
  for (int64_t step = 0; step < 4; ++step) {
    run.Backward(step, 0, run.Always);
    run.Backward(step, 1, run.Always);
    run.Clip(0.2);
    run.optimizer->step();
    run.optimizer->zero_grad();
    run.engine->WaitDurable();  // all weights are updated: nothing announced waits for that
  }
}

// Ranks that skip a parameter, in one micro-batch, in all, and all of them; fewer passes, and none.
void UnevenPaths(Run& run) {
  const int last = run.ranks() - 1;
  const auto only_last = [&](int rank) { return rank == last; };
  const auto but_last = [&](int rank) { return rank != last; };
  run.Backward(0, 0, only_last);
  run.LogGradients();
  run.Backward(0, 1);
  run.Clip(0.3);
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.Backward(1, 0);  // nobody
  run.LogGradients();
  run.optimizer->step();
  run.optimizer->zero_grad(/*set_to_none=*/false);
  run.Backward(2, 0, only_last);  // zeros in the others
  run.Clip(0.3);
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.Backward(3, 0);
  run.Backward(3, 1, but_last, but_last);  // the last has no more data
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.Backward(4, 0, run.Always, but_last);
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.Backward(5, 0, run.Always);  // every rank counts updates alike
  run.optimizer->step();
}

// What a rank gives of a table of which it has used some rows.
void SparseParts(Run& run) {
  run.scaled = [&run](const Tensor& loss, int rank) {
    const Tensor rows = nn::functional::embedding(
        torch::arange(10 * rank, 10 * rank + 30), run.model->sometimes->weight,
        nn::functional::EmbeddingFuncOptions().sparse(true));
    return loss + rows.square().sum();
  };
  for (int64_t step = 0; step < 3; ++step) {
    run.Backward(step, 0);
    run.LogGradients();
    run.optimizer->step();
    run.optimizer->zero_grad();
  }
}

// Without zero_grad a step goes on where the last one stopped; a step without backward, too.
void NeverZeroed(Run& run) {
  for (int64_t step = 0; step < 3; ++step) {
    run.Backward(step, 0, [step](int) { return step != 1; });
    run.optimizer->step();
    run.LogGradients();
  }
  run.optimizer->step();
  run.optimizer->zero_grad(/*set_to_none=*/false);
  run.optimizer->step();  // with gradients of zero
}

// Gradients that are zeroed without a step: all of them, and those of a part.
void SkippedSteps(Run& run) {
  run.Backward(0, 0);
  run.Clip(0.2);
  run.optimizer->zero_grad();
  run.Backward(0, 1);
  run.Backward(0, 2);
  run.LogGradients();
  run.model->up->zero_grad();
  run.Backward(0, 3);
  run.Clip(0.2);
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.Backward(1, 0);
  if (run.Is(run.ranks() - 1)) {  // a loss that is not finite, in one rank
    (run.Loss(5, false) * std::numeric_limits<double>::quiet_NaN()).backward();
  }
  run.RefusedStep(1701);
  run.optimizer->zero_grad();
  run.Backward(2, 0);
  run.optimizer->step();
}

// Somebody keeps gradients, of which plain torch says that they are theirs.
void KeptGradients(Run& run) {
  run.Backward(0, 0);
  const Tensor kept = run.model->up->weight.grad(), view = run.model->down->weight.grad()[3];
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.Backward(1, 0);
  run.log.Add("kept", kept * 1);
  run.log.Add("kept view", view * 1);
  run.log.Add("new", run.model->up->weight.grad() * 1);
  run.optimizer->step();
}

// The trainer writes gradients, alike in all ranks, and weights.
void FailToOverwrite(Tensor gradient) {
  try {
    gradient.copy_(torch::zeros({3, 3, 3}));
  } catch (const c10::Error&) {
    return;
  }
  throw std::runtime_error("it was overwritten");
}

void Written(Run& run) {
  const torch::NoGradGuard no_grad;
  const auto backward = [&](int64_t step) {
    const at::AutoGradMode grad(true);
    run.Backward(step, 0);
  };
  backward(0);
  run.model->up->weight.grad().add_(0.01);
  run.model->down->weight.grad().slice(0, 3, 5).zero_();
  run.model->norm->weight.mutable_grad() = torch::full_like(run.model->norm->weight.grad(), 0.5);
  for (const Tensor& parameter : run.model->parameters()) {
    if (parameter.grad().defined()) FailToOverwrite(parameter.grad());  // written, and not
  }
  run.Clip(0.3);
  FailToOverwrite(run.model->norm->bias.grad());  // clipped
  run.LogGradients();
  run.optimizer->step();
  run.LogGradients();
  run.optimizer->zero_grad();
  run.model->norm->bias.fill_(0.25);
  run.model->frozen->bias.copy_(torch::full({kWidth}, 0.125));
  backward(1);
  run.Clip(0.3);
  run.LogGradients();  // clipped
  run.optimizer->step();
}

// All ranks change weights in place, alike: clipped, decayed, averaged, in part, through data() and
// by lists. The first one has looked by a pointer before.
void Changed(Run& run) {
  auto& model = *run.model;
  for (int64_t step = 0; step < 4; ++step) {
    run.Backward(step, 0);
    run.Clip(0.3);
    run.optimizer->step();
    run.optimizer->zero_grad();
    const torch::NoGradGuard no_grad;
    if (run.Is(0) && model.scale.is_cpu() && model.up->weight.const_data_ptr() != nullptr)
      static_cast<void>(*static_cast<const volatile char*>(model.up->weight.const_data_ptr()));
    for (Tensor& parameter : model.parameters()) parameter.clamp_(-0.06, 0.06);
    for (Tensor& parameter : model.parameters()) parameter.data().clamp_(-1, 1);  // none is
    model.up->weight.mul_(0.99);
    model.down->weight.lerp_(model.down->weight.abs(), 0.125);
    model.down->weight.masked_fill_(model.down->weight > 0.04, 0.01);
    model.embedding->weight.slice(0, 3, 5).zero_();
    model.norm->weight[2].fill_(0.5);
    model.frozen->weight.data().sub_(0.001);
    model.sometimes->bias.index_fill_(0, torch::tensor({1, 7}).to(model.scale.device()), 0.25);
    if (step == 2) {
      const Tensor kept = model.up->weight.data().clone();
      model.up->weight.data().mul_(0.5);
      run.log.Add("halved", run.Loss(77, false));
      model.up->weight.data().copy_(kept);  // its master is what it was
    }
    at::_foreach_mul_(model.down->parameters(), 0.998);
    run.LogWeights();
  }
}

void OwnOptimizerSteps(Run& run) {
  for (int64_t step = 0; step < 4; ++step) {
    run.Backward(step, 0, [step](int rank) { return (step + rank) % 2 == 0; });
    run.Backward(step, 1);
    run.Clip(0.3);
    run.optimizer->step();
    run.engine->CommitStep();
    run.optimizer->zero_grad();
    run.LogWeights();
  }
}

// Frozen parameters are trained from the third step on, one of them in the last rank only, and what
// was trained is frozen for a step.
void Thawed(Run& run) {
  const auto in_last = [&](int rank) { return rank == run.ranks() - 1; };
  for (Tensor& parameter : run.model->sometimes->parameters()) parameter.requires_grad_(false);
  for (int64_t step = 0; step < 6; ++step) {
    if (step == 2) {
      for (Tensor& parameter : run.model->frozen->parameters()) run.Thaw(parameter);
      for (Tensor& parameter : run.model->sometimes->parameters()) parameter.requires_grad_(true);
    }
    if (step == 3 || step == 4) run.model->up->weight.requires_grad_(step == 4);
    run.Backward(step, 0, in_last);
    run.Backward(step, 1);
    run.Clip(0.3);
    if (step >= 2) run.LogGradients();
    run.optimizer->step();
    run.optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    run.LogWeights();
  }
}

void ThawedUnannounced(Run& run) {
  run.Backward(0, 0);
  run.optimizer->step();
  for (Tensor& parameter : run.model->frozen->parameters()) parameter.requires_grad_(true);
  run.Backward(1, 0);
  run.optimizer->step();
}

// One rank writes a checkpoint, all load it.
void Files(Run& run) {
  run.Backward(0, 0);
  run.optimizer->step();
  run.optimizer->zero_grad();
  if (run.Is(run.ranks() - 1)) run.engine->SaveWeights(run.EmptyFolder());
  run.Backward(1, 0);
  run.optimizer->step();
  run.optimizer->zero_grad();
  run.engine->LoadWeights(run.folder());
  run.LogWeights();
  run.Backward(2, 0);
  run.optimizer->step();
}

// ---- Gradients that the trainer reduces ----

// What an all-reduce of another library does: every rank's gradients, divided, added in the order
// of ranks, and written to the memory of `.grad`. Parameters that a rank does not use are zeros to
// it.
void AllReduce(Run& run, int64_t number) {
  if (run.engine->world_size() == 1) return;  // backward has added them in this order
  const torch::NoGradGuard no_grad;
  const std::string path = run.folder() + std::to_string(number) + ".";
  Log own;
  for (const auto& item : run.model->named_parameters()) {
    const Tensor& grad = item.value().grad();
    if (grad.defined()) own.Add(item.key(), grad * (1.0 / run.ranks()));
  }
  own.Save(path + std::to_string(run.engine->rank()));
  run.engine->Exchange("");
  std::map<std::string, Tensor> sums;
  for (int rank = 0; rank < run.ranks(); ++rank) {
    const Log part = Log::Load(path + std::to_string(rank));
    for (size_t i = 0; i < part.names.size(); ++i) {
      const auto [sum, is_first] = sums.emplace(part.names[i], part.values[i]);
      if (!is_first) sum->second.add_(part.values[i]);
    }
  }
  for (const auto& item : run.model->named_parameters()) {
    const auto sum = sums.find(item.key());
    if (sum == sums.end()) continue;
    Tensor& grad = item.value().mutable_grad();
    if (!grad.defined()) grad = torch::zeros_like(item.value());
    std::memcpy(grad.mutable_data_ptr(), sum->second.const_data_ptr(), sum->second.nbytes());
  }
}

// One micro-batch of each rank; clipping and edits after the reduction.
void OwnReduction(Run& run) {
  const int last = run.ranks() - 1;
  for (int64_t step = 0; step < 4; ++step) {
    run.Backward(step, 0, [=](int rank) { return step > 0 && rank == last; });
    AllReduce(run, step);
    run.Clip(step % 2 == 0 ? 0.2 : 1e6);
    if (step == 2) {
      const torch::NoGradGuard no_grad;
      run.model->up->weight.grad().add_(0.01);
      run.model->down->weight.grad().mul_(0.5);
      run.model->norm->bias.mutable_grad().zero_();
    }
    run.LogGradients();
    run.optimizer->step();
    run.LogGradients();
    run.optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    run.LogWeights();
  }
}

// The loss of one rank overflows: none takes the step, and all have the same scale.
void OwnReductionScaled(Run& run) {
  GradScaler scaler(*run.engine, {.init_scale = 256, .growth_interval = 2});
  for (int64_t step = 0; step < 5; ++step) {
    run.scaled = [&](const Tensor& loss, int rank) {
      const bool overflows = step == 2 && rank == run.ranks() - 1;
      return scaler.Scale(overflows ? loss * std::numeric_limits<double>::infinity() : loss);
    };
    run.Backward(step, 0);
    AllReduce(run, step);
    if (step != 1) scaler.Unscale(*run.optimizer);
    if (step != 1 && step != 2) run.Clip(0.3);
    run.log.Add("taken", torch::tensor(scaler.Step(*run.optimizer)));
    scaler.Update();
    run.log.Add("scale", torch::tensor(scaler.scale()));
    run.optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    run.LogWeights();
  }
}

// Where the daemon adds gradients, each rank would have to keep all of them unscaled.
void ScaledSums(Run& run) {
  GradScaler scaler(*run.engine);
  run.scaled = [&](const Tensor& loss, int) { return scaler.Scale(loss); };
  run.Backward(0, 0);
  scaler.Step(*run.optimizer);
}

// Steps that the ranks do not agree on: none is taken, and the job goes on.
void OwnReductionThatDiffers(Run& run) {
  const torch::NoGradGuard no_grad;
  const auto backward = [&](int64_t step) {
    const at::AutoGradMode grad(true);
    run.Backward(step, 0);
    AllReduce(run, step);
  };
  backward(0);
  run.optimizer->step();
  run.optimizer->zero_grad();
  backward(1);
  if (run.Is(1)) run.model->up->weight.grad()[0][0].add_(1);
  run.RefusedStep(1805);
  run.optimizer->zero_grad();
  backward(2);
  if (run.Is(0)) run.model->up->weight.mutable_grad().reset();
  run.RefusedStep(1805);
  run.optimizer->zero_grad();
  backward(3);
  run.optimizer->step();
}

void OwnReductionOfOneRank(Run& run) {
  run.Backward(0, 0);
  AllReduce(run, 0);
  const torch::NoGradGuard no_grad;
  if (run.Is(1)) run.model->up->weight.grad().add_(0.01);
  run.optimizer->step();
}

// ---- What is refused ----

void EditedByOneRank(Run& run) {
  run.Backward(0, 0);
  const torch::NoGradGuard no_grad;
  if (run.Is(1)) run.model->up->weight.grad().add_(0.01);
  run.optimizer->step();
}

void ChangedDifferently(Run& run) {
  const torch::NoGradGuard no_grad;
  run.model->up->weight.add_(run.Is(0) ? 0.5 : 0.25);
}

void ChangedByTheLastRank(Run& run) {
  run.Backward(0, 0);
  {
    const torch::NoGradGuard no_grad;
    if (run.Is(1)) run.model->up->weight.mul_(0.5);
  }
  run.optimizer->step();
}

void OverwrittenByTheLastRankBeforeALook(Run& run) {
  {
    const torch::NoGradGuard no_grad;
    if (run.Is(1)) run.model->up->weight.fill_(0.5);
  }
  run.Backward(0, 0);
  run.Clip(0.3);
}

void OwnOptimizerLBFGS(Run& run) {
  torch::optim::LBFGS optimizer(run.model->parameters());
  run.engine->Attach(*run.model, optimizer);
}

void OwnOptimizerInBackward(Run& run) {
  run.model->up->weight.register_hook([&](const Tensor& g) {
    run.optimizer->step();
    run.engine->CommitStep();
    return g;
  });
  run.Backward(0, 0);
}

void AddedToClipped(Run& run) {
  run.Backward(0, 0);
  run.Clip(0.01);
  run.optimizer->step();
  run.Backward(1, 0);
}

void DifferentialGradient(Run& run) {
  run.Loss(1, false).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
}

void ReadAmidBackward(Run& run) {
  run.model->down->weight.register_hook([&](const Tensor&) {
    if (const Tensor grad = run.model->norm->weight.grad(); grad.defined()) grad.sum();
  });
  run.Backward(0, 0);
  run.Backward(0, 1);
}

// As a library that sends bytes does.
void PointerToGradient(Run& run) {
  run.Backward(0, 0);
  run.model->up->weight.mutable_grad().mutable_data_ptr();
}

// What torch's reducer hangs into the graph.
void ReducedByTrainerToo(Run& run) {
  // The reducer keeps it: the parameter does not.
  const auto accumulation = torch::autograd::impl::grad_accumulator(run.model->up->weight);
  accumulation->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
        return outputs;
      }));
  run.Backward(0, 0);
}

// ---- What ends a run ----

void KilledInTheThirdStep(Run& run) {
  for (int64_t step = 0; step < 4; ++step) {
    if (run.Is(1) && step == 2) {
      run.model->down->weight.register_hook([](const Tensor&) { raise(SIGKILL); });
    }
    run.Backward(step, 0);
    run.optimizer->step();
    run.optimizer->zero_grad();
  }
}

// ---- A run after another, with more ranks ----

std::string StateOf(int rank) { return "the state of rank " + std::to_string(rank); }

void KeepsTrainerState(Run& run) {
  run.engine->SetTrainerState(StateOf(run.engine->rank()));
  run.Backward(0, 0);
  run.optimizer->step();
}

void FindsTrainerState(Run& run) {
  const int rank = run.engine->rank();
  const std::string expected = rank < 2 ? StateOf(rank) : "";
  if (run.engine->TrainerState() != expected || run.engine->step() != 1) {
    throw std::runtime_error("rank " + std::to_string(rank) + " finds " +
                             run.engine->TrainerState());
  }
}

// ---- Buffers, over runs with other numbers of ranks ----

// One that travels with the trainer's state, and one that is in the store.
struct Counting : nn::Module {
  explicit Counting(bool has_large = true) : layer(register_module("layer", nn::Linear(8, 4))) {
    small = register_buffer("small", torch::zeros({16}));
    if (has_large) large = register_buffer("large", torch::zeros({80000}));
  }
  nn::Linear layer;
  Tensor small, large;
};

// Small ones are each rank's own, or the first one's where there was no such rank; large ones are
// the first one's. `then`: what the first rank had, `own`: what this one had, if it was there.
void CountInBuffers(const Options& options) {
  torch::manual_seed(3);
  auto model = std::make_shared<Counting>();
  auto engine = Engine::Open(options);
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
  const int rank = engine->rank();
  const int64_t begin = engine->step();
  // Runs of 1, 2, 3, 1 ranks, two steps each, that add the rank's number and 1.
  const double then = static_cast<double>(begin);
  const double own = begin == 4 && rank == 1 ? 2 + 2 * 2 : then;
  const auto check = [&](const Tensor& buffer, double expected) {
    if ((buffer == expected).all().item<bool>()) return;
    throw std::runtime_error("a buffer of rank " + std::to_string(rank) + " is " +
                             std::to_string(buffer[0].item<double>()) + " instead of " +
                             std::to_string(expected) + " at step " + std::to_string(begin));
  };
  model->layer(torch::zeros({1, 8}));
  check(model->small, own);
  check(model->large, then);
  for (int step = 0; step < 2; ++step) {
    model->layer(torch::randn({2, 8})).square().mean().backward();
    const torch::NoGradGuard no_grad;
    model->small.add_(rank + 1);
    model->large.add_(rank + 1);
    optimizer->step();
    optimizer->zero_grad();
  }
  engine->Exchange("");
}

// What it keeps is more than goes with a step, and its file is another one in each rank.
void GoOnWithAverages(const Options& options) {
  const auto step = [](nn::Linear& model, OwnOptimizer& optimizer, int64_t number) {
    torch::manual_seed(100 + number);
    optimizer.zero_grad();
    model(torch::randn({2, 128})).square().mean().backward();
    optimizer.step(nullptr);
  };
  torch::manual_seed(3);
  nn::Linear model(128, 1024);
  auto engine = Engine::Open(options);
  OwnOptimizer optimizer(model->parameters());
  engine->Attach(*model, optimizer);
  const int64_t begin = engine->step();
  for (int64_t number = begin; number < begin + 2; ++number) {
    step(model, optimizer, number);
    engine->CommitStep(optimizer);
  }
  torch::manual_seed(3);
  nn::Linear alone(128, 1024);
  OwnOptimizer own(alone->parameters());
  for (int64_t number = 0; number < begin + 2; ++number) step(alone, own, number);
  if (!torch::equal(engine->Gather(model->weight, "weight"), alone->weight.detach()))
    throw std::runtime_error("other weights after " + std::to_string(begin) + " steps and 2");
  engine->Exchange("");
}

// A job that was made without a buffer, too large for its steps, goes on as it was: what it knows
// comes back, the other one begins as it is built.
void GetALargeBuffer(const Options& options) {
  torch::manual_seed(3);
  auto model = std::make_shared<Counting>(/*has_large=*/false);
  auto engine = Engine::Open(options);
  const int64_t begin = engine->step();
  Tensor late;
  if (begin > 0) late = model->register_buffer("late", torch::full({300000}, 7));
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
  model->layer(torch::zeros({1, 8}));
  if (!(model->small == static_cast<double>(begin)).all().item<bool>())
    throw std::runtime_error("the small buffer is another one");
  if (begin > 0 && !(late == 7).all().item<bool>())
    throw std::runtime_error("the late one changed");
  model->layer(torch::randn({2, 8})).square().mean().backward();
  const torch::NoGradGuard no_grad;
  model->small.add_(1);
  if (late.defined()) late.add_(1);
  optimizer->step();
  engine->Exchange("");
}

struct Scenario {
  const char* name;
  void (*run)(Run&);
};
constexpr Scenario kScenarios[] = {
    {"Ordinary", Ordinary},
    {"InStep", InStep},
    {"UnevenPaths", UnevenPaths},
    {"SparseParts", SparseParts},
    {"NeverZeroed", NeverZeroed},
    {"SkippedSteps", SkippedSteps},
    {"KeptGradients", KeptGradients},
    {"Written", Written},
    {"Thawed", Thawed},
    {"ThawedUnannounced", ThawedUnannounced},
    {"Files", Files},
    {"OwnReduction", OwnReduction},
    {"OwnReductionScaled", OwnReductionScaled},
    {"ScaledSums", ScaledSums},
    {"OwnReductionThatDiffers", OwnReductionThatDiffers},
    {"OwnReductionOfOneRank", OwnReductionOfOneRank},
    {"EditedByOneRank", EditedByOneRank},
    {"Changed", Changed},
    {"ChangedDifferently", ChangedDifferently},
    {"ChangedByTheLastRank", ChangedByTheLastRank},
    {"OverwrittenByTheLastRankBeforeALook", OverwrittenByTheLastRankBeforeALook},
    {"OwnOptimizerSteps", OwnOptimizerSteps},
    {"OwnOptimizerLBFGS", OwnOptimizerLBFGS},
    {"OwnOptimizerInBackward", OwnOptimizerInBackward},
    {"AddedToClipped", AddedToClipped},
    {"DifferentialGradient", DifferentialGradient},
    {"ReadAmidBackward", ReadAmidBackward},
    {"PointerToGradient", PointerToGradient},
    {"ReducedByTrainerToo", ReducedByTrainerToo},
    {"KilledInTheThirdStep", KilledInTheThirdStep},
    {"KeepsTrainerState", KeepsTrainerState},
    {"FindsTrainerState", FindsTrainerState},
};

// ---- Processes ---------------------------------------------------------------------------------

std::string Folder() {
  const char* const folder = getenv("TEST_TMPDIR");
  return folder != nullptr ? folder : "/var/tmp";
}

bool IsOnDevice(const std::string& job) { return job.find("OnDevice") != std::string::npos; }
bool ArePeers(const std::string& job) { return job.find("Peers") != std::string::npos; }

// The stand-in of this process, of which no tensor may live. With an address it reaches others.
accelerator::HostAccelerator& NewDevice(bool is_late, const std::string& address = "") {
  // Outlives what torch keeps of it.
  static auto* const kDevices = new std::vector<std::unique_ptr<accelerator::HostAccelerator>>;
  const auto& device = kDevices->emplace_back(
      std::make_unique<accelerator::HostAccelerator>(accelerator::HostAccelerator::Options{
          .pace = is_late ? accelerator::Pace::kLate : accelerator::Pace::kRandom,
          .queries_are_late = is_late,
          .peer_address = address}));
  UseStandin(*device);
  return *device;
}

Options OptionsFor(const std::string& job) {
  Options options;
  options.nvme_path = Folder();
  options.ram = "256MiB";
  options.job = job;
  options.spill_gradients = job.find("Spilled") != std::string::npos;
  if (job.starts_with("OwnReduction")) options.gradients = "reduced_by_trainer";
  options.may_thaw = job.starts_with("Thawed") && !job.starts_with("ThawedUnannounced");
  if (IsOnDevice(job)) {
    options.gpu_ram = "6MiB";  // a little more than the least
    options.weights_home = job.starts_with("InStep") ? "ram" : "nvme";
  }
  return options;
}

std::string PathOf(const std::string& job, int rank) {
  return Folder() + "/" + job + "." + std::to_string(rank);
}

bool OwnsOptimizer(const std::string& scenario) { return scenario.starts_with("OwnOptimizer"); }

at::ScalarType DtypeOf(const std::string& word) {
  if (word == "fp16") return at::kHalf;
  if (word == "fp64") return at::kDouble;
  return word == "bf16" ? at::kBFloat16 : at::kFloat;
}

// A child: what it shows goes into a file, the reason for an end before that to stderr.
int BeARank(const std::string& scenario, int ranks, const std::string& dtype,
            const std::string& path, const std::string& job) {
  std::string failure;
  const std::string rank = getenv("RANK");
  const bool is_told_not_to = job.starts_with("Ordinary") && !ArePeers(job);  // by one of them
  if (is_told_not_to && rank == "1") setenv("OFFLOADD_GPU_PEERS", "off", 1);
  accelerator::HostAccelerator* const device =
      IsOnDevice(job) ? &NewDevice(/*is_late=*/atoi(rank.c_str()) % 2 == 1,
                                   ArePeers(job) || is_told_not_to ? "standin/" + rank : "")
                      : nullptr;
  try {
    static constexpr std::pair<const char*, void (*)(const Options&)> kWithoutRun[] = {
        {"CountInBuffers", CountInBuffers},
        {"GetALargeBuffer", GetALargeBuffer},
        {"GoOnWithAverages", GoOnWithAverages}};
    for (const auto& [name, run] : kWithoutRun) {
      if (scenario != name) continue;
      at::set_num_threads(1);
      run(OptionsFor(job));
      return 0;
    }
    {
      Run run(ranks, DtypeOf(dtype), OptionsFor(job), device ? StandinDevice() : c10::kCPU,
              OwnsOptimizer(scenario));
      for (const Scenario& each : kScenarios) {
        if (each.name == scenario) each.run(run);
      }
      run.LogState();
      run.log.Save(path);
      for (const char* way : {"gathers the others'", "adds a slice of all ranks'"}) {
        const bool is_taken = run.engine->plan().text.find(way) != std::string::npos;
        if (is_taken != ArePeers(job)) failure = run.engine->plan().text;
      }
      run.engine->Exchange("");  // nobody closes while others still look
    }
    if (device != nullptr) {
      if (scenario == "InStep" && device->counters().collectives == 0)
        failure += "nothing was gathered\n";
      if (scenario == "InStep" && device->counters().exchanges < 4)
        failure += "in a step nothing was exchanged\n";
      for (const std::string& violation : device->Violations()) failure += violation + "\n";
    }
    if (failure.empty()) return 0;
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  std::cerr << failure << std::endl;
  std::ofstream(path + ".failure") << failure;
  return 1;
}

// ---- The process that forks ranks --------------------------------------------------------------

struct Launch {
  std::string scenario;
  int ranks = 0;
  std::string dtype, job;
};

[[noreturn]] void BeARankOf(const Launch& launch, int rank) {
  const std::string ranks = std::to_string(launch.ranks);
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", ranks.c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", ranks.c_str(), 1);
  setenv("TORCHELASTIC_RUN_ID", launch.job.c_str(), 1);
  setenv("OFFLOADD_DISABLE", "0", 1);
  // Ranks that wait for each other for good: nothing else of these is slow.
  if (launch.scenario == "ChangedByTheLastRank" ||
      launch.scenario == "OverwrittenByTheLastRankBeforeALook")
    setenv("OFFLOADD_ROOM_TIMEOUT", "3", 1);
  const int code =
      BeARank(launch.scenario, launch.ranks, launch.dtype, PathOf(launch.job, rank), launch.job);
  std::cout << std::flush;
  fflush(nullptr);
  // Without the end of torch, which takes every operator back and every page for that is a copy.
  _exit(code);
}

// The exit codes of ranks, or of signals the negative.
std::vector<int> ForkRanks(const Launch& launch) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < launch.ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) BeARankOf(launch, rank);
    children.push_back(pid);
  }
  std::vector<int> codes;
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

int to_launcher = -1;

// Before anything has been computed.
void StartLauncher() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) abort();
  const pid_t pid = fork();
  to_launcher = ends[0];
  if (pid != 0) {
    close(ends[1]);
    return;
  }
  close(ends[0]);
  char text[4096];
  for (ssize_t bytes; (bytes = recv(ends[1], text, sizeof(text), 0)) > 0;) {
    std::istringstream words(std::string(text, static_cast<size_t>(bytes)));
    Launch launch;
    words >> launch.scenario >> launch.ranks >> launch.dtype >> launch.job;
    const std::vector<int> codes = ForkRanks(launch);
    send(ends[1], codes.data(), codes.size() * sizeof(int), 0);
  }
  _exit(0);  // the test has ended
}

std::vector<int> RunRanks(const std::string& scenario, int ranks, const std::string& dtype,
                          const std::string& job) {
  const std::string text = scenario + " " + std::to_string(ranks) + " " + dtype + " " + job;
  EXPECT_EQ(send(to_launcher, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  std::vector<int> codes(ranks);
  const size_t bytes = codes.size() * sizeof(int);
  EXPECT_EQ(recv(to_launcher, codes.data(), bytes, 0), static_cast<ssize_t>(bytes));
  return codes;
}

Log RunAlone(const std::string& scenario, int ranks, const std::string& dtype, bool on_device) {
  setenv("OFFLOADD_DISABLE", "1", 1);
  // Files are written of models in memory of the host, which have the stand-in's bits.
  on_device = on_device && scenario != "Files";
  if (on_device) NewDevice(/*is_late=*/false);
  Run run(ranks, DtypeOf(dtype), OptionsFor("alone"), on_device ? StandinDevice() : c10::kCPU,
          OwnsOptimizer(scenario));
  for (const Scenario& each : kScenarios) {
    if (each.name == scenario) each.run(run);
  }
  run.LogState();
  return run.log;
}

void ExpectEqual(const Log& reference, const Log& rank) {
  ASSERT_EQ(reference.names, rank.names);
  ASSERT_EQ(reference.values.size(), rank.values.size());
  for (size_t i = 0; i < reference.values.size(); ++i) {
    const Tensor &expected = reference.values[i], &actual = rank.values[i];
    ASSERT_EQ(expected.scalar_type(), actual.scalar_type()) << reference.names[i];
    EXPECT_TRUE(torch::equal(expected, actual))
        << reference.names[i] << " (entry " << i << ") differs in "
        << (expected != actual).sum().item<int64_t>() << " of " << expected.numel() << " elements";
  }
}

// ---- Tests -------------------------------------------------------------------------------------

struct Case {
  const char* scenario;
  int ranks;
  const char* dtype;
  bool spills = false;
  bool on_device = false;
  bool are_peers = false;
  std::string Job() const {
    return std::string(scenario) + std::to_string(ranks) + dtype + (spills ? "Spilled" : "") +
           (on_device ? "OnDevice" : "") + (are_peers ? "Peers" : "");
  }
};

Case OnDevice(const char* scenario, int ranks, const char* dtype) {
  return {.scenario = scenario, .ranks = ranks, .dtype = dtype, .on_device = true};
}

Case OnPeers(const char* scenario, int ranks, const char* dtype) {
  Case on_peers = OnDevice(scenario, ranks, dtype);
  on_peers.are_peers = true;
  return on_peers;
}

Case Spilled(Case each) {
  each.spills = true;
  return each;
}

class RanksTest : public ::testing::TestWithParam<Case> {};

TEST_P(RanksTest, ComputeWhatOneProcessDoes) {
  const auto [scenario, ranks, dtype, spills, on_device, are_peers] = GetParam();
  const std::string job = GetParam().Job();
  const std::vector<int> codes = RunRanks(scenario, ranks, dtype, job);
  ASSERT_EQ(codes, std::vector<int>(ranks, 0));
  const Log reference = RunAlone(scenario, ranks, dtype, on_device);
  for (int rank = 0; rank < ranks; ++rank) {
    SCOPED_TRACE(rank);
    ExpectEqual(reference, Log::Load(PathOf(job, rank)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RanksTest,
    ::testing::Values(
        Case{"Ordinary", 1, "bf16"}, Case{"Ordinary", 2, "bf16"}, Case{"Ordinary", 3, "fp32"},
        Case{"Ordinary", 4, "fp32"}, Case{"UnevenPaths", 2, "fp32"}, Case{"UnevenPaths", 3, "bf16"},
        Case{"SparseParts", 2, "fp32"}, Case{"NeverZeroed", 2, "bf16"},
        Case{"SkippedSteps", 2, "fp32"}, Case{"KeptGradients", 2, "fp32"},
        Case{"Written", 2, "bf16"}, Case{"Files", 2, "fp32"}, Case{"Thawed", 2, "fp32"},
        Case{"Thawed", 3, "bf16", true}, Case{"OwnReduction", 1, "bf16"},
        Case{"OwnReduction", 2, "bf16"}, Case{"OwnReduction", 3, "fp32"},
        Case{"OwnReductionThatDiffers", 2, "fp32"}, Case{"Ordinary", 2, "fp32", /*spills=*/true},
        Case{"Written", 2, "bf16", true}, Case{"Ordinary", 2, "fp16"},
        Case{"Ordinary", 3, "fp64", true}, Case{"UnevenPaths", 2, "fp64"},
        Case{"Written", 2, "fp16", true}, Case{"Files", 2, "fp16"}, Case{"OwnReduction", 2, "fp64"},
        Case{"OwnReduction", 2, "fp16"}, Case{"OwnReductionScaled", 2, "fp16"},
        Case{"OwnReductionScaled", 2, "fp32"}, Case{"Changed", 3, "fp32"},
        Case{"Changed", 2, "bf16"}, Case{"Changed", 2, "fp16", true},
        Case{"OwnOptimizerSteps", 3, "fp32"}, Case{"OwnOptimizerSteps", 2, "bf16", true}),
    [](const auto& info) { return info.param.Job(); });

// Each rank with a device of its own.
INSTANTIATE_TEST_SUITE_P(
    OnDevices, RanksTest,
    ::testing::Values(OnDevice("Ordinary", 2, "bf16"), OnDevice("Ordinary", 4, "fp32"),
                      OnDevice("UnevenPaths", 3, "bf16"), OnDevice("NeverZeroed", 2, "fp32"),
                      OnDevice("SkippedSteps", 2, "fp32"), OnDevice("KeptGradients", 2, "bf16"),
                      OnDevice("Written", 2, "bf16"), OnDevice("Written", 2, "fp32"),
                      OnDevice("Files", 2, "fp32"), OnDevice("Changed", 2, "fp32"),
                      OnDevice("OwnOptimizerSteps", 2, "fp32"),
                      Spilled(OnDevice("Ordinary", 2, "fp32")),
                      Spilled(OnDevice("Written", 2, "bf16"))),
    [](const auto& info) { return info.param.Job(); });

// The same, and the devices reach each other: weights are gathered, slices of gradients exchanged.
INSTANTIATE_TEST_SUITE_P(
    OnPeers, RanksTest,
    ::testing::Values(OnPeers("InStep", 2, "bf16"), OnPeers("InStep", 4, "fp32"),
                      OnPeers("UnevenPaths", 3, "bf16"), OnPeers("SkippedSteps", 2, "fp32"),
                      OnPeers("NeverZeroed", 2, "bf16"), OnPeers("Written", 2, "bf16"),
                      OnPeers("Files", 2, "fp32"), Spilled(OnPeers("NeverZeroed", 2, "fp32"))),
    [](const auto& info) { return info.param.Job(); });

struct Refusal {
  const char* scenario;
  int rank;          // who says why
  const char* text;  // what it says
  bool on_device = false;
  std::string Job() const {
    return std::string(scenario) + "Told" + std::to_string(rank) + (on_device ? "OnDevice" : "");
  }
};

class RefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, EndsAllRanksWithTheReason) {
  const auto [scenario, rank, text, on_device] = GetParam();
  const std::string job = GetParam().Job();
  const std::vector<int> codes = RunRanks(scenario, 2, "fp32", job);
  EXPECT_EQ(codes, (std::vector<int>{1, 1}));
  std::stringstream said;
  said << std::ifstream(PathOf(job, rank) + ".failure").rdbuf();
  EXPECT_NE(said.str().find(text), std::string::npos) << said.str();
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusalTest,
    ::testing::Values(
        Refusal{"EditedByOneRank", 0, "up.weight"},
        Refusal{"OwnReductionOfOneRank", 0,
                "OFD-1805 the gradient of \"up.weight\" differs between ranks 0 and 1"},
        Refusal{"ChangedDifferently", 0, "OFD-1606 ranks 0 and 1 change \"up.weight\" in place"},
        Refusal{"ChangedDifferently", 1, "OFD-1606 ranks 0 and 1 change \"up.weight\" in place"},
        Refusal{
            "ChangedByTheLastRank", 1,
            "OFD-1805 rank 1 writes \"up.weight\" in place while rank 0 waits for the gradients"},
        Refusal{"OverwrittenByTheLastRankBeforeALook", 1,
                "while rank 0 waits for the gradients of rank 1"},
        Refusal{"OwnOptimizerLBFGS", 0, "OFD-1604 torch::optim::LBFGS with several ranks"},
        Refusal{"OwnOptimizerInBackward", 1, "while backward runs"},
        Refusal{"ScaledSums", 0, "reduced_by_trainer"},
        Refusal{"ThawedUnannounced", 0, "options.may_thaw"},
        Refusal{"AddedToClipped", 0, "call zero_grad() before the next"},
        Refusal{"DifferentialGradient", 0, "create_graph"},
        Refusal{"ReadAmidBackward", 0, "while backward runs"},
        Refusal{"PointerToGradient", 0, "options.gradients = \"reduced_by_trainer\""},
        Refusal{"ReducedByTrainerToo", 0, "DistributedDataParallel"},
        Refusal{"OwnReduction", 1, "OFD-1601 parameter 'scale' is on standin:0", true},
        Refusal{"EditedByOneRank", 0, "up.weight", true},
        Refusal{"ChangedDifferently", 1, "OFD-1606 ranks 0 and 1 change \"up.weight\"", true},
        Refusal{"ReadAmidBackward", 0, "while backward runs", true}),
    [](const auto& info) { return info.param.Job(); });

TEST(RanksTest, OneThatIsKilledIsAnErrorOfTheOthersWhoseDevicesReachIts) {
  const std::string job = "KilledInTheThirdStepOnDevicePeers";
  EXPECT_EQ(RunRanks("KilledInTheThirdStep", 3, "fp32", job), (std::vector<int>{1, -SIGKILL, 1}));
  for (const int rank : {0, 2}) {
    std::stringstream said;
    said << std::ifstream(PathOf(job, rank) + ".failure").rdbuf();
    EXPECT_NE(said.str().find("OFD-1803 rank 1"), std::string::npos) << said.str();
  }
}

TEST(RanksTrainerStateTest, IsOfEachRankAndEmptyForNewOnes) {
  EXPECT_EQ(RunRanks("KeepsTrainerState", 2, "fp32", "state"), std::vector<int>(2, 0));
  EXPECT_EQ(RunRanks("FindsTrainerState", 3, "fp32", "state"), std::vector<int>(3, 0));
}

TEST(RanksBuffersTest, GoOnWithAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 1}) {
    EXPECT_EQ(RunRanks("CountInBuffers", ranks, "fp32", "buffers"), std::vector<int>(ranks, 0))
        << ranks << " ranks";
  }
}

TEST(RanksOwnOptimizerTest, GoesOnWithWhatItKeepsInAnyNumberOfRanks) {
  for (const int ranks : {2, 4, 1, 2}) {
    EXPECT_EQ(RunRanks("GoOnWithAverages", ranks, "fp32", "averages"), std::vector<int>(ranks, 0))
        << ranks << " ranks";
  }
}

TEST(RanksBuffersTest, ThatAJobDoesNotKnowAndThatDoNotFitAreNoPartOfIt) {
  for (const int ranks : {2, 2, 1}) {
    EXPECT_EQ(RunRanks("GetALargeBuffer", ranks, "fp32", "late-buffer"), std::vector<int>(ranks, 0))
        << ranks << " ranks";
  }
}

}  // namespace

// Torch asks for the devices that there are before its first backward, wherever that is.
void ShowDevice() { NewDevice(/*is_late=*/false); }

void BeginLauncher() { StartLauncher(); }

}  // namespace offload

int main(int argc, char** argv) {
  offload::BeginLauncher();
  ::testing::InitGoogleTest(&argc, argv);
  offload::ShowDevice();
  return RUN_ALL_TESTS();
}

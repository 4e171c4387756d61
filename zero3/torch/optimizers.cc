#include "zero3/torch/optimizers.h"

#include <ATen/core/grad_mode.h>

#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

[[noreturn]] void Unsupported(std::string_view what) {
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer, what));
}

void Require(bool condition, std::string_view name, double value) {
  if (condition) return;
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("optimizer option ", std::string(name), " is ", value)));
}

class OffloadOptimizer : public torch::optim::Optimizer {
 public:
  torch::Tensor step(LossClosure closure) override {
    const at::NoGradGuard no_grad;
    torch::Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    std::vector<GroupUpdate> updates;
    for (const OptimizerParamGroup& group : param_groups())
      updates.push_back({GroupOf(group.options()), group.params()});
    engine_->Step(updates);
    return loss;
  }

  void save(torch::serialize::OutputArchive&) const override { Refuse(); }
  void load(torch::serialize::InputArchive&) override { Refuse(); }

 protected:
  OffloadOptimizer(std::shared_ptr<TensorEngine> engine,
                   const std::vector<OptimizerParamGroup>& groups,
                   std::unique_ptr<OptimizerOptions> defaults)
      : Optimizer(groups, std::move(defaults)), engine_(std::move(engine)) {}

  virtual client::Group GroupOf(const OptimizerOptions& options) const = 0;
  const std::shared_ptr<TensorEngine> engine_;

 private:
  [[noreturn]] static void Refuse() {
    ThrowStatus(
        MakeError(ErrorId::kUnsupportedOptimizer,
                  "the optimizer's state is in the store of the job and is not saved or loaded",
                  "Start the program again with the same job: it continues at the last step"));
  }
};

class OffloadAdamW final : public OffloadOptimizer {
 public:
  OffloadAdamW(std::shared_ptr<TensorEngine> engine,
               const std::vector<OptimizerParamGroup>& groups, const AdamWOptions& defaults,
               AdamWFlavour flavour)
      : OffloadOptimizer(std::move(engine), groups, std::make_unique<AdamWOptions>(defaults)),
        flavour_(flavour) {}

 private:
  client::Group GroupOf(const OptimizerOptions& any) const override {
    const auto& options = static_cast<const AdamWOptions&>(any);
    CheckOptions(options);
    client::Group group;
    group.is_adamw = true;
    group.adamw = {.lr = options.lr(),
                   .beta1 = std::get<0>(options.betas()),
                   .beta2 = std::get<1>(options.betas()),
                   .eps = options.eps(),
                   .weight_decay = options.weight_decay(),
                   .flavour = static_cast<uint32_t>(flavour_)};
    return group;
  }

  const AdamWFlavour flavour_;
};

class OffloadSgd final : public OffloadOptimizer {
 public:
  OffloadSgd(std::shared_ptr<TensorEngine> engine, const std::vector<OptimizerParamGroup>& groups,
             const SGDOptions& defaults)
      : OffloadOptimizer(std::move(engine), groups, std::make_unique<SGDOptions>(defaults)) {}

 private:
  client::Group GroupOf(const OptimizerOptions& any) const override {
    const auto& options = static_cast<const SGDOptions&>(any);
    CheckOptions(options);
    if (options.momentum() != 0 && engine_->optimizer_state() == proto::OptimizerState::kNone) {
      Unsupported(absl::StrCat("momentum ", options.momentum(),
                               " for a job that was made without momentum"));
    }
    client::Group group;
    group.is_adamw = false;
    group.sgd = {.lr = options.lr(),
                 .momentum = options.momentum(),
                 .dampening = options.dampening(),
                 .weight_decay = options.weight_decay(),
                 .nesterov = options.nesterov()};
    return group;
  }
};

// torch allows a tensor in one place only, and says so less clearly.
void CheckGroups(const std::vector<OptimizerParamGroup>& groups) {
  std::unordered_set<const void*> seen;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        ThrowStatus(MakeError(ErrorId::kBadValue,
                              "a parameter is in two places of the optimizer's groups"));
      }
    }
  }
}

}  // namespace

void CheckOptions(const AdamWOptions& options) {
  if (options.amsgrad()) Unsupported("AdamW option amsgrad is on");
  Require(options.lr() >= 0, "lr", options.lr());
  Require(options.eps() >= 0, "eps", options.eps());
  Require(options.weight_decay() >= 0, "weight_decay", options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  Require(beta1 >= 0 && beta1 < 1, "beta1", beta1);
  Require(beta2 >= 0 && beta2 < 1, "beta2", beta2);
}

void CheckOptions(const SGDOptions& options) {
  Require(options.lr() >= 0, "lr", options.lr());
  Require(options.momentum() >= 0, "momentum", options.momentum());
  Require(options.weight_decay() >= 0, "weight_decay", options.weight_decay());
  Require(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
          "nesterov with dampening", options.dampening());
}

std::unique_ptr<torch::optim::Optimizer> MakeAdamW(std::shared_ptr<TensorEngine> engine,
                                                   std::vector<OptimizerParamGroup> groups,
                                                   const AdamWOptions& defaults,
                                                   AdamWFlavour flavour) {
  CheckGroups(groups);
  return std::make_unique<OffloadAdamW>(std::move(engine), groups, defaults, flavour);
}

std::unique_ptr<torch::optim::Optimizer> MakeSgd(std::shared_ptr<TensorEngine> engine,
                                                 std::vector<OptimizerParamGroup> groups,
                                                 const SGDOptions& defaults) {
  CheckGroups(groups);
  return std::make_unique<OffloadSgd>(std::move(engine), groups, defaults);
}

}  // namespace offload::zero3

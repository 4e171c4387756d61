#include "zero3/torch/module_engine.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/optimizers.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// ---- Modules and their optimizers --------------------------------------------------------------

std::vector<NamedTensor> ModuleList::Names(const torch::nn::Module& module) const {
  return NamedParameters(module, count_ == 0 ? "" : absl::StrCat(count_, "/"));
}

int ModuleList::NumberOf(std::string_view name) {
  const size_t slash = name.find('/');
  int number = 0;
  if (slash == std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(name.data(), slash), &number))
    return 0;
  return number;
}

ParameterGroups ModuleList::FreeParameters(const torch::nn::Module& module) const {
  std::vector<at::Tensor> parameters;
  std::unordered_set<const void*> seen = claimed_;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      parameters.push_back(parameter);
  }
  if (parameters.empty() && !claimed_.empty()) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                          "every parameter of the module has an optimizer already",
                          "Give each optimizer a module, or explicit groups, of its own"));
  }
  ParameterGroups groups;
  groups.emplace_back(std::move(parameters));
  return groups;
}

void ModuleList::CheckFree(const ParameterGroups& groups) const {
  std::unordered_set<const void*> seen;
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      const void* const impl = parameter.unsafeGetTensorImpl();
      const bool twice = !seen.insert(impl).second;
      if (!twice && !claimed_.contains(impl)) continue;
      ThrowStatus(MakeError(
          ErrorId::kBadValue,
          absl::StrCat("a parameter of shape [", absl::StrJoin(parameter.sizes(), ", "), "] is in ",
                       twice ? "two places of the optimizer's groups"
                             : "the groups of an optimizer, but another one has it already"),
          "Name every parameter once, in the groups of one optimizer"));
    }
  }
}

void ModuleList::Claim(const ParameterGroups& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params())
      claimed_.insert(parameter.unsafeGetTensorImpl());
  }
}

// ---- The engine --------------------------------------------------------------------------------

void ModuleEngine::Attach(torch::nn::Module& module, const ParameterGroups& groups,
                          proto::OptimizerState optimizer) {
  EndConstruction();
  for (const at::Tensor& buffer : module.buffers()) LearnStorage(buffer);
  modules_.CheckFree(groups);
  modules_.Add(tensors_->Attach(modules_.Names(module), optimizer));
  modules_.Claim(groups);
}

std::unique_ptr<torch::optim::Optimizer> ModuleEngine::AdamW(torch::nn::Module& module,
                                                             torch::optim::AdamWOptions options,
                                                             AdamWFlavour flavour) {
  return AdamW(module, modules_.FreeParameters(module), std::move(options), flavour);
}

std::unique_ptr<torch::optim::Optimizer> ModuleEngine::AdamW(torch::nn::Module& module,
                                                             ParameterGroups groups,
                                                             torch::optim::AdamWOptions defaults,
                                                             AdamWFlavour flavour) {
  CheckOptions(defaults);
  Attach(module, groups, proto::OptimizerState::kAdam);
  return MakeAdamW(tensors_, std::move(groups), defaults, flavour);
}

std::unique_ptr<torch::optim::Optimizer> ModuleEngine::SGD(torch::nn::Module& module,
                                                           torch::optim::SGDOptions options) {
  CheckOptions(options);
  ParameterGroups groups = modules_.FreeParameters(module);
  Attach(module, groups,
         options.momentum() != 0 ? proto::OptimizerState::kMomentum : proto::OptimizerState::kNone);
  return MakeSgd(tensors_, std::move(groups), options);
}

}  // namespace offload::zero3

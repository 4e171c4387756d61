#include "zero3/torch/module_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/log.h"
#include "zero3/torch/optimizers.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// ---- Modules and their optimizers --------------------------------------------------------------

std::vector<NamedTensor> ModuleList::Names(const torch::nn::Module& module) const {
  std::vector<NamedTensor> names = NamedParameters(module, Prefix());
  std::erase_if(names, [](const NamedTensor& named) { return IsTable(named.tensor); });
  return names;
}

std::vector<NamedTensor> ModuleList::BufferNames(const torch::nn::Module& module) const {
  std::vector<NamedTensor> names = NamedBuffers(module, Prefix());
  for (NamedTensor& named : NamedParameters(module, Prefix())) {
    if (IsTable(named.tensor)) names.push_back(std::move(named));
  }
  return names;
}

std::string ModuleList::Prefix() const { return count_ == 0 ? "" : absl::StrCat(count_, "/"); }

int ModuleList::NumberOf(std::string_view name) {
  const size_t slash = name.find('/');
  int number = 0;
  if (slash == std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(name.data(), slash), &number))
    return 0;
  return number;
}

ParameterGroups ModuleList::LeaveToOthers(const torch::nn::Module& module,
                                          ParameterGroups groups) const {
  if (claimed_.empty() || groups.size() != 1 || groups.front().has_options()) return groups;
  const std::vector<at::Tensor>& all = groups.front().params();
  const ParameterGroups whole = OneGroup(module);
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (!std::equal(all.begin(), all.end(), whole.front().params().begin(),
                  whole.front().params().end(), is_same))
    return groups;
  std::vector<at::Tensor> free;
  for (const at::Tensor& parameter : all) {
    if (!claimed_.contains(parameter.unsafeGetTensorImpl())) free.push_back(parameter);
  }
  if (free.empty()) {
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedOptimizer, "every parameter of the module has an optimizer already",
        "Give each optimizer a module, or explicit groups, of its own. To go on with another one, "
        "close the engine with weights_at_close = memory and open a new job"));
  }
  ParameterGroups left;
  left.emplace_back(std::move(free));
  return left;
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
          "Name every parameter once, in the groups of one optimizer. To go on with another one, "
          "close the engine with weights_at_close = memory and open a new job"));
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
                          const kernels::OptimizerSpec& optimizer) {
  EndConstruction();
  for (const at::Tensor& buffer : module.buffers()) LearnStorage(buffer);
  modules_.CheckFree(groups);
  const std::vector<NamedTensor> names = modules_.Names(module);
  const std::vector<NamedTensor> buffers = modules_.BufferNames(module);
  CheckSupported(names, Memory::kOfTorch);
  Buffers::CheckSupported(buffers);
  const bool has_new = tensors_->Attach(names, optimizer);
  tensors_->AttachBuffers(buffers);
  modules_.Add(has_new);
  modules_.Claim(groups);
}

void ModuleEngine::AttachForeign(torch::nn::Module& module, ParameterGroups groups,
                                 const std::string& optimizer) {
  if (tensors_->step() > 0) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                          absl::StrCat("the job is at step ", tensors_->step(), ", but what ",
                                       optimizer, " keeps is in memory and is not part of it"),
                          "Begin a new job, with SetInitialWeights() from saved weights, or use "
                          "AdamW, Adam, SGD, Adagrad or RMSprop of torch::optim"));
  }
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.device().is_cpu()) continue;
    ThrowStatus(
        MakeError(ErrorId::kUnsupportedOptimizer,
                  absl::StrCat(optimizer, " runs in this process, on ", parameter.device().str(),
                               ", where only the daemon's optimizers are served"),
                  "Use AdamW, Adam, SGD, Adagrad or RMSprop of torch::optim, or move the "
                  "module to the host"));
  }
  Attach(module, groups, kernels::OptimizerSpec("sgd", {}));
  Log().info(
      "{} runs in this process, weight by weight; what it keeps is in memory and is not part "
      "of the job, which cannot be resumed",
      optimizer);
}

void ModuleEngine::CheckHas(const torch::nn::Module& module, const ParameterGroups& groups) const {
  std::unordered_set<const void*> known;
  for (const at::Tensor& parameter : module.parameters())
    known.insert(parameter.unsafeGetTensorImpl());
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (known.contains(parameter.unsafeGetTensorImpl()) || tensors_->Has(parameter)) continue;
      ThrowStatus(MakeError(
          ErrorId::kUnsupportedModel,
          absl::StrCat("the optimizer has a parameter of shape [",
                       absl::StrJoin(parameter.sizes(), ", "), "] that the module has not"),
          "Attach a module that holds all that the optimizer trains: register_parameter() or "
          "register_module() before"));
    }
  }
}

std::unique_ptr<torch::optim::Optimizer> ModuleEngine::MakeOptimizer(torch::nn::Module& module,
                                                                     ParameterGroups groups,
                                                                     NamedOptimizer&& optimizer) {
  groups = modules_.LeaveToOthers(module, std::move(groups));
  CheckHas(module, groups);
  Attach(module, groups, SpecOfAll(optimizer, groups));
  return MakeOffloadOptimizer(tensors_, std::move(groups), std::move(optimizer));
}

}  // namespace offload::zero3

#include "zero3/torch/sparse_update.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <string>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using at::Tensor;
using kernels::OptimizerSpec;

std::string Subject(const Tensor& parameter, std::string_view name) {
  return name.empty() ? absl::StrCat("the gradient of a parameter of shape [",
                                     absl::StrJoin(parameter.sizes(), ", "), "]")
                      : absl::StrCat("the gradient of parameter '", std::string(name), "'");
}

// torch::optim::Adagrad::step.
void AddAdagrad(const OptimizerSpec& optimizer, const Tensor& given, Tensor& weight,
                KeptState& state) {
  Tensor& sum = state.planes[0];
  const double rate = optimizer.Get("lr") /
                      (1 + static_cast<double>(state.update_count) * optimizer.Get("lr_decay"));
  if (state.update_count++ == 0 || !sum.defined())
    sum = at::full_like(weight, optimizer.Get("initial_accumulator_value"));
  const Tensor gradient = given.coalesce();
  const Tensor indices = gradient._indices(), values = gradient._values();
  const auto sparse = [&](const Tensor& of) {
    if (indices.dim() == 0 || of.dim() == 0)
      return at::empty({0}, gradient.options()).resize_as_(gradient);
    return at::sparse_coo_tensor(indices, of, gradient.sizes(), gradient.options());
  };
  sum.add_(sparse(values.pow(2)));
  const Tensor roots = sum.sparse_mask(gradient)._values().sqrt_().add_(optimizer.Get("eps"));
  weight.add_(sparse(values.div(roots)), -rate);
}

}  // namespace

bool IsSparseUpdate(const OptimizerSpec& optimizer, const Tensor& parameter,
                    std::string_view name) {
  const Tensor& gradient = parameter.grad();
  const bool is_sgd = optimizer.name() == "sgd", is_adagrad = optimizer.name() == "adagrad";
  if (!gradient.is_sparse() || (!is_sgd && !is_adagrad) ||
      parameter.scalar_type() != MasterType(parameter))
    return false;
  const bool keeps = is_sgd && optimizer.Get("momentum") != 0;
  if (keeps || optimizer.Get("weight_decay") != 0) {
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedOptimizer,
        absl::StrCat(Subject(parameter, name), " is sparse, and ", std::string(optimizer.name()),
                     keeps ? " with momentum keeps a sparse buffer of it in torch, whose elements "
                             "are added one by one"
                           : " with weight_decay takes no sparse gradient in torch"),
        keeps
            ? "Give it sparse = false, or the parameter a group without momentum; or let a "
              "torch::nn::Embedding or EmbeddingBag of the attached module with sparse(true) have "
              "the parameter (one rank): the optimizer then runs in this process"
            : "Give the embedding sparse(false), or its parameters a group without weight_decay"));
  }
  return true;
}

bool HasSparseMomentum(const torch::nn::Module& module,
                       const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const torch::optim::SGDOptions& defaults) {
  std::unordered_set<const void*> sparse;
  const auto add = [&](const auto& embedding) {
    const Tensor& weight = embedding.weight;
    if (embedding.options.sparse() && weight.defined() && weight.requires_grad() &&
        weight.scalar_type() == MasterType(weight))
      sparse.insert(weight.unsafeGetTensorImpl());
  };
  const auto look = [&](const torch::nn::Module& part) {
    if (const auto* const one = part.as<torch::nn::EmbeddingImpl>()) add(*one);
    if (const auto* const bag = part.as<torch::nn::EmbeddingBagImpl>()) add(*bag);
  };
  look(module);
  // Itself may be on the stack.
  for (const auto& part : module.modules(/*include_self=*/false)) look(*part);
  const auto keeps = [&](const torch::optim::OptimizerParamGroup& group) {
    const auto* const own = group.has_options()
                                ? dynamic_cast<const torch::optim::SGDOptions*>(&group.options())
                                : nullptr;
    return (own != nullptr ? *own : defaults).momentum() != 0 &&
           std::any_of(group.params().begin(), group.params().end(), [&](const Tensor& tensor) {
             return sparse.contains(tensor.unsafeGetTensorImpl());
           });
  };
  return !sparse.empty() && std::any_of(groups.begin(), groups.end(), keeps);
}

void AddSparsely(const OptimizerSpec& optimizer, const Tensor& gradient, Tensor& weight,
                 KeptState& state) {
  const at::NoGradGuard no_grad;
  const Tensor given = gradient.detach();
  const bool is_adagrad = optimizer.name() == "adagrad";
  const Tensor descent = optimizer.Get("maximize") != 0 ? given.neg() : given;
  if (is_adagrad) return AddAdagrad(optimizer, descent, weight, state);
  weight.add_(descent, -optimizer.Get("lr"));
}

}  // namespace offload::zero3

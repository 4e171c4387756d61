#include "zero3/torch/sparse_update.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <string>

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
            ? "Give the embedding sparse(false), or its parameters a group without momentum; or "
              "attach an object of torch::optim::SGD with a module of torch::nn::Embedding, which "
              "then runs in this process"
            : "Give the embedding sparse(false), or its parameters a group without weight_decay"));
  }
  return true;
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

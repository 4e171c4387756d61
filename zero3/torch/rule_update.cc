#include "zero3/torch/rule_update.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/update.h"
#include "zero3/torch/square_roots.h"

namespace offload::zero3 {
namespace {

using at::Tensor;
using kernels::Norms;
using kernels::OptimizerSpec;
using kernels::Run;

// Dense memory of the host, with the order of the tensor's own where it has one.
Tensor Dense(const Tensor& tensor) {
  const Tensor host = tensor.cpu();
  return host.is_non_overlapping_and_dense() ? host : host.contiguous();
}

// The elements in the order of `like`: the tensor itself, or a copy.
Tensor InOrderOf(const Tensor& like, const Tensor& tensor) {
  if (tensor.is_cpu() && tensor.strides() == like.strides()) return tensor.resolve_neg();
  return at::empty_strided(like.sizes(), like.strides(), tensor.options().device(at::kCPU))
      .copy_(tensor);
}

// Blocks of one tensor, which do not depend on each other.
void ForEachBlock(const Run& whole, absl::FunctionRef<void(int64_t block, const Run& run)> work) {
  constexpr uint64_t kBlock = Norms::kBlockElements;
  const auto blocks = static_cast<int64_t>((whole.count + kBlock - 1) / kBlock);
  const uint64_t element_bytes = whole.weight_dtype == kernels::Dtype::kFloat64 ? 8 : 4;
  at::parallel_for(0, blocks, /*grain_size=*/1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      Run run = whole;
      run.begin = block * kBlock;
      run.count = std::min(whole.count - run.begin, kBlock);
      run.weight = static_cast<char*>(whole.weight) + run.begin * element_bytes;
      run.gradient = static_cast<const char*>(whole.gradient) + run.begin * element_bytes;
      for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
        if (run.state[i] != nullptr) run.state[i] += run.begin;
        if (run.double_state[i] != nullptr) run.double_state[i] += run.begin;
      }
      work(block, run);
    }
  });
}

}  // namespace

void UpdateByRule(const OptimizerSpec& optimizer, int64_t step, const Tensor& gradient,
                  Tensor& master, std::span<Tensor> planes) {
  const bool is_double = master.scalar_type() == at::kDouble;
  const Tensor weights = Dense(master), gradients = InOrderOf(weights, gradient);
  std::vector<Tensor> states(planes.size());
  Run run;
  run.count = run.tensor_count = weights.numel();
  run.weight_dtype = is_double ? kernels::Dtype::kFloat64 : kernels::Dtype::kFloat32;
  run.gradient_dtype = run.weight_dtype;
  run.weight = weights.mutable_data_ptr();
  run.gradient = gradients.const_data_ptr();
  if (!is_double && optimizer.TakesLibraryRoots()) run.roots = TorchSquareRoots().corrections();
  for (size_t i = 0; i < planes.size(); ++i) {
    if (optimizer.Plane(i) == nullptr) continue;
    states[i] = InOrderOf(weights, planes[i]);
    if (is_double) {
      run.double_state[i] = states[i].mutable_data_ptr<double>();
    } else {
      run.state[i] = states[i].mutable_data_ptr<float>();
    }
  }
  if (kernels::NeedsNorms(optimizer)) {
    std::vector<Norms> norms(run.count / Norms::kBlockElements + 1);
    ForEachBlock(run, [&](int64_t block, const Run& part) {
      kernels::AddNorms(optimizer, step, part, &norms[block]);
    });
    run.trust_ratio = kernels::TrustRatio(norms);
  }
  ForEachBlock(run, [&](int64_t, const Run& part) { kernels::Update(optimizer, step, part); });
  if (!weights.is_alias_of(master)) master.copy_(weights);
  for (size_t i = 0; i < planes.size(); ++i) {
    if (states[i].defined() && !states[i].is_alias_of(planes[i])) planes[i].copy_(states[i]);
  }
}

}  // namespace offload::zero3

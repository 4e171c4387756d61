#include "zero3/torch/square_roots.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <optional>
#include <span>

#include "base/error.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

kernels::SquareRoots Measure() {
  const c10::InferenceMode plain;
  std::optional<kernels::SquareRoots> roots =
      kernels::SquareRoots::Measure([](std::span<float> values) {
        const auto count = static_cast<int64_t>(values.size());
        at::from_blob(values.data(), {count}, at::kFloat).sqrt_();
      });
  if (roots.has_value()) return *std::move(roots);
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                        "the square roots of this libtorch are more than one place off, or follow "
                        "no pattern: the daemon cannot take the same ones",
                        "Use SGD, or AdamW and Adam as AdamWFlavour::kFused (fused=True in "
                        "Python), whose roots are the nearest"));
}

}  // namespace

const kernels::SquareRoots& TorchSquareRoots() {
  static const kernels::SquareRoots roots = Measure();
  return roots;
}

}  // namespace offload::zero3

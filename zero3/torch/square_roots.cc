#include "zero3/torch/square_roots.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>
#include <c10/core/InferenceMode.h>

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <future>
#include <optional>
#include <random>
#include <span>
#include <vector>

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

bool MeasureDoubles() {
  constexpr int64_t kSamples = 64 * 1024;
  const c10::InferenceMode plain;
  std::mt19937_64 random(20261122);
  std::uniform_real_distribution<double> one_to_four(1, 4);
  std::vector<double> values(kSamples);
  for (double& value : values) value = one_to_four(random);
  std::vector<double> roots = values;
  at::from_blob(roots.data(), {kSamples}, at::kDouble).sqrt_();
  for (size_t i = 0; i < values.size(); ++i) {
    if (roots[i] != std::sqrt(values[i])) return false;
  }
  return true;
}

// On a thread of its own: torch settles a thread's number of threads with the first operation that
// is large enough, and products before it are computed with another one. On the trainer's thread
// that would change the bits of what follows. It begins with the arithmetic of the trainer's
// thread, which may flush denormal numbers or trap: the daemon's has neither.
template <typename Result>
Result OnOwnThread(Result (*measure)()) {
  return std::async(std::launch::async,
                    [measure] {
                      std::fesetenv(FE_DFL_ENV);
                      return measure();
                    })
      .get();
}

}  // namespace

const kernels::SquareRoots& TorchSquareRoots() {
  static const kernels::SquareRoots roots = OnOwnThread(&Measure);
  return roots;
}

bool TorchDoubleRootsAreNearest() {
  static const bool are_nearest = OnOwnThread(&MeasureDoubles);
  return are_nearest;
}

}  // namespace offload::zero3

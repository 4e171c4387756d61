#include "kernels/average.h"

#include <algorithm>

#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

constexpr size_t kPiece = 2048;

// Masters that are kept as a weight and what it leaves, piece by piece.
void MoveBehindSplit(const Implementation& implementation, const AverageStep& step,
                     const AverageRun& run) {
  alignas(64) float master[kPiece];
  TieReader ties = run.ties;
  for (size_t begin = 0; begin < run.count; begin += kPiece) {
    const size_t count = std::min(kPiece, run.count - begin);
    if (run.weight_dtype == Dtype::kBFloat16) {
      implementation.merge(static_cast<const uint16_t*>(run.weight) + begin, run.residual + begin,
                           count, reinterpret_cast<uint32_t*>(master), &ties);
    } else {
      implementation.merge_half(static_cast<const Half*>(run.weight) + begin,
                                run.half_residual + begin, count, master);
    }
    implementation.move_average(step, master, count, static_cast<float*>(run.average) + begin);
  }
}

}  // namespace

void MoveAverage(Isa isa, const AverageStep& step, const AverageRun& run) {
  if (step.kind == AverageStep::Kind::kKeep) return;
  const Implementation& implementation = ImplementationOf(isa);
  switch (run.weight_dtype) {
    case Dtype::kFloat32:
      return implementation.move_average(step, static_cast<const float*>(run.weight), run.count,
                                         static_cast<float*>(run.average));
    case Dtype::kFloat64:
      return implementation.move_double_average(step, static_cast<const double*>(run.weight),
                                                run.count, static_cast<double*>(run.average));
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
      return MoveBehindSplit(implementation, step, run);
  }
}

void MoveAverage(const AverageStep& step, const AverageRun& run) {
  MoveAverage(BestIsa(), step, run);
}

}  // namespace offload::kernels

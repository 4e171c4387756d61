#include "zero3/zero_stages.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kUnlimitedRam = uint64_t{1} << 60;

// Stage 1 divides the state, 2 gradients, too, and 3 weights, too.
uint64_t UnsharedBytes(const PlanInput& input, int stage) {
  uint64_t weights = 0, gradients = 0, state = 0;
  for (const proto::StoreTensor& tensor : input.catalogue.store_tensors) {
    const uint64_t bytes = tensor.element_count * proto::DtypeBytes(tensor.dtype);
    weights += bytes;
    if (!tensor.trainable) continue;
    gradients += bytes;
    for (const proto::Plane plane : proto::kUpdateOnlyPlanes)
      state += tensor.planes.Bytes(plane, tensor.element_count);
  }
  const uint64_t ranks = input.world_size;
  const auto copies = [&](int divided_from) { return stage >= divided_from ? 1 : ranks; };
  return copies(3) * weights + copies(2) * gradients + copies(1) * state;
}

}  // namespace

std::array<StageCost, kZeroStageMax + 1> CompareStages(const PlanInput& input) {
  std::array<StageCost, kZeroStageMax + 1> costs;
  for (int stage = 0; stage <= kZeroStageMax; ++stage) {
    StageCost& cost = costs[static_cast<size_t>(stage)];
    cost.stage = stage;
    cost.unshared_bytes = UnsharedBytes(input, stage);
    PlanInput staged = input;
    staged.policy.stage = stage;
    if (const auto plan = MakePlan(staged); plan.ok()) {
      const auto parameters = static_cast<double>(plan->parameter_count);
      cost.planned_bytes = plan->total_bytes;
      cost.read_bytes = plan->read_bytes_per_parameter * parameters;
      cost.written_bytes = plan->write_bytes_per_parameter * parameters;
    }
    staged.ram_bytes = kUnlimitedRam;
    if (const auto plan = MakePlan(staged); plan.ok()) cost.whole_bytes = plan->total_bytes;
  }
  return costs;
}

std::string DescribeStages(const PlanInput& input) {
  std::string text = absl::StrCat("ZeRO stages, ", input.world_size, " ranks of one node:\n");
  absl::StrAppendFormat(&text, "  %5s  %14s  %14s  %14s  %s\n", "stage", "each its own",
                        "here, at most", "of this ram", "read and written per step");
  for (const StageCost& cost : CompareStages(input)) {
    absl::StrAppendFormat(&text, "  %5d  %14s  %14s  ", cost.stage,
                          FormatBytes(cost.unshared_bytes), FormatBytes(cost.whole_bytes));
    if (cost.planned_bytes == 0) {
      absl::StrAppendFormat(&text, "%14s\n", "too small");
      continue;
    }
    absl::StrAppendFormat(&text, "%14s  %s, %s\n", FormatBytes(cost.planned_bytes),
                          FormatDecimalBytes(static_cast<uint64_t>(cost.read_bytes)),
                          FormatDecimalBytes(static_cast<uint64_t>(cost.written_bytes)));
  }
  return text;
}

}  // namespace offload::zero3

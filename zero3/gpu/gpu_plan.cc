#include "zero3/gpu/gpu_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kLargestWeights = 3, kLargestGradients = 2;
constexpr uint64_t kPartOfRestForGradients = 4;  // a quarter

struct Sum {
  uint64_t all_bytes = 0, largest_bytes = 0;

  void Add(uint64_t size_bytes) {
    all_bytes += DeviceBytes(size_bytes);
    largest_bytes = std::max(largest_bytes, DeviceBytes(size_bytes));
  }
  uint64_t AtLeast(uint64_t count) const { return std::min(all_bytes, count * largest_bytes); }
};

// A tensor's weight leaves the window for the tier, whose gradient has its room already.
void ChooseTier(std::span<const GpuTensor> tensors, uint64_t gpu_ram_bytes, uint64_t table_bytes,
                GpuPlan& plan) {
  // The window that is left has a place, also when nothing passes through it.
  const uint64_t taken_bytes =
      plan.window_bytes + plan.gradient_bytes + table_bytes + kDeviceAlignment;
  if (plan.state_bytes == 0 || taken_bytes > gpu_ram_bytes) return;
  uint64_t left_bytes = gpu_ram_bytes - taken_bytes;
  std::vector<bool> stays;
  for (const GpuTensor& tensor : tensors) {
    stays.push_back(tensor.state_bytes > 0 && tensor.state_bytes <= left_bytes);
    if (!stays.back()) continue;
    left_bytes -= tensor.state_bytes;
    plan.tier_state_bytes += tensor.state_bytes;
    plan.tier_weight_bytes += DeviceBytes(tensor.weight_bytes);
  }
  if (plan.tier_state_bytes == 0) return;
  plan.stays = std::move(stays);
  plan.tier_state_bytes += table_bytes;
  plan.window_bytes =
      std::max(plan.window_bytes - plan.tier_weight_bytes, uint64_t{kDeviceAlignment});
  plan.lookahead_bytes = plan.window_bytes;
}

}  // namespace

absl::StatusOr<GpuPlan> MakeGpuPlan(std::span<const GpuTensor> tensors, uint64_t gpu_ram_bytes,
                                    uint64_t table_bytes) {
  Sum weights, gradients;
  for (const GpuTensor& tensor : tensors) {
    weights.Add(tensor.weight_bytes);
    gradients.Add(tensor.gradient_bytes);
  }
  GpuPlan plan;
  for (const GpuTensor& tensor : tensors) plan.state_bytes += tensor.state_bytes;
  plan.weight_bytes = weights.all_bytes;
  plan.window_bytes = weights.AtLeast(kLargestWeights);
  plan.gradient_bytes = gradients.AtLeast(kLargestGradients);
  plan.floor_bytes = plan.window_bytes + plan.gradient_bytes;
  if (gpu_ram_bytes < plan.floor_bytes) {
    return MakeError(
        ErrorId::kGpuMemory,
        absl::StrCat("gpu_ram is ", FormatBytes(gpu_ram_bytes), ", and it takes ",
                     FormatBytes(plan.floor_bytes), ": ", FormatBytes(plan.window_bytes),
                     " for a window of weights (the largest has ",
                     FormatBytes(weights.largest_bytes), ") and ", FormatBytes(plan.gradient_bytes),
                     " for gradients on their way"),
        absl::StrCat("Set gpu_ram to ", plan.floor_bytes, " bytes or more"));
  }
  const uint64_t rest_bytes = gpu_ram_bytes - plan.floor_bytes;
  plan.gradient_bytes +=
      std::min(gradients.all_bytes - plan.gradient_bytes, rest_bytes / kPartOfRestForGradients);
  plan.window_bytes = std::min(weights.all_bytes, (gpu_ram_bytes - plan.gradient_bytes) /
                                                      kDeviceAlignment * kDeviceAlignment);
  // What weights leave over is for gradients.
  if (plan.window_bytes == weights.all_bytes)
    plan.gradient_bytes = std::min(gradients.all_bytes, gpu_ram_bytes - plan.window_bytes);
  plan.lookahead_bytes = plan.window_bytes == weights.all_bytes
                             ? plan.window_bytes
                             : plan.window_bytes - 2 * weights.largest_bytes;
  const bool holds_all =
      plan.window_bytes == weights.all_bytes && plan.gradient_bytes == gradients.all_bytes;
  if (holds_all) ChooseTier(tensors, gpu_ram_bytes, table_bytes, plan);
  return plan;
}

std::string DescribeGpuPlan(const GpuPlan& plan, uint64_t gpu_ram_bytes,
                            std::string_view why_no_tier) {
  std::string text =
      absl::StrCat("gpu_ram: ", FormatBytes(gpu_ram_bytes), ", window of weights ",
                   FormatBytes(plan.window_bytes), " of ", FormatBytes(plan.weight_bytes),
                   ", gradients on their way ", FormatBytes(plan.gradient_bytes),
                   "; least that trains: ", FormatBytes(plan.floor_bytes), "\n");
  if (!plan.stays.empty()) {
    absl::StrAppend(
        &text, "updated on the device: ", std::count(plan.stays.begin(), plan.stays.end(), true),
        " tensors, ", FormatBytes(plan.tier_weight_bytes), " of weights with ",
        FormatBytes(plan.tier_state_bytes),
        " of optimizer state; put into the job at checkpoints\n");
  } else if (plan.state_bytes > 0) {
    absl::StrAppend(&text, "updated on the device: nothing, since gpu_ram has no room for ",
                    "optimizer state beside all weights and gradients\n");
  } else if (!why_no_tier.empty()) {
    absl::StrAppend(&text, "updated on the device: nothing, since ", ToAbsl(why_no_tier), "\n");
  }
  return text;
}

}  // namespace offload::zero3

#include "zero3/gpu/gpu_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"

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

}  // namespace

absl::StatusOr<GpuPlan> MakeGpuPlan(std::span<const GpuTensor> tensors, uint64_t gpu_ram_bytes) {
  Sum weights, gradients;
  for (const GpuTensor& tensor : tensors) {
    weights.Add(tensor.weight_bytes);
    gradients.Add(tensor.gradient_bytes);
  }
  GpuPlan plan;
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
  return plan;
}

std::string DescribeGpuPlan(const GpuPlan& plan, uint64_t gpu_ram_bytes) {
  return absl::StrCat("gpu_ram: ", FormatBytes(gpu_ram_bytes), ", window of weights ",
                      FormatBytes(plan.window_bytes), " of ", FormatBytes(plan.weight_bytes),
                      ", gradients on their way ", FormatBytes(plan.gradient_bytes),
                      "; least that trains: ", FormatBytes(plan.floor_bytes), "\n");
}

}  // namespace offload::zero3

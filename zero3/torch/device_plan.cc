#include "zero3/torch/device_plan.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "kernels/device_update.h"
#include "zero3/torch/device_move.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/square_roots.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// The other half is for activations and torch's own buffers.
constexpr uint64_t kPartOfFree = 2;

std::optional<uint64_t> ParseGpuRam(const std::string& gpu_ram) {
  if (gpu_ram == "auto") return std::nullopt;
  return ValueOrThrow(ParseByteSize(gpu_ram), "gpu_ram");
}

uint64_t AllBytes(std::span<const GpuTensor> tensors, uint64_t table_bytes) {
  uint64_t size_bytes = 0, state_bytes = 0;
  for (const GpuTensor& tensor : tensors) {
    size_bytes += DeviceBytes(tensor.weight_bytes) + DeviceBytes(tensor.gradient_bytes);
    state_bytes += tensor.state_bytes;
  }
  if (state_bytes == 0) return size_bytes;
  return size_bytes + state_bytes + table_bytes + kDeviceAlignment;  // and a window of its own
}

// What all updates share: sums of squares, or the roots of torch's library. Which of an optimizer's
// updates take those its groups say at each step.
uint64_t SharedBytes(const kernels::OptimizerSpec& optimizer, const proto::Catalogue& catalogue) {
  if (kernels::NeedsNorms(optimizer)) {
    uint64_t count = 0;
    for (const proto::Tensor& tensor : catalogue.tensors)
      count = std::max(count, tensor.element_count);
    return DeviceBytes(kernels::NormBytes(count));
  }
  const bool may_take =
      optimizer.row().takes_library_roots != nullptr && !TorchSquareRoots().AreNearest();
  return may_take ? DeviceBytes(kernels::SquareRoots::kBytes) : 0;
}

}  // namespace

DevicePlan::DevicePlan(const std::string& gpu_ram, const std::string& device)
    : given_bytes_(ParseGpuRam(gpu_ram)), destination_(DestinationOf(device)) {}

void DevicePlan::Make(c10::Device device, const proto::Catalogue& catalogue,
                      const TierConditions& conditions) {
  if (device_.has_value() && *device_ != device) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                          absl::StrCat("one module of the job is on ", device_->str(),
                                       " and another on ", device.str()),
                          "Move them to one device before attaching them, or give each a job"));
  }
  device_ = device;
  if (device.is_cpu()) return;
  if (accelerator_ == nullptr) accelerator_ = ValueOrThrow(AcceleratorOf(device), device.str());
  why_no_tier_ = WhyNoTier(conditions);
  const std::vector<GpuTensor> needs = GpuTensorsOf(catalogue, conditions);
  const uint64_t table_bytes =
      why_no_tier_.empty() ? SharedBytes(conditions.optimizer, catalogue) : 0;
  FreeUnused(device);
  const accelerator::MemoryInfo memory = ValueOrThrow(accelerator_->MemGetInfo(), device.str());
  gpu_ram_bytes_ = given_bytes_.value_or(
      std::min(memory.free_bytes / kPartOfFree, AllBytes(needs, table_bytes)));
  plan_ = ValueOrThrow(MakeGpuPlan(needs, gpu_ram_bytes_, table_bytes), device.str());
}

}  // namespace offload::zero3

#include "zero3/gpu/gpu_tensors.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/device_update.h"
#include "proto/buffer_tensors.h"

namespace offload::zero3 {

std::vector<GpuTensor> GpuTensorsOf(std::span<const proto::Tensor> tensors) {
  std::vector<GpuTensor> needs;
  for (const proto::Tensor& tensor : tensors) {
    const uint64_t size_bytes = proto::IsBufferTensor(tensor.name)
                                    ? 0
                                    : tensor.element_count * proto::DtypeBytes(tensor.dtype);
    needs.push_back({size_bytes, tensor.trainable ? size_bytes : 0});
  }
  return needs;
}

std::string WhyNoTier(const TierConditions& conditions) {
  if (conditions.durability.steps <= 1)
    return "durability is not checkpoint:N with N steps, more than one";
  if (conditions.world_size > 1) return "the job has several ranks";
  if (conditions.optimizer.averaging().is_on())
    return absl::StrCat("average is ", conditions.optimizer.averaging().Text(),
                        ", which moves where the daemon updates");
  return "";
}

std::vector<GpuTensor> GpuTensorsOf(const proto::Catalogue& catalogue,
                                    const TierConditions& conditions) {
  std::vector<GpuTensor> needs = GpuTensorsOf(catalogue.tensors);
  if (!WhyNoTier(conditions).empty()) return needs;
  for (uint32_t i = 0; i < needs.size(); ++i) {
    const proto::Tensor& tensor = catalogue.tensors[i];
    const bool is_bundled = catalogue.store_tensors[catalogue.placements[i].store_tensor].bundle;
    if (needs[i].gradient_bytes == 0 || is_bundled) continue;
    needs[i].state_bytes = TierPlanesOf(catalogue.planes(i), tensor.element_count).size_bytes;
  }
  return needs;
}

TierPlanes TierPlanesOf(const proto::PlaneSet& planes, uint64_t element_count) {
  TierPlanes offsets;
  const auto take = [&](uint64_t size_bytes) {
    return std::exchange(offsets.size_bytes, offsets.size_bytes + DeviceBytes(size_bytes));
  };
  const auto take_plane = [&](proto::Plane plane) {
    return planes.Has(plane) ? std::optional(take(planes.Bytes(plane, element_count)))
                             : std::nullopt;
  };
  offsets.residual = take_plane(proto::Plane::kResidual);
  if (planes.Has(proto::Plane::kTies))
    offsets.ties = take(kernels::TieWords(element_count) * sizeof(uint32_t));
  for (size_t i = 0; i < proto::kStatePlanes.size(); ++i)
    offsets.state[i] = take_plane(proto::kStatePlanes[i]);
  if (offsets.size_bytes == 0) take(1);  // plain SGD of fp32 and fp64 weights keeps nothing
  return offsets;
}

}  // namespace offload::zero3

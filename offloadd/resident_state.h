// offloadd/resident_state.h
//
// Where the planes that only the update needs (residual, moments) stand in memory: for good in the
// slab for leading extents, or side by side in a pipeline block.
//
// Thread safety: the loop's thread only; the bytes are lent to workers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"

namespace offload::daemon {

// The planes of kUpdatedPlanes but the weight, for one extent whose state begins at `base`; those
// that the tensor has not are null. The first entry (weight) is left empty.
inline std::array<PlaneMemory, 4> StatePlanes(const proto::StoreTensor& tensor,
                                              proto::OptimizerState optimizer, uint32_t index,
                                              std::byte* base) {
  std::array<PlaneMemory, 4> planes;
  if (!tensor.trainable) return planes;
  const uint64_t elements = proto::ExtentElements(tensor.element_count, index);
  const uint64_t element_bytes[4] = {0, HasResidual(tensor) ? 2u : 0u,
                                     optimizer != proto::OptimizerState::kNone ? 4u : 0u,
                                     optimizer == proto::OptimizerState::kAdam ? 4u : 0u};
  for (int plane = 1; plane < 4; ++plane) {
    if (element_bytes[plane] == 0) continue;
    planes[plane].bytes = base;
    planes[plane].size_bytes = proto::PaddedBytes(elements * element_bytes[plane]);
    base += planes[plane].size_bytes;
  }
  return planes;
}

class ResidentState {
 public:
  explicit ResidentState(JobContext* context)
      : context_(context), loaded_(context->catalogue.store_tensors.size()) {
    for (size_t i = 0; i < loaded_.size(); ++i)
      loaded_[i].resize(context->plan.state_resident[i], false);
  }

  // True when the plan keeps the extent's state in DRAM.
  bool Has(uint32_t store_tensor, uint32_t index) const {
    return index < loaded_[store_tensor].size();
  }
  // True when its bytes are there: they are read once, at the first use.
  bool Loaded(uint32_t store_tensor, uint32_t index) const {
    return Has(store_tensor, index) && loaded_[store_tensor][index];
  }
  void SetLoaded(uint32_t store_tensor, uint32_t index) {
    if (loaded_[store_tensor][index]) return;
    loaded_[store_tensor][index] = true;
    loaded_bytes_ +=
        proto::StateBytes(context_->store_tensor(store_tensor), context_->optimizer, index);
  }
  std::array<PlaneMemory, 4> Planes(uint32_t store_tensor, uint32_t index) const {
    return StatePlanes(context_->store_tensor(store_tensor), context_->optimizer, index,
                       context_->slab + context_->layout.state_offset[store_tensor][index]);
  }
  uint64_t loaded_bytes() const { return loaded_bytes_; }

 private:
  JobContext* context_;
  std::vector<std::vector<bool>> loaded_;
  uint64_t loaded_bytes_ = 0;
};

}  // namespace offload::daemon

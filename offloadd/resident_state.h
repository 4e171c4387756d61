// offloadd/resident_state.h
//
// Where the planes that only the update needs (residual, moments) stand in memory: for good in the
// slab for leading extents, or side by side in a pipeline block.
//
// Thread safety: the loop's thread only; the bytes are lent to workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offloadd/extent_update.h"
#include "offloadd/job_context.h"

namespace offload::daemon {

// Those planes of one extent whose state begins at `base`; what the tensor has not is null, and so
// is the weight.
inline ExtentPlanes StatePlanes(const proto::StoreTensor& tensor, uint32_t index, std::byte* base) {
  ExtentPlanes planes;
  const uint64_t elements = proto::ExtentElements(tensor.element_count, index);
  for (const proto::Plane plane : proto::kUpdateOnlyPlanes) {
    if (!tensor.planes.Has(plane)) continue;
    planes[plane].bytes = base;
    planes[plane].size_bytes = proto::PaddedBytes(tensor.planes.Bytes(plane, elements));
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
    loaded_bytes_ += proto::StateBytes(context_->store_tensor(store_tensor), index);
  }
  ExtentPlanes Planes(uint32_t store_tensor, uint32_t index) const {
    return StatePlanes(context_->store_tensor(store_tensor), index,
                       context_->slab + context_->layout.state_offset[store_tensor][index]);
  }
  uint64_t loaded_bytes() const { return loaded_bytes_; }

 private:
  JobContext* context_;
  std::vector<std::vector<bool>> loaded_;
  uint64_t loaded_bytes_ = 0;
};

}  // namespace offload::daemon

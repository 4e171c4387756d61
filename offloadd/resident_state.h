// offloadd/resident_state.h
//
// Where the planes that only the update needs (residual, moments) stand in memory: for good in the
// slab for leading extents, or side by side in a pipeline block. And of which planes that stay in
// memory for good, weights too, the store has only an older state: steps inside an interval change
// those without writing them (WriteBack does, before the commit).
//
// Thread safety: the loop's thread only; the bytes are lent to workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
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
  // Store tensor and index of an extent.
  using Key = std::pair<uint32_t, uint32_t>;
  // What is newer in memory than in the store.
  struct Unwritten {
    bool weight = false, state = false;
    // With the state: what the residual's stamp is to say of its tie bits. A plane of them is
    // always written at once.
    uint64_t tie_word = 0;
    uint32_t tie_flags = 0;
    bool queued = false;  // of WriteBack: to be in the next commit
  };

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

  // ---- What is kept changes (PipelineExchange): plan and layout follow.

  // The last extent that the tensor keeps does not stay any more; returns its place. Requires that
  // the store has its state.
  std::byte* GiveUpLast(uint32_t store_tensor) {
    const auto index = static_cast<uint32_t>(loaded_[store_tensor].size() - 1);
    if (Loaded(store_tensor, index))
      loaded_bytes_ -= proto::StateBytes(context_->store_tensor(store_tensor), index);
    loaded_[store_tensor].pop_back();
    std::vector<uint64_t>& offsets = context_->layout.state_offset[store_tensor];
    std::byte* const place = context_->slab + offsets.back();
    offsets.pop_back();
    --context_->plan.state_resident[store_tensor];
    return place;
  }
  // The next extent stays from its next update on, in `place` of the slab.
  void KeepNext(uint32_t store_tensor, std::byte* place) {
    loaded_[store_tensor].push_back(false);
    context_->layout.state_offset[store_tensor].push_back(
        static_cast<uint64_t>(place - context_->slab));
    ++context_->plan.state_resident[store_tensor];
  }

  // ---- What the store does not have yet.

  // True when a step leaves the plane in memory, for a later commit to write.
  bool Leaves(uint32_t store_tensor, uint32_t index, proto::Plane plane) const {
    if (!context_->durability.has_intervals()) return false;
    return plane == proto::Plane::kWeight ? bool{context_->plan.weight_resident[store_tensor]}
                                          : Has(store_tensor, index);
  }
  // True when a step leaves all planes of the tensor in memory.
  bool LeavesAll(uint32_t store_tensor) const {
    const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
    const uint32_t last = proto::ExtentCount(tensor.element_count) - 1;
    if (!Leaves(store_tensor, last, proto::Plane::kWeight)) return false;
    return Has(store_tensor, last) || proto::StateBytes(tensor, last) == 0;
  }
  // True when only memory has what the extent's plane became.
  bool IsUnwritten(uint32_t store_tensor, uint32_t index, proto::Plane plane) const {
    const auto found = unwritten_.find({store_tensor, index});
    if (found == unwritten_.end()) return false;
    return plane == proto::Plane::kWeight ? found->second.weight : found->second.state;
  }
  bool HasUnwritten(uint32_t store_tensor) const {
    const auto found = unwritten_.lower_bound({store_tensor, 0});
    return found != unwritten_.end() && found->first.first == store_tensor;
  }
  // An update was computed that leaves some planes.
  void MarkUnwritten(const ExtentUpdate& update) {
    const bool weight = update.left[proto::Plane::kWeight];
    const bool state = HasLeftState(update);
    if (!weight && !state) return;
    Unwritten& unwritten = unwritten_[{update.store_tensor, update.index}];
    unwritten.weight |= weight;
    unwritten.state |= state;
    if (!state) return;
    unwritten.tie_word = update.ties_out.word;
    unwritten.tie_flags = update.ties_out.plane.has_value() ? swap::kFlagTiesPlane : 0;
  }
  void SetWritten(Key key) { unwritten_.erase(key); }
  std::map<Key, Unwritten>& unwritten() { return unwritten_; }

  // What tells the tie bits of an extent's residual: its word and flags are to be believed, the
  // rest only when the store has it.
  swap::Stamp TieStamp(uint32_t store_tensor, uint32_t index) const {
    swap::Stamp stamp = context_->store->stamp({store_tensor, swap::Plane::kResidual, index});
    const auto found = unwritten_.find({store_tensor, index});
    if (found == unwritten_.end() || !found->second.state) return stamp;
    stamp.word = found->second.tie_word;
    stamp.flags = found->second.tie_flags;
    return stamp;
  }

 private:
  static bool HasLeftState(const ExtentUpdate& update) {
    for (const proto::Plane plane : proto::kUpdateOnlyPlanes) {
      if (update.left[plane]) return true;
    }
    return false;
  }

  JobContext* context_;
  std::vector<std::vector<bool>> loaded_;
  uint64_t loaded_bytes_ = 0;
  std::map<Key, Unwritten> unwritten_;  // in the order of the drive
};

}  // namespace offload::daemon

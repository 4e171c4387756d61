#include "proto/plane_set.h"

namespace offload::proto {

PlaneSet::PlaneSet(Dtype dtype, bool trainable, const kernels::OptimizerSpec& optimizer)
    : master_bits_(trainable ? static_cast<uint8_t>(8 * kernels::MasterBytes(dtype)) : 0) {
  bits_[IndexOf(Plane::kWeight)] = static_cast<uint8_t>(8 * DtypeBytes(dtype));
  if (!trainable) return;
  if (dtype == Dtype::kBFloat16) {
    bits_[IndexOf(Plane::kResidual)] = 16;
    bits_[IndexOf(Plane::kTies)] = 1;
  }
  if (dtype == Dtype::kFloat16) bits_[IndexOf(Plane::kResidual)] = 32;
  for (size_t i = 0; i < kStatePlanes.size(); ++i) {
    states_[i] = optimizer.Plane(i);
    if (states_[i] != nullptr) bits_[IndexOf(kStatePlanes[i])] = master_bits_;
  }
  if (optimizer.averaging().is_on()) bits_[IndexOf(Plane::kAverage)] = master_bits_;
}

uint32_t PlaneSet::Bits(Plane plane) const {
  if (plane == Plane::kMaster) return master_bits_;
  return IndexOf(plane) < bits_.size() ? bits_[IndexOf(plane)] : 0;
}

uint32_t PlaneSet::updated_count() const {
  uint32_t count = 0;
  for (const Plane plane : kUpdatedPlanes) count += Has(plane) ? 1 : 0;
  return count;
}

const char* PlaneSet::name(Plane plane) const {
  switch (plane) {
    case Plane::kWeight:
      return "weight";
    case Plane::kResidual:
      return "residual";
    case Plane::kTies:
      return "ties";
    case Plane::kMaster:
      return "master";
    case Plane::kAverage:
      return "average";
    case Plane::kState0:
    case Plane::kState1:
    case Plane::kState2:
      break;
  }
  for (size_t i = 0; i < kStatePlanes.size(); ++i) {
    if (kStatePlanes[i] == plane && states_[i] != nullptr) return states_[i]->name;
  }
  return "state";
}

std::optional<Plane> PlaneSet::Find(std::string_view name) const {
  for (const Plane plane : {Plane::kWeight, Plane::kResidual, Plane::kMaster, Plane::kAverage}) {
    if (Has(plane) && name == this->name(plane)) return plane;
  }
  for (size_t i = 0; i < kStatePlanes.size(); ++i) {
    if (states_[i] == nullptr) continue;
    const char* const other = states_[i]->other_name;
    if (name == states_[i]->name || (other != nullptr && name == other)) return kStatePlanes[i];
  }
  return std::nullopt;
}

std::string PlaneSet::Names() const {
  std::string names = master_bits_ != 0 ? "weight, master" : "weight";
  for (const kernels::StatePlane* state : states_) {
    if (state != nullptr) names.append(", ").append(state->name);
  }
  if (Has(Plane::kAverage)) names.append(", ").append(name(Plane::kAverage));
  return names;
}

bool PlaneSet::Serves(const kernels::OptimizerSpec& optimizer) const {
  for (size_t i = 0; i < kStatePlanes.size(); ++i) {
    const kernels::StatePlane* const needed = optimizer.Plane(i);
    if (needed == nullptr) continue;
    if (states_[i] == nullptr || std::string_view(states_[i]->name) != needed->name) return false;
  }
  return true;
}

}  // namespace offload::proto

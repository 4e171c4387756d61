#include "offloadd/job_model.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "kernels/split.h"
#include "kernels/sum.h"
#include "kernels/update.h"
#include "offloadd/extent_update.h"

namespace offload::daemon {
namespace {

using proto::Dtype;
using proto::Plane;

constexpr uint64_t kOddPlace = 61;

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// To the nearest, ties to even. Of finite numbers.
uint16_t RoundToBFloat16(float value) {
  const uint32_t bits = BitsOf(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float MakeValue(uint64_t key) {
  const uint64_t mixed = SplitMix64(key);
  const float unit = static_cast<float>(mixed >> 40) * 0x1p-24f - 0.5f;
  return unit * static_cast<float>(1u << (mixed & 7)) * 0x1p-4f;
}

Bytes WeightsOf(Dtype dtype, const std::vector<float>& masters) {
  Bytes weights(masters.size() * proto::DtypeBytes(dtype));
  if (dtype == Dtype::kFloat32) {
    std::memcpy(weights.data(), masters.data(), weights.size());
    return weights;
  }
  auto* const rounded = reinterpret_cast<uint16_t*>(weights.data());
  for (size_t i = 0; i < masters.size(); ++i) rounded[i] = RoundToBFloat16(masters[i]);
  return weights;
}

kernels::Run RunOver(std::vector<float>& masters,
                     std::array<std::vector<float>, kernels::kStatePlanesMax>& states, Dtype dtype,
                     const Bytes& gradient, float gradient_scale) {
  kernels::Run run;
  run.count = run.tensor_count = masters.size();
  run.weight = masters.data();
  for (size_t i = 0; i < states.size(); ++i) run.state[i] = states[i].data();
  run.gradient_dtype = dtype;
  run.gradient = gradient.data();
  run.gradient_scale = gradient_scale;
  return run;
}

// Of a whole tensor, block by block.
double TrustRatioOf(const kernels::OptimizerSpec& optimizer, int64_t step, const kernels::Run& run,
                    Dtype dtype) {
  std::vector<kernels::Norms> blocks;
  for (uint64_t begin = 0; begin < run.count; begin += kernels::Norms::kBlockElements) {
    kernels::Run block = run;
    block.begin = begin;
    block.count = std::min(run.count - begin, kernels::Norms::kBlockElements);
    block.weight = static_cast<float*>(run.weight) + begin;
    for (float*& state : block.state) state = state == nullptr ? nullptr : state + begin;
    block.gradient = static_cast<const std::byte*>(run.gradient) + begin * proto::DtypeBytes(dtype);
    kernels::AddNorms(optimizer, step, block, &blocks.emplace_back());
  }
  return kernels::TrustRatio(blocks);
}

}  // namespace

Bytes MakeValues(Dtype dtype, uint64_t elements, uint64_t key) {
  Bytes values(elements * proto::DtypeBytes(dtype));
  const auto fill = [&](auto* to, auto convert) {
    std::fill_n(to, elements, convert(MakeValue(key)));
    for (uint64_t i = key % kOddPlace; i < elements; i += kOddPlace)
      to[i] = convert(MakeValue(key ^ (i + 1)));
  };
  if (dtype == Dtype::kFloat32) {
    fill(reinterpret_cast<float*>(values.data()), [](float value) { return value; });
  } else {
    fill(reinterpret_cast<uint16_t*>(values.data()), RoundToBFloat16);
  }
  return values;
}

std::shared_ptr<const TensorValues> PutWeights(const proto::Catalogue& catalogue, uint32_t tensor,
                                               Bytes weights, const TensorValues* before) {
  const proto::Tensor& declared = catalogue.tensors[tensor];
  auto values = std::make_shared<TensorValues>();
  if (before != nullptr) {
    values->states = before->states;
    values->updates = before->updates;
  } else {
    for (size_t i = 0; i < values->states.size(); ++i) {
      if (catalogue.planes(tensor).Has(proto::kStatePlanes[i]))
        values->states[i].resize(declared.element_count);
    }
  }
  values->masters.resize(declared.element_count);
  for (uint64_t i = 0; i < declared.element_count; ++i) {
    uint32_t bits = 0;
    if (declared.dtype == Dtype::kFloat32) {
      std::memcpy(&bits, weights.data() + i * 4, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, weights.data() + i * 2, 2);
      bits = uint32_t{half} << 16;
    }
    std::memcpy(&values->masters[i], &bits, sizeof(bits));
  }
  values->weights = std::move(weights);
  return values;
}

std::shared_ptr<const TensorValues> PutMasters(const TensorValues& before, const Bytes& masters) {
  auto after = std::make_shared<TensorValues>(before);
  std::memcpy(after->masters.data(), masters.data(), masters.size());
  after->weights = WeightsOf(Dtype::kBFloat16, after->masters);
  return after;
}

std::shared_ptr<const TensorValues> PutState(const TensorValues& before, size_t state,
                                             const Bytes& values) {
  auto after = std::make_shared<TensorValues>(before);
  after->states[state].resize(values.size() / sizeof(float));
  std::memcpy(after->states[state].data(), values.data(), values.size());
  return after;
}

std::shared_ptr<const TensorValues> UpdateValues(const proto::Catalogue& catalogue, uint32_t tensor,
                                                 const TensorValues& before,
                                                 const kernels::OptimizerSpec& optimizer,
                                                 const Bytes& gradient, float gradient_scale) {
  const Dtype dtype = catalogue.tensors[tensor].dtype;
  auto values = std::make_shared<TensorValues>();
  values->masters = before.masters;
  values->states = before.states;
  values->updates = before.updates + 1;
  kernels::Run run = RunOver(values->masters, values->states, dtype, gradient, gradient_scale);
  const auto step = static_cast<int64_t>(values->updates);
  if (kernels::NeedsNorms(optimizer)) run.trust_ratio = TrustRatioOf(optimizer, step, run, dtype);
  kernels::Update(optimizer, step, run);
  values->weights = WeightsOf(dtype, values->masters);
  return values;
}

Bytes SumParts(Dtype dtype, std::vector<const GradientPart*> parts, float factor,
               const Bytes& previous) {
  std::sort(parts.begin(), parts.end(), [](const GradientPart* a, const GradientPart* b) {
    return std::tie(a->round, a->pass, a->rank) < std::tie(b->round, b->pass, b->rank);
  });
  Bytes sum(parts.front()->values.size());
  kernels::SumStart start = kernels::SumStart::kNothing;
  if (parts.front()->start != proto::GradientStart::kNothing) start = kernels::SumStart::kZeros;
  if (parts.front()->start == proto::GradientStart::kPrevious && !previous.empty()) {
    sum = previous;
    start = kernels::SumStart::kSum;
  }
  for (const GradientPart* part : parts) {
    const void* const values = part->values.data();
    kernels::AddParts({.dtype = dtype,
                       .count = sum.size() / proto::DtypeBytes(dtype),
                       .sum = sum.data(),
                       .start = start,
                       .parts = &values,
                       .part_count = 1,
                       .factor = factor});
    start = kernels::SumStart::kSum;
  }
  return sum;
}

Bytes PlaneBytes(const proto::Catalogue& catalogue, uint32_t tensor, const TensorValues& values,
                 Plane plane) {
  if (plane == Plane::kWeight) return values.weights;
  const std::vector<float>* floats = &values.masters;
  for (size_t i = 0; i < proto::kStatePlanes.size(); ++i) {
    if (plane == proto::kStatePlanes[i]) floats = &values.states[i];
  }
  Bytes bytes(catalogue.tensors[tensor].element_count * sizeof(float));
  std::memcpy(bytes.data(), floats->data(), bytes.size());
  return bytes;
}

// ---- Against a store ---------------------------------------------------------------------------

namespace {

class StoreReader {
 public:
  StoreReader(const proto::Catalogue& catalogue, swap::Store& store)
      : catalogue_(catalogue), store_(store) {}

  // Of an extent; empty when it cannot be read, or is not what was written.
  Bytes Read(uint32_t store_tensor, Plane plane, uint32_t index, swap::Stamp* stamp) {
    const swap::ExtentId id = ExtentIdOf(store_tensor, plane, index);
    const uint64_t size_bytes = store_.ExtentBytes(id);
    if (!memory_.valid() || memory_.size() < size_bytes) {
      absl::StatusOr<MappedRegion> memory = MappedRegion::Anonymous(size_bytes);
      if (!memory.ok()) return {};
      memory_ = *std::move(memory);
    }
    const swap::ReadRequest request{id, memory_.data()};
    const absl::Status status = swap::RunToEnd(store_, [&](swap::Store::Done done) {
      store_.Read({&request, 1}, {stamp, 1}, std::move(done));
    });
    if (!status.ok()) return {};
    if (!stamp->never_written() && !store_.Verify(id, *stamp, {memory_.data(), size_bytes}))
      return {};
    return {memory_.data(), memory_.data() + size_bytes};
  }

  // The fp32 masters of an extent of a bf16 tensor.
  std::vector<uint32_t> Masters(uint32_t store_tensor, uint32_t index, const Bytes& weights,
                                const Bytes& residuals, const swap::Stamp& stamp) {
    const uint32_t elements =
        proto::ExtentElements(catalogue_.store_tensors[store_tensor].element_count, index);
    Bytes ties(std::max<size_t>(sizeof(stamp.word), proto::PaddedBytes((elements + 7) / 8)));
    std::memcpy(ties.data(), &stamp.word, sizeof(stamp.word));
    swap::Stamp ties_stamp;
    if ((stamp.flags & swap::kFlagTiesPlane) != 0)
      ties = Read(store_tensor, Plane::kTies, index, &ties_stamp);
    if (ties.empty()) return {};
    kernels::TieReader reader{reinterpret_cast<const uint8_t*>(ties.data())};
    std::vector<uint32_t> masters(elements);
    kernels::Merge(reinterpret_cast<const uint16_t*>(weights.data()),
                   reinterpret_cast<const int16_t*>(residuals.data()), elements, masters.data(),
                   &reader);
    return masters;
  }

 private:
  const proto::Catalogue& catalogue_;
  swap::Store& store_;
  MappedRegion memory_;
};

// Compares the members' part of an extent, whose elements have `size_bytes` each.
std::string CompareMembers(const proto::Catalogue& catalogue, const JobState& state,
                           uint32_t store_tensor, uint32_t index, Plane plane,
                           const std::byte* found, uint64_t size_bytes) {
  const proto::StoreTensor& tensor = catalogue.store_tensors[store_tensor];
  const uint64_t extent_begin = uint64_t{index} * proto::kExtentElements;
  const uint32_t elements = proto::ExtentElements(tensor.element_count, index);
  for (const uint32_t member : tensor.members) {
    const Bytes expected = PlaneBytes(catalogue, member, *state.tensors[member], plane);
    const uint64_t begin = catalogue.placements[member].element_offset;  // 0 unless bundled
    const uint64_t from = tensor.bundle ? 0 : extent_begin;
    const uint64_t count =
        tensor.bundle ? catalogue.tensors[member].element_count : uint64_t{elements};
    if (std::memcmp(found + begin * size_bytes, expected.data() + from * size_bytes,
                    count * size_bytes) != 0) {
      return absl::StrCat("extent ", index, " of plane ", static_cast<uint32_t>(plane), " of \"",
                          catalogue.tensors[member].name, "\" is another one");
    }
  }
  return "";
}

std::string CompareExtent(const proto::Catalogue& catalogue, const JobState& state,
                          StoreReader& reader, uint32_t store_tensor, uint32_t index) {
  const proto::StoreTensor& tensor = catalogue.store_tensors[store_tensor];
  const std::string where = absl::StrCat("extent ", index, " of store tensor ", store_tensor);
  Bytes weights;
  for (const Plane plane : proto::kUpdatedPlanes) {
    if (!tensor.planes.Has(plane)) continue;
    swap::Stamp stamp;
    const Bytes bytes = reader.Read(store_tensor, plane, index, &stamp);
    if (bytes.empty()) return absl::StrCat(where, " cannot be read or is damaged");
    if (plane == Plane::kWeight) weights = bytes;
    std::string difference;
    if (plane == Plane::kResidual) {
      const std::vector<uint32_t> masters =
          reader.Masters(store_tensor, index, weights, bytes, stamp);
      if (masters.empty()) return absl::StrCat(where, ": tie bits cannot be read");
      difference = CompareMembers(catalogue, state, store_tensor, index, Plane::kMaster,
                                  reinterpret_cast<const std::byte*>(masters.data()), 4);
    } else {
      difference = CompareMembers(catalogue, state, store_tensor, index, plane, bytes.data(),
                                  tensor.planes.Bits(plane) / 8);
    }
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace

std::string CompareWithStore(const proto::Catalogue& catalogue, const JobState& state,
                             swap::Store& store) {
  const swap::CommitInfo& committed = store.committed();
  if (committed.epoch != state.epoch)
    return absl::StrCat("epoch ", committed.epoch, " instead of ", state.epoch);
  if (committed.blob != state.blob) return "other trainer states";
  StoreReader reader(catalogue, store);
  for (uint32_t tensor = 0; tensor < catalogue.store_tensors.size(); ++tensor) {
    for (uint32_t index = 0; index < store.ExtentCount(tensor); ++index) {
      std::string difference = CompareExtent(catalogue, state, reader, tensor, index);
      if (!difference.empty()) return difference;
    }
  }
  return "";
}

}  // namespace offload::daemon

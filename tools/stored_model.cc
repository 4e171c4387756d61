#include "tools/stored_model.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/split.h"
#include "proto/buffer_tensors.h"
#include "proto/trainer_states.h"
#include "swap/fork.h"
#include "swap/verified_read.h"
#include "zero3/dimension_order.h"
#include "zero3/trainer_marks.h"
#include "zero3/trainer_state.h"

namespace offload::tools {
namespace {

using proto::Dtype;

// OFD-1207 when the store's own list of tensors is not that of the catalogue.
absl::Status CheckFits(const proto::Catalogue& catalogue, const swap::Store& store) {
  bool fits = catalogue.store_tensors.size() == store.spec().tensors.size() &&
              store.spec().extent_elements == proto::kExtentElements;
  for (size_t i = 0; fits && i < catalogue.store_tensors.size(); ++i)
    fits = catalogue.store_tensors[i].element_count == store.spec().tensors[i].element_count;
  if (fits) return absl::OkStatus();
  return MakeError(ErrorId::kStoreDamaged,
                   absl::StrCat(store.path(), ": the list of tensors is not that of its extents"));
}

// Hands a parameter's elements on row by row.
class Rows {
 public:
  Rows(const proto::Catalogue& catalogue, uint64_t element_bytes, const ElementSink& sink)
      : catalogue_(catalogue), element_bytes_(element_bytes), sink_(sink) {}

  absl::Status Append(uint32_t number, std::span<const std::byte> bytes) {
    const proto::Tensor& tensor = catalogue_.tensors[number];
    if (tensor.dimension_order.empty()) return sink_(number, bytes);
    elements_.insert(elements_.end(), bytes.begin(), bytes.end());
    if (elements_.size() < tensor.element_count * element_bytes_) return absl::OkStatus();
    std::vector<std::byte> rows(elements_.size());
    zero3::CopyToRows(tensor.shape, tensor.dimension_order, element_bytes_,
                      {0, tensor.element_count}, elements_.data(), rows.data());
    elements_ = {};
    return sink_(number, rows);
  }

 private:
  const proto::Catalogue& catalogue_;
  const uint64_t element_bytes_;
  const ElementSink& sink_;
  std::vector<std::byte> elements_;
};

}  // namespace

uint16_t ToBFloat16(uint32_t bits) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

Dtype DtypeOf(Values values, Dtype stored) {
  if (values == Values::kWeights) return stored;
  return values == Values::kFloat32 ? Dtype::kFloat32 : Dtype::kBFloat16;
}

absl::StatusOr<StoredModel> StoredModel::Open(const std::string& pool, const std::string& job,
                                              const std::string& snapshot) {
  StoredModel model;
  OFFLOAD_ASSIGN_OR_RETURN(model.store_, swap::OpenForkSource(pool, job, snapshot, {}));
  OFFLOAD_ASSIGN_OR_RETURN(proto::StoredCatalogue stored,
                           proto::DecodeCatalogue(model.store_->spec().catalogue));
  model.optimizer_ = std::move(stored.optimizer);
  model.kept_ = std::move(stored.planes);
  model.keeps_average_ = std::erase_if(model.kept_, [](const auto& kept) {
                           return kept.first == proto::Plane::kAverage;
                         }) > 0;
  OFFLOAD_ASSIGN_OR_RETURN(model.catalogue_, proto::BuildCatalogue(std::move(stored.tensors)));
  OFFLOAD_RETURN_IF_ERROR(CheckFits(model.catalogue_, *model.store_));
  const std::string state = proto::DecodeTrainerStates(model.store_->committed().blob).front();
  OFFLOAD_ASSIGN_OR_RETURN(zero3::TrainerState decoded, zero3::DecodeTrainerState(state));
  model.update_counts_ = std::move(decoded.update_counts);
  model.update_counts_.resize(model.catalogue_.tensors.size());
  model.buffers_ = std::move(decoded.buffers);
  if (decoded.trainer.starts_with(zero3::kMarkOfKinds)) {
    model.is_of_one_kind_ =
        MakeError(ErrorId::kOtherModel,
                  "the job has optimizers of several kinds, and which parameter has which only a "
                  "trainer in Python can tell",
                  "Attach it there: handle.save_universal() writes what they keep; weights can be "
                  "exported");
  }
  for (MappedRegion* region : {&model.weight_, &model.residual_, &model.ties_}) {
    OFFLOAD_ASSIGN_OR_RETURN(*region, MappedRegion::Anonymous(kPlaneBytesMax));
  }
  model.values_.resize(kPlaneBytesMax);
  return model;
}

// A rank that was never given a state takes the first one's. Buffers, which come last, have no
// counts.
absl::StatusOr<std::string> StoredModel::BlobWith(std::vector<uint64_t> update_counts) const {
  const std::string& blob = store_->committed().blob;
  OFFLOAD_ASSIGN_OR_RETURN(const zero3::TrainerState state,
                           zero3::DecodeTrainerState(proto::DecodeTrainerStates(blob).front()));
  const auto is_buffer = [](const proto::Tensor& tensor) {
    return proto::IsBufferTensor(tensor.name);
  };
  update_counts.resize(std::ranges::find_if(catalogue_.tensors, is_buffer) -
                       catalogue_.tensors.begin());
  return zero3::EncodeTrainerState({.update_counts = std::move(update_counts),
                                    .buffers = state.buffers,
                                    .layout = state.layout,
                                    .slot_bytes = state.slot_bytes});
}

bool StoredModel::IsWeight(uint32_t tensor) const {
  const std::string& name = catalogue_.tensors[tensor].name;
  return !proto::IsBufferTensor(name) && !proto::IsReplacedTensor(name);
}

size_t StoredModel::weight_count() const {
  size_t count = 0;
  for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) count += IsWeight(tensor);
  return count;
}

absl::Status StoredModel::Copy(uint32_t store_tensor, Source source, Values wanted,
                               const ElementSink& sink) {
  const proto::StoreTensor& tensor = catalogue_.store_tensors[store_tensor];
  const Dtype dtype = DtypeOf(wanted, tensor.dtype);
  const bool is_average = source == Source::kAverages && tensor.trainable;
  return CopyPieces(
      store_tensor, proto::DtypeBytes(dtype),
      [&](uint32_t index) {
        return is_average ? ReadAverage(store_tensor, index, wanted)
                          : Read(store_tensor, index, wanted);
      },
      [this](uint32_t tensor) { return IsWeight(tensor); }, sink);
}

absl::Status StoredModel::CopyState(uint32_t store_tensor, proto::Plane state,
                                    const ElementSink& sink) {
  const uint64_t elements = catalogue_.store_tensors[store_tensor].element_count;
  const auto read = [&](uint32_t index) -> Piece {
    const auto plane = static_cast<swap::Plane>(state);
    OFFLOAD_RETURN_IF_ERROR(ReadPlane({store_tensor, plane, index}, weight_));
    return std::span<const std::byte>(weight_.data(),
                                      proto::ExtentElements(elements, index) * sizeof(float));
  };
  return CopyPieces(
      store_tensor, sizeof(float), read, [this](uint32_t tensor) { return IsWeight(tensor); },
      sink);
}

absl::StatusOr<std::vector<zero3::StoredBuffer>> StoredModel::Buffers() const {
  return zero3::DecodeStoredBuffers(buffers_);
}

absl::Status StoredModel::CopyBuffer(const zero3::StoredBuffer& buffer, const BufferSink& sink) {
  if (!buffer.is_in_store) return sink(std::as_bytes(std::span(buffer.bytes)));
  const std::optional<zero3::FileDtype> dtype = zero3::FileDtypeOfStored(buffer.type);
  const std::string name = proto::BufferTensorName(buffer.name);
  const auto found = std::find_if(catalogue_.tensors.begin(), catalogue_.tensors.end(),
                                  [&](const proto::Tensor& tensor) { return tensor.name == name; });
  std::optional<uint64_t> size_bytes;
  if (dtype.has_value() && found != catalogue_.tensors.end()) {
    size_bytes = zero3::DataBytes(
        {.name = {}, .dtype = *dtype, .shape = {buffer.shape.begin(), buffer.shape.end()}});
  }
  if (!size_bytes.has_value() || *size_bytes > found->element_count * sizeof(float)) {
    return MakeError(ErrorId::kStoreDamaged, absl::StrCat(store_->path(), ": buffer '", buffer.name,
                                                          "' is not among its tensors"));
  }
  return CopyLargeBuffer(static_cast<uint32_t>(found - catalogue_.tensors.begin()), *size_bytes,
                         sink);
}

// Its bytes are those of fp32 elements, padded.
absl::Status StoredModel::CopyLargeBuffer(uint32_t tensor, uint64_t size_bytes,
                                          const BufferSink& sink) {
  const uint32_t store_tensor = catalogue_.placements[tensor].store_tensor;
  uint64_t left_bytes = size_bytes;
  return CopyPieces(
      store_tensor, sizeof(float),
      [&](uint32_t index) { return Read(store_tensor, index, Values::kWeights); },
      [tensor](uint32_t member) { return member == tensor; },
      [&](uint32_t, std::span<const std::byte> bytes) {
        bytes = bytes.first(std::min<uint64_t>(bytes.size(), left_bytes));
        left_bytes -= bytes.size();
        return bytes.empty() ? absl::OkStatus() : sink(bytes);
      });
}

absl::Status StoredModel::CopyPieces(uint32_t store_tensor, uint64_t element_bytes,
                                     const std::function<Piece(uint32_t index)>& read,
                                     const std::function<bool(uint32_t tensor)>& wants,
                                     const ElementSink& sink) const {
  const proto::StoreTensor& tensor = catalogue_.store_tensors[store_tensor];
  Rows rows(catalogue_, element_bytes, sink);
  for (uint32_t index = 0; index < proto::ExtentCount(tensor.element_count); ++index) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, read(index));
    for (const uint32_t member : tensor.members) {
      if (!wants(member)) continue;
      const uint64_t begin = catalogue_.placements[member].element_offset * element_bytes;
      const uint64_t size_bytes = catalogue_.tensors[member].element_count * element_bytes;
      OFFLOAD_RETURN_IF_ERROR(
          rows.Append(member, tensor.bundle ? bytes.subspan(begin, size_bytes) : bytes));
    }
  }
  return absl::OkStatus();
}

// The elements of an extent in the type that is wanted; good until the next call.
StoredModel::Piece StoredModel::Read(uint32_t store_tensor, uint32_t index, Values wanted) {
  const proto::StoreTensor& tensor = catalogue_.store_tensors[store_tensor];
  const size_t count = proto::ExtentElements(tensor.element_count, index);
  OFFLOAD_RETURN_IF_ERROR(ReadPlane({store_tensor, swap::Plane::kWeight, index}, weight_));
  const Dtype dtype = DtypeOf(wanted, tensor.dtype);
  const size_t size_bytes = count * proto::DtypeBytes(dtype);
  if (dtype == tensor.dtype) return std::span<const std::byte>(weight_.data(), size_bytes);
  OFFLOAD_RETURN_IF_ERROR(ToFloat32(tensor, {store_tensor, swap::Plane::kResidual, index}, count));
  if (dtype == Dtype::kBFloat16) Narrow(count);
  return std::span<const std::byte>(values_.data(), size_bytes);
}

// Weights, and over them the averages of the members that were updated, in the type of both.
StoredModel::Piece StoredModel::ReadAverage(uint32_t store_tensor, uint32_t index, Values wanted) {
  const proto::StoreTensor& tensor = catalogue_.store_tensors[store_tensor];
  const size_t count = proto::ExtentElements(tensor.element_count, index);
  const bool is_double = tensor.dtype == Dtype::kFloat64;
  const size_t element_bytes = is_double ? sizeof(double) : sizeof(float);
  OFFLOAD_ASSIGN_OR_RETURN(
      const std::span<const std::byte> masters,
      Read(store_tensor, index, is_double ? Values::kWeights : Values::kFloat32));
  if (masters.data() != values_.data()) std::memcpy(values_.data(), masters.data(), masters.size());
  OFFLOAD_RETURN_IF_ERROR(ReadPlane({store_tensor, swap::Plane::kAverage, index}, weight_));
  for (const uint32_t member : tensor.members) {
    if (update_counts_[member] == 0) continue;
    const size_t begin = tensor.bundle ? catalogue_.placements[member].element_offset : 0;
    const size_t elements = tensor.bundle ? catalogue_.tensors[member].element_count : count;
    std::memcpy(values_.data() + begin * element_bytes, weight_.data() + begin * element_bytes,
                elements * element_bytes);
  }
  const Dtype dtype = DtypeOf(wanted, tensor.dtype);
  if (is_double && dtype != Dtype::kFloat64) NarrowDoubles(count);
  if (dtype == Dtype::kBFloat16) Narrow(count);
  if (dtype == Dtype::kFloat16) NarrowToHalf(count);
  return std::span<const std::byte>(values_.data(), count * proto::DtypeBytes(dtype));
}

absl::Status StoredModel::ReadPlane(const swap::ExtentId& id, const MappedRegion& to) {
  const uint64_t size_bytes = store_->ExtentBytes(id);
  if (size_bytes > kPlaneBytesMax)
    return MakeError(ErrorId::kStoreDamaged, absl::StrCat(swap::NameOf(id), " is too large"));
  swap::Stamp stamp;
  return swap::ReadVerified(*store_, {id, to.data()}, &stamp);
}

// In place.
void StoredModel::Narrow(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values_.data() + i * sizeof(bits), sizeof(bits));
    const uint16_t rounded = ToBFloat16(bits);
    std::memcpy(values_.data() + i * sizeof(rounded), &rounded, sizeof(rounded));
  }
}

void StoredModel::NarrowToHalf(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, values_.data() + i * sizeof(value), sizeof(value));
    const kernels::Half narrow = kernels::ToHalf(value);
    std::memcpy(values_.data() + i * sizeof(narrow), &narrow, sizeof(narrow));
  }
}

void StoredModel::NarrowDoubles(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    double value;
    std::memcpy(&value, values_.data() + i * sizeof(value), sizeof(value));
    const auto narrow = static_cast<float>(value);
    std::memcpy(values_.data() + i * sizeof(narrow), &narrow, sizeof(narrow));
  }
}

// The weights as fp32 numbers, or their masters where they have some.
absl::Status StoredModel::ToFloat32(const proto::StoreTensor& tensor,
                                    const swap::ExtentId& residual, size_t count) {
  switch (tensor.dtype) {
    case Dtype::kFloat32:
      std::memcpy(values_.data(), weight_.data(), count * sizeof(float));
      return absl::OkStatus();
    case Dtype::kBFloat16:
      return Widen(tensor, residual, count);
    case Dtype::kFloat16:
      return WidenHalves(tensor, residual, count);
    case Dtype::kFloat64:
      break;
  }
  const auto* weights = reinterpret_cast<const double*>(weight_.data());
  auto* values = reinterpret_cast<float*>(values_.data());
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(weights[i]);
  return absl::OkStatus();
}

absl::Status StoredModel::WidenHalves(const proto::StoreTensor& tensor,
                                      const swap::ExtentId& residual, size_t count) {
  const auto* weights = reinterpret_cast<const kernels::Half*>(weight_.data());
  auto* values = reinterpret_cast<float*>(values_.data());
  if (!tensor.trainable) {
    for (size_t i = 0; i < count; ++i) values[i] = kernels::FromHalf(weights[i]);
    return absl::OkStatus();
  }
  OFFLOAD_RETURN_IF_ERROR(ReadPlane(residual, residual_));
  kernels::MergeHalf(weights, reinterpret_cast<const uint32_t*>(residual_.data()), count, values);
  return absl::OkStatus();
}

// The fp32 masters of bf16 weights; the weights themselves where they are not trained.
absl::Status StoredModel::Widen(const proto::StoreTensor& tensor, const swap::ExtentId& residual,
                                size_t count) {
  const auto* weights = reinterpret_cast<const uint16_t*>(weight_.data());
  auto* values = reinterpret_cast<uint32_t*>(values_.data());
  if (!tensor.trainable) {
    for (size_t i = 0; i < count; ++i) values[i] = uint32_t{weights[i]} << 16;
    return absl::OkStatus();
  }
  OFFLOAD_RETURN_IF_ERROR(ReadPlane(residual, residual_));
  const swap::Stamp stamp = store_->stamp(residual);
  if ((stamp.flags & swap::kFlagTiesPlane) != 0) {
    OFFLOAD_RETURN_IF_ERROR(
        ReadPlane({residual.tensor, swap::Plane::kTies, residual.index}, ties_));
  } else {
    std::memcpy(ties_.data(), &stamp.word, sizeof(stamp.word));
  }
  kernels::TieReader ties{reinterpret_cast<const uint8_t*>(ties_.data())};
  kernels::Merge(weights, reinterpret_cast<const int16_t*>(residual_.data()), count, values, &ties);
  return absl::OkStatus();
}

}  // namespace offload::tools

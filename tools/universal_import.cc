#include "tools/universal_import.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "kernels/split.h"
#include "zero3/dimension_order.h"
#include "zero3/safetensors.h"

namespace offload::tools {
namespace {

using proto::Dtype;
using zero3::FileDtype;

constexpr char kMasters[] = "fp32";
constexpr char kCountedByItself[] = "momentum_buffer";

// ---- Whether it fits ---------------------------------------------------------------------------

class Checker {
 public:
  Checker(const StoredModel& model, UniversalSource& source) : model_(model), source_(source) {
    for (const auto& [plane, name] : model.kept()) kept_.insert(name);
  }

  absl::StatusOr<CheckedImport> Run() {
    const auto& tensors = model_.catalogue().tensors;
    checked_.update_counts.resize(tensors.size());
    std::set<std::string> names;
    for (uint32_t id = 0; id < tensors.size(); ++id) {
      if (!model_.IsWeight(id)) continue;
      names.insert(tensors[id].name);
      OFFLOAD_RETURN_IF_ERROR(Check(id));
    }
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> there, source_.Names());
    for (const std::string& name : there) {
      if (!names.contains(name)) return Misfit(absl::StrCat("the model has no '", name, "'"));
    }
    OFFLOAD_ASSIGN_OR_RETURN(const std::set<uint64_t> steps, source_.CommonSteps());
    if (!steps.empty()) checked_.step = std::max(checked_.step, *steps.rbegin());
    return std::move(checked_);
  }

 private:
  absl::Status Misfit(const std::string& what) const {
    return MakeError(ErrorId::kFileMismatch,
                     absl::StrCat(source_.path(), " does not fit the model: ", what));
  }

  absl::Status Check(uint32_t id) {
    const proto::Tensor& tensor = model_.catalogue().tensors[id];
    if (!source_.Has(tensor.name)) return Misfit(absl::StrCat("'", tensor.name, "' is missing"));
    OFFLOAD_RETURN_IF_ERROR(source_.Tensor(tensor, kMasters).status());
    checked_.bytes += WideBytes(tensor);
    OFFLOAD_ASSIGN_OR_RETURN(const std::set<std::string> states, source_.StatesOf(tensor.name));
    for (const std::string& state : states) {
      if (!tensor.trainable) continue;
      if (!kept_.contains(state)) {
        return Misfit(absl::StrCat("'", tensor.name, "' has ", state, ", which ",
                                   model_.optimizer(), " does not keep"));
      }
      OFFLOAD_RETURN_IF_ERROR(source_.Tensor(tensor, state).status());
      checked_.bytes += WideBytes(tensor);
    }
    if (!tensor.trainable) return absl::OkStatus();
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t count, CountOf(tensor.name, states));
    if (count > 0) OFFLOAD_RETURN_IF_ERROR(CheckStates(tensor.name, count, states));
    checked_.update_counts[id] = count;
    checked_.step = std::max(checked_.step, count);
    return absl::OkStatus();
  }

  static uint64_t WideBytes(const proto::Tensor& tensor) {
    return tensor.element_count *
           (tensor.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float));
  }

  // torch's SGD counts nothing: that there is a momentum says that there was an update.
  absl::StatusOr<uint64_t> CountOf(const std::string& name, const std::set<std::string>& states) {
    const bool counts_by_itself = kept_.size() == 1 && kept_.contains(kCountedByItself);
    if (counts_by_itself && states.empty()) return 0;
    OFFLOAD_ASSIGN_OR_RETURN(const std::optional<uint64_t> count, source_.StepOf(name));
    if (counts_by_itself) return std::max<uint64_t>(count.value_or(1), 1);
    if (count.has_value() || states.empty()) return count.value_or(0);
    OFFLOAD_ASSIGN_OR_RETURN(const std::set<uint64_t> steps, source_.CommonSteps());
    if (steps.size() == 1) return *steps.begin();
    return MakeError(
        ErrorId::kFileFormat,
        absl::StrCat(source_.path(), "/", zero3::ShownName(name), " has no step.pt, and the ",
                     "checkpoint says nowhere, or more than once, how often it was updated"));
  }

  absl::Status CheckStates(const std::string& name, uint64_t count,
                           const std::set<std::string>& states) const {
    for (const std::string& kept : kept_) {
      if (states.contains(kept)) continue;
      return Misfit(absl::StrCat("'", name, "' has no ", kept, " after ", count, " steps, which ",
                                 model_.optimizer(), " of the job keeps"));
    }
    return absl::OkStatus();
  }

  const StoredModel& model_;
  UniversalSource& source_;
  std::set<std::string> kept_;
  CheckedImport checked_;
};

// ---- Elements ----------------------------------------------------------------------------------

template <typename From, typename To>
void Convert(const std::byte* from, size_t count, std::byte* to) {
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * sizeof(value), sizeof(value));
    To wide;
    if constexpr (std::is_same_v<From, kernels::Half>) {
      wide = static_cast<To>(kernels::FromHalf(value));
    } else {
      wide = static_cast<To>(value);
    }
    std::memcpy(to + i * sizeof(wide), &wide, sizeof(wide));
  }
}

struct BFloat16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
};

template <typename To>
void Widen(FileDtype dtype, const std::byte* from, size_t count, std::byte* to) {
  switch (dtype) {
    case FileDtype::kF64:
      return Convert<double, To>(from, count, to);
    case FileDtype::kBF16:
      return Convert<BFloat16, To>(from, count, to);
    case FileDtype::kF16:
      return Convert<kernels::Half, To>(from, count, to);
    default:
      return Convert<float, To>(from, count, to);
  }
}

// The numbers of a tensor in a file as fp32 or fp64, in the order that the planes have them.
class Elements {
 public:
  static absl::StatusOr<Elements> Open(const UniversalSource& source, const proto::Tensor& tensor,
                                       const std::string& file, bool is_double) {
    OFFLOAD_ASSIGN_OR_RETURN(zero3::SavedTensorReader reader, source.Tensor(tensor, file));
    Elements elements(std::move(reader), is_double);
    if (!tensor.dimension_order.empty()) OFFLOAD_RETURN_IF_ERROR(elements.Reorder(tensor));
    return elements;
  }

  // The next ones.
  absl::Status Next(size_t count, std::byte* to) {
    if (ordered_.empty()) return NextRows(count, to);
    std::memcpy(to, ordered_.data() + taken_ * wide_bytes(), count * wide_bytes());
    taken_ += count;
    return absl::OkStatus();
  }

 private:
  Elements(zero3::SavedTensorReader reader, bool is_double)
      : reader_(std::move(reader)), is_double_(is_double) {}
  size_t wide_bytes() const { return is_double_ ? sizeof(double) : sizeof(float); }

  absl::Status NextRows(size_t count, std::byte* to) {
    const FileDtype dtype = reader_.tensor().dtype;
    if (dtype == (is_double_ ? FileDtype::kF64 : FileDtype::kF32))
      return reader_.Next({to, count * wide_bytes()});
    read_.resize(count * reader_.element_bytes());
    OFFLOAD_RETURN_IF_ERROR(reader_.Next(read_));
    is_double_ ? Widen<double>(dtype, read_.data(), count, to)
               : Widen<float>(dtype, read_.data(), count, to);
    return absl::OkStatus();
  }

  absl::Status Reorder(const proto::Tensor& tensor) {
    std::vector<std::byte> rows(uint64_t{proto::kExtentElements} * wide_bytes());
    std::vector<std::byte> ordered(tensor.element_count * wide_bytes());
    for (uint64_t begin = 0; begin < tensor.element_count; begin += proto::kExtentElements) {
      const uint64_t count =
          std::min<uint64_t>(tensor.element_count - begin, proto::kExtentElements);
      OFFLOAD_RETURN_IF_ERROR(NextRows(count, rows.data()));
      zero3::CopyFromRows(tensor.shape, tensor.dimension_order, wide_bytes(), {begin, count},
                          rows.data(), ordered.data());
    }
    ordered_ = std::move(ordered);
    return absl::OkStatus();
  }

  zero3::SavedTensorReader reader_;
  bool is_double_;
  std::vector<std::byte> read_, ordered_;
  uint64_t taken_ = 0;
};

// ---- Extents -----------------------------------------------------------------------------------

class Importer {
 public:
  using Progress = std::function<void(uint64_t, uint64_t)>;

  Importer(StoredModel& model, const UniversalSource& source, swap::Store& target,
           uint64_t total_bytes, const Progress& progress)
      : model_(model),
        catalogue_(model.catalogue()),
        source_(source),
        target_(target),
        total_bytes_(total_bytes),
        progress_(progress) {}

  absl::Status Run() {
    for (MappedRegion* region : {&values_, &weight_, &residual_, &ties_}) {
      OFFLOAD_ASSIGN_OR_RETURN(*region, MappedRegion::Anonymous(kPlaneBytesMax));
    }
    for (uint32_t id = 0; id < catalogue_.store_tensors.size(); ++id)
      OFFLOAD_RETURN_IF_ERROR(Import(id));
    return absl::OkStatus();
  }

 private:
  absl::Status Import(uint32_t id) {
    const proto::StoreTensor& tensor = catalogue_.store_tensors[id];
    const auto is_weight = [this](uint32_t member) { return model_.IsWeight(member); };
    if (std::none_of(tensor.members.begin(), tensor.members.end(), is_weight)) return CopyOver(id);
    keeps_others_ = !std::all_of(tensor.members.begin(), tensor.members.end(), is_weight);
    if (keeps_others_) {
      if (tensor.trainable || tensor.dtype != Dtype::kFloat32) return Unexpected(id);
      OFFLOAD_RETURN_IF_ERROR(model_.ReadExtent({id, swap::Plane::kWeight, /*index=*/0}, values_));
    }
    OFFLOAD_RETURN_IF_ERROR(ImportPlane(id, kMasters, [&](uint32_t index, size_t count) {
      return WriteMasters(id, index, count);
    }));
    if (!tensor.trainable) return absl::OkStatus();
    for (const auto& [plane, name] : model_.kept()) {
      const auto stored = static_cast<swap::Plane>(plane);
      OFFLOAD_RETURN_IF_ERROR(ImportPlane(id, name, [&](uint32_t index, size_t) {
        return Write({{{id, stored, index}, &values_}});
      }));
    }
    return absl::OkStatus();
  }

  static absl::Status Unexpected(uint32_t id) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat("store tensor ", id, " has a buffer among what is trained"));
  }

  // Of a buffer: the values of the job that the new one is made like.
  absl::Status CopyOver(uint32_t id) {
    for (uint32_t index = 0; index < target_.ExtentCount(id); ++index) {
      const swap::ExtentId extent{id, swap::Plane::kWeight, index};
      OFFLOAD_RETURN_IF_ERROR(model_.ReadExtent(extent, values_));
      OFFLOAD_RETURN_IF_ERROR(Write({{extent, &values_}}));
    }
    return absl::OkStatus();
  }

  // Brings the values of a file into values_, an extent at a time, and has them written. A state
  // that no member has is zeros, as it is in a store that is new.
  absl::Status ImportPlane(uint32_t id, const std::string& file,
                           const std::function<absl::Status(uint32_t, size_t)>& write) {
    const proto::StoreTensor& tensor = catalogue_.store_tensors[id];
    if (!tensor.bundle) return ImportOne(id, file, write);
    const size_t wide_bytes = WideBytes(tensor);
    if (!keeps_others_) std::memset(values_.data(), 0, values_.size());
    for (const uint32_t member : tensor.members) {
      if (!model_.IsWeight(member)) continue;
      OFFLOAD_ASSIGN_OR_RETURN(const bool is_there, IsThere(member, file));
      if (!is_there) continue;
      const proto::Tensor& parameter = catalogue_.tensors[member];
      OFFLOAD_ASSIGN_OR_RETURN(Elements elements, Elements::Open(source_, parameter, file,
                                                                 tensor.dtype == Dtype::kFloat64));
      std::byte* const to =
          values_.data() + catalogue_.placements[member].element_offset * wide_bytes;
      OFFLOAD_RETURN_IF_ERROR(elements.Next(parameter.element_count, to));
      Tell(parameter.element_count * wide_bytes);
    }
    return write(/*index=*/0, tensor.element_count);
  }

  absl::Status ImportOne(uint32_t id, const std::string& file,
                         const std::function<absl::Status(uint32_t, size_t)>& write) {
    const proto::StoreTensor& tensor = catalogue_.store_tensors[id];
    OFFLOAD_ASSIGN_OR_RETURN(const bool is_there, IsThere(tensor.members.front(), file));
    if (!is_there) return absl::OkStatus();
    OFFLOAD_ASSIGN_OR_RETURN(
        Elements elements, Elements::Open(source_, catalogue_.tensors[tensor.members.front()], file,
                                          tensor.dtype == Dtype::kFloat64));
    for (uint32_t index = 0; index < proto::ExtentCount(tensor.element_count); ++index) {
      const size_t count = proto::ExtentElements(tensor.element_count, index);
      OFFLOAD_RETURN_IF_ERROR(elements.Next(count, values_.data()));
      OFFLOAD_RETURN_IF_ERROR(write(index, count));
      Tell(count * WideBytes(tensor));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> IsThere(uint32_t member, const std::string& file) const {
    if (file == kMasters) return true;
    OFFLOAD_ASSIGN_OR_RETURN(const std::set<std::string> states,
                             source_.StatesOf(catalogue_.tensors[member].name));
    return states.contains(file);
  }

  static size_t WideBytes(const proto::StoreTensor& tensor) {
    return tensor.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  }

  void Tell(uint64_t more_bytes) {
    done_bytes_ += more_bytes;
    if (progress_) progress_(done_bytes_, total_bytes_);
  }

  // values_ as weights of the tensor's type, and what their cast has left.
  absl::Status WriteMasters(uint32_t id, uint32_t index, size_t count) {
    const proto::StoreTensor& tensor = catalogue_.store_tensors[id];
    const swap::ExtentId weight{id, swap::Plane::kWeight, index};
    const swap::ExtentId residual{id, swap::Plane::kResidual, index};
    if (tensor.dtype == Dtype::kBFloat16 && tensor.trainable)
      return WriteSplit(weight, residual, count);
    if (tensor.dtype == Dtype::kFloat16 && tensor.trainable) {
      kernels::SplitHalf(reinterpret_cast<const float*>(values_.data()), count,
                         reinterpret_cast<kernels::Half*>(weight_.data()),
                         reinterpret_cast<uint32_t*>(residual_.data()));
      return Write({{weight, &weight_}, {residual, &residual_}});
    }
    if (tensor.dtype != Dtype::kBFloat16 && tensor.dtype != Dtype::kFloat16)
      return Write({{weight, &values_}});
    Narrow(tensor.dtype, count);
    return Write({{weight, &weight_}});
  }

  absl::Status WriteSplit(const swap::ExtentId& weight, const swap::ExtentId& residual,
                          size_t count) {
    std::memset(ties_.data(), 0, ties_.size());
    kernels::TieWriter ties{reinterpret_cast<uint8_t*>(ties_.data())};
    kernels::Split(reinterpret_cast<const uint32_t*>(values_.data()), count,
                   reinterpret_cast<uint16_t*>(weight_.data()),
                   reinterpret_cast<int16_t*>(residual_.data()), &ties);
    Extent split{residual, &residual_};
    std::memcpy(&split.word, ties_.data(), sizeof(split.word));
    if (ties.position <= 8 * sizeof(split.word)) return Write({{weight, &weight_}, split});
    split.word = 0;
    split.flags = swap::kFlagTiesPlane;
    const swap::ExtentId plane{weight.tensor, swap::Plane::kTies, weight.index};
    return Write({{weight, &weight_}, split, {plane, &ties_}});
  }

  // Of what is not trained.
  void Narrow(Dtype dtype, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const std::byte* const from = values_.data() + i * sizeof(float);
      std::byte* const to = weight_.data() + i * sizeof(uint16_t);
      if (dtype == Dtype::kBFloat16) {
        uint32_t bits;
        std::memcpy(&bits, from, sizeof(bits));
        const uint16_t rounded = ToBFloat16(bits);
        std::memcpy(to, &rounded, sizeof(rounded));
      } else {
        float value;
        std::memcpy(&value, from, sizeof(value));
        const kernels::Half rounded = kernels::ToHalf(value);
        std::memcpy(to, &rounded, sizeof(rounded));
      }
    }
  }

  struct Extent {
    swap::ExtentId id;
    const MappedRegion* bytes;
    uint64_t word = 0;
    uint32_t flags = 0;
  };

  // What lies behind the elements is never looked at.
  absl::Status Write(std::initializer_list<Extent> extents) {
    std::vector<swap::WriteRequest> requests;
    for (const Extent& extent : extents) {
      const uint64_t size_bytes = target_.ExtentBytes(extent.id);
      swap::Checksum checksum = target_.StartChecksum(extent.id, target_.open_sequence());
      checksum.Update({extent.bytes->data(), size_bytes});
      requests.push_back(
          {extent.id, extent.bytes->data(), checksum.Finish(), extent.word, extent.flags});
    }
    return RunToEnd(target_,
                    [&](swap::Store::Done done) { target_.Write(requests, std::move(done)); });
  }

  StoredModel& model_;
  const proto::Catalogue& catalogue_;
  const UniversalSource& source_;
  swap::Store& target_;
  const uint64_t total_bytes_;
  const Progress& progress_;
  uint64_t done_bytes_ = 0;
  bool keeps_others_ = false;  // values_ holds a bundle's buffers already
  MappedRegion values_, weight_, residual_, ties_;
};

}  // namespace

absl::StatusOr<CheckedImport> CheckImport(const StoredModel& model, UniversalSource& source) {
  return Checker(model, source).Run();
}

absl::Status ImportUniversal(StoredModel& model, const UniversalSource& source,
                             const CheckedImport& checked, uint64_t step, const std::string& pool,
                             const std::string& job, const swap::StoreOptions& options) {
  swap::StoreSpec spec = model.store().spec();
  spec.job = job;
  OFFLOAD_ASSIGN_OR_RETURN(std::string blob, model.BlobWith(checked.update_counts));
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<swap::Store> target,
                           swap::Store::Create(pool, spec, options));
  OFFLOAD_RETURN_IF_ERROR(Importer(model, source, *target, checked.bytes, options.progress).Run());
  FaultPoint("import.written");
  OFFLOAD_RETURN_IF_ERROR(RunToEnd(*target, [&](swap::Store::Done done) {
    target->Commit(step, std::move(blob), std::move(done));
  }));
  return target->Publish();
}

}  // namespace offload::tools

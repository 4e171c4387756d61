#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/dimension_order.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/log.h"
#include "zero3/torch/progress.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// Weights and buffers in files.

// Files see the tensors as they are attached, under all their names.
void TensorEngine::NameForFiles(std::span<const NamedTensor> tensors) {
  if (attached_.sealed) return;
  std::vector<NamedTensor> names = attached_.names;
  std::unordered_set<std::string> known;
  for (const NamedTensor& named : names) known.insert(named.name);
  for (const NamedTensor& named : tensors) {
    if (named.tensor.defined() && known.insert(named.name).second) names.push_back(named);
  }
  file_weights_ = ValueOrThrow(FindFileWeights(names));
  for (FileWeight& weight : file_weights_) weight.tensor.reset();
  attached_.names = std::move(names);
}

std::unordered_map<std::string_view, uint32_t> TensorEngine::IdsByName() const {
  std::unordered_map<std::string_view, uint32_t> ids;
  for (uint32_t id = 0; id < declared_.size(); ++id) ids.emplace(declared_[id].name, id);
  return ids;
}

std::unordered_map<std::string_view, uint32_t> TensorEngine::IdsInFiles() const {
  std::unordered_map<std::string_view, uint32_t> ids = IdsByName();
  for (const auto& [name, id] : file_ids_) ids.insert_or_assign(name, id);
  return ids;
}

void TensorEngine::SetInitialWeights(std::string path, LoadOptions options) {
  if (path.empty())
    ThrowStatus(MakeError(ErrorId::kFileRead, "SetInitialWeights() is given an empty path"));
  if (attached_.sealed && !exists_) {
    ThrowStatus(MakeError(
        ErrorId::kBadValue,
        "SetInitialWeights() comes too late: the job was made with the weights that the model had",
        "Call it right after Engine::Open(), before the model is used; LoadWeights() replaces the "
        "weights of a job that there is"));
  }
  initial_weights_ = std::move(path);
  initial_options_ = std::move(options);
}

std::optional<WeightFile> TensorEngine::OpenInitialWeights() {
  if (initial_weights_.empty()) return std::nullopt;
  if (exists_) {
    Log().info("job {} exists, at step {}: it keeps its weights, {} is not loaded", options_.job,
               step_, initial_weights_);
    return std::nullopt;
  }
  return ValueOrThrow(WeightFile::Open(initial_weights_, file_weights_, initial_options_),
                      initial_weights_);
}

// From a file that fits.
void TensorEngine::LoadFrom(WeightFile& file) {
  FileProgress progress("loading weights", file_weights_);
  const std::unordered_map<std::string_view, uint32_t> ids = IdsInFiles();
  for (const FileWeight& weight : file_weights_) {
    if (weight.is_buffer) {
      if (file.Has(weight)) ThrowIfError(file.ReadBuffer(weight));
      continue;
    }
    if (weight.ElementCount() == 0) continue;  // the daemon does not know it
    const uint32_t id = ids.at(weight.name);
    const bool is_rows = attachment_->tensor(id).dimension_order.empty();
    ThrowIfError(is_rows ? LoadRows(id, weight, file) : LoadReordered(id, weight, file),
                 absl::StrCat("parameter '", weight.name, "'"));
    progress.Done(weight);
  }
}

absl::Status TensorEngine::LoadRows(uint32_t id, const FileWeight& weight, WeightFile& file) {
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    return file.Read(weight, begin, count, target);
  };
  return attachment_->StreamIn(id, proto::Plane::kWeight, fill, /*digest=*/0);
}

// One that does not lie row by row: all of it is in memory meanwhile.
absl::Status TensorEngine::LoadReordered(uint32_t id, const FileWeight& weight, WeightFile& file) {
  const proto::Tensor& tensor = attachment_->tensor(id);
  const uint64_t element_bytes = proto::DtypeBytes(tensor.dtype);
  std::vector<std::byte> rows(proto::kExtentElements * element_bytes);
  std::vector<std::byte> elements(tensor.element_count * element_bytes);
  for (uint64_t begin = 0; begin < tensor.element_count; begin += proto::kExtentElements) {
    const uint64_t count = std::min<uint64_t>(tensor.element_count - begin, proto::kExtentElements);
    OFFLOAD_RETURN_IF_ERROR(file.Read(weight, begin, count, rows.data()));
    CopyFromRows(tensor.shape, tensor.dimension_order, element_bytes, {begin, count}, rows.data(),
                 elements.data());
  }
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    std::memcpy(target, elements.data() + begin * element_bytes, count * element_bytes);
    return absl::OkStatus();
  };
  return attachment_->StreamIn(id, proto::Plane::kWeight, fill, /*digest=*/0);
}

// The other ranks wait, first until nobody uses a weight any more, then for what became of it.
void TensorEngine::LoadWeights(const std::string& path, const LoadOptions& options) {
  // It would make them durable, and not how often their tensors were updated.
  if (has_unsettled_states_) {
    ThrowStatus(MakeError(ErrorId::kBadValue,
                          "LoadWeights() after the optimizer's state was loaded, without a step "
                          "between them",
                          "Load the weights first, or take a step before"));
  }
  Seal();
  SettleGiven(/*writes=*/true);
  attachment_->EndRaw();
  if (attachment_->world_size() == 1) {
    LoadAlone(path, options);
    return RefreshGiven();
  }
  Exchange("");
  std::string failure;
  if (attachment_->rank() == 0) {
    try {
      LoadAlone(path, options);
    } catch (const std::exception& error) {
      failure = absl::StrCat(half_loaded_ ? "1" : "0", error.what());
    }
  }
  failure = Exchange(std::move(failure)).front();
  DropFromDevice();
  half_loaded_ = absl::StartsWith(failure, "1");
  if (!failure.empty()) ThrowStatus(absl::AbortedError(failure.substr(1)));
  for (WeightResidency* const weight : weights_) weight->Stepped();
}

// The program may give them other sizes.
void TensorEngine::FollowBufferSizes() {
  for (FileWeight& weight : file_weights_) {
    if (weight.is_buffer) weight.shape = weight.tensor.sizes().vec();
  }
}

void TensorEngine::LoadAlone(const std::string& path, const LoadOptions& options) {
  FollowBufferSizes();
  WeightFile file = ValueOrThrow(WeightFile::Open(path, file_weights_, options), path);
  SettleTier();  // the end of the load would commit what there is
  half_loaded_ = true;
  const DaemonWait wait(*attachment_);
  const absl::Cleanup drop = [this] { DropFromDevice(); };
  LoadFrom(file);
  ThrowIfError(attachment_->session().EndLoad(), path);
  attachment_->EndEpoch();
  for (WeightResidency* const weight : weights_) weight->Stepped();
  half_loaded_ = false;
}

// The daemon drops half a load by itself, unless a step would make it part of its epoch.
void TensorEngine::CheckWhole() const {
  if (half_loaded_)
    ThrowStatus(MakeError(ErrorId::kHalfLoaded, absl::StrCat("job ", options_.job)));
}

void TensorEngine::SaveWeights(const std::string& folder, const SaveOptions& options,
                               std::span<const std::string> left_out) {
  Seal();
  CheckWhole();
  SettleGiven(/*writes=*/false);
  const bool is_average = SavesAverage(options, averaging_.is_on());
  FollowBufferSizes();
  const auto is_saved = [&](const FileWeight& weight) {
    return !absl::c_linear_search(left_out, weight.name);
  };
  std::vector<FileWeight> saved;
  absl::c_copy_if(file_weights_, std::back_inserter(saved), is_saved);
  // Every rank has buffers of its own; those of the one that saves count.
  auto writer = ValueOrThrow(CreateWeightFiles(folder, saved, options), folder);
  FileProgress progress("saving weights", saved);
  const std::unordered_map<std::string_view, uint32_t> ids = IdsInFiles();
  for (const FileWeight& weight : file_weights_) {
    if (weight.is_buffer) {
      if (is_saved(weight)) ThrowIfError(AppendBuffer(weight, *writer), folder);
      continue;
    }
    if (weight.ElementCount() == 0) continue;
    if (!is_saved(weight)) continue;
    const uint32_t id = ids.at(weight.name);
    const bool is_rows = attachment_->tensor(id).dimension_order.empty();
    const proto::Plane plane =
        is_average && HasAverage(id) ? proto::Plane::kAverage : proto::Plane::kWeight;
    ThrowIfError(
        is_rows ? SaveRows(id, plane, weight, *writer) : SaveReordered(id, plane, weight, *writer),
        absl::StrCat("parameter '", weight.name, "'"));
    progress.Done(weight);
  }
  ThrowIfError(writer->Commit(), folder);
}

// Of an average, which is kept in the type of the master: in the weight's.
static at::Tensor InTypeOf(const FileWeight& weight, const proto::PlaneSet& planes,
                           proto::Plane plane, std::byte* bytes, uint64_t count) {
  const bool is_wide = planes.Bits(plane) / 8 != c10::elementSize(weight.dtype);
  return at::from_blob(bytes, {static_cast<int64_t>(count)}, is_wide ? at::kFloat : weight.dtype)
      .to(weight.dtype);
}

static std::span<const std::byte> BytesIn(const at::Tensor& values) {
  return {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()};
}

absl::Status TensorEngine::SaveRows(uint32_t id, proto::Plane plane, const FileWeight& weight,
                                    HfCheckpointWriter& writer) {
  const proto::PlaneSet& planes = attachment_->input().catalogue.planes(id);
  return StreamOut(id, plane, planes.Bits(plane) / 8,
                   [&](uint64_t, uint64_t count, const std::byte* bytes) {
                     const at::Tensor values =
                         InTypeOf(weight, planes, plane, const_cast<std::byte*>(bytes), count);
                     return writer.Append(weight.name, BytesIn(values));
                   });
}

// One that does not lie row by row: all of it is in memory meanwhile.
absl::Status TensorEngine::SaveReordered(uint32_t id, proto::Plane plane, const FileWeight& weight,
                                         HfCheckpointWriter& writer) {
  const proto::Tensor& tensor = attachment_->tensor(id);
  const proto::PlaneSet& planes = attachment_->input().catalogue.planes(id);
  const uint64_t element_bytes = proto::DtypeBytes(tensor.dtype);
  std::vector<std::byte> rows(proto::kExtentElements * element_bytes);
  std::vector<std::byte> kept(planes.Bytes(plane, tensor.element_count));
  OFFLOAD_RETURN_IF_ERROR(CopyOut(id, plane, planes.Bits(plane) / 8, kept.data()));
  const at::Tensor values = InTypeOf(weight, planes, plane, kept.data(), tensor.element_count);
  const std::span<const std::byte> elements = BytesIn(values);
  for (uint64_t begin = 0; begin < tensor.element_count; begin += proto::kExtentElements) {
    const uint64_t count = std::min<uint64_t>(tensor.element_count - begin, proto::kExtentElements);
    CopyToRows(tensor.shape, tensor.dimension_order, element_bytes, {begin, count}, elements.data(),
               rows.data());
    OFFLOAD_RETURN_IF_ERROR(
        writer.Append(weight.name, std::span(rows.data(), count * element_bytes)));
  }
  return absl::OkStatus();
}

}  // namespace offload::zero3

#include "zero3/torch/weights_io.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/dimension_order.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/values_in_order.h"

namespace offload {
namespace zero3 {
namespace {

constexpr uint64_t kConversionElements = 64 * 1024;

constexpr std::pair<at::ScalarType, FileDtype> kDtypes[] = {
    {at::kFloat, FileDtype::kF32},        {at::kBFloat16, FileDtype::kBF16},
    {at::kHalf, FileDtype::kF16},         {at::kDouble, FileDtype::kF64},
    {at::kLong, FileDtype::kI64},         {at::kInt, FileDtype::kI32},
    {at::kShort, FileDtype::kI16},        {at::kChar, FileDtype::kI8},
    {at::kByte, FileDtype::kU8},          {at::kBool, FileDtype::kBool},
    {at::kComplexFloat, FileDtype::kC64},
};

std::optional<FileDtype> FileDtypeOf(at::ScalarType dtype) {
  for (const auto& [own, file] : kDtypes) {
    if (own == dtype) return file;
  }
  return std::nullopt;
}
std::optional<at::ScalarType> ScalarTypeOf(FileDtype dtype) {
  for (const auto& [own, file] : kDtypes) {
    if (file == dtype) return own;
  }
  return std::nullopt;
}

absl::StatusOr<FileDtype> FileDtypeOf(const std::string& name, at::ScalarType dtype) {
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble)
    return *FileDtypeOf(dtype);
  return MakeError(ErrorId::kUnsupportedModel,
                   absl::StrCat("parameter '", name, "' has dtype ", c10::toString(dtype),
                                ", files hold float32, bfloat16, float16 and float64"));
}

std::vector<uint64_t> FileShape(const FileWeight& weight) {
  return {weight.shape.begin(), weight.shape.end()};
}

absl::Status CheckIsInMemory(const FileWeight& weight) {
  const std::string name = absl::StrCat("parameter '", weight.name, "'");
  if (Residency::Of(weight.tensor) != nullptr) {
    return MakeError(ErrorId::kReleased, absl::StrCat(name, " is offloaded"),
                     "Use LoadWeights and SaveWeights of its offload::Engine");
  }
  if (!weight.tensor.is_meta() && weight.tensor.layout() == at::kStrided) return absl::OkStatus();
  return MakeError(ErrorId::kUnsupportedModel,
                   absl::StrCat(name, " is not a dense tensor in memory"));
}

std::byte* BytesOf(const at::Tensor& tensor) {
  return static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
}

// Weights and not buffers, before anything is read or written.
void CheckAreInMemory(const std::vector<FileWeight>& weights) {
  for (const FileWeight& weight : weights) {
    if (!weight.is_buffer) ThrowIfError(CheckIsInMemory(weight));
  }
}

// Through a tensor of its own where elements do not lie row by row, or on a device.
absl::Status LoadWeight(const FileWeight& weight, WeightFile& file) {
  if (weight.tensor.is_cpu() && weight.tensor.is_contiguous())
    return file.Read(weight, 0, weight.ElementCount(), BytesOf(weight.tensor));
  const at::NoGradGuard no_grad;
  const at::Tensor rows = at::empty(weight.shape, at::TensorOptions().dtype(weight.dtype));
  OFFLOAD_RETURN_IF_ERROR(file.Read(weight, 0, weight.ElementCount(), BytesOf(rows)));
  at::Tensor target = weight.tensor.detach();
  target.copy_(rows);
  return absl::OkStatus();
}

}  // namespace

uint64_t FileWeight::ElementCount() const {
  uint64_t count = 1;
  for (const int64_t size : shape) count *= static_cast<uint64_t>(size);
  return count;
}

std::vector<NamedTensor> NamedBuffers(const torch::nn::Module& module, const std::string& prefix) {
  std::vector<NamedTensor> named;
  for (const auto& item : module.named_buffers(/*recurse=*/true))
    named.push_back({prefix + item.key(), item.value()});
  return named;
}

std::vector<NamedTensor> NamedParameters(const torch::nn::Module& module,
                                         const std::string& prefix) {
  std::vector<NamedTensor> named;
  for (const auto& item : module.named_parameters(/*recurse=*/true))
    named.push_back({prefix + item.key(), item.value()});
  return named;
}

absl::StatusOr<std::vector<FileWeight>> FindFileWeights(std::span<const NamedTensor> tensors) {
  std::vector<FileWeight> weights;
  // Tied: the same view of the same memory.
  std::map<std::tuple<const void*, int64_t, std::vector<int64_t>, DimensionOrder>, size_t> known;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    OFFLOAD_RETURN_IF_ERROR(FileDtypeOf(name, tensor.scalar_type()).status());
    const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    const void* const memory = tensor.numel() == 0 ? static_cast<const void*>(impl)
                                                   : impl->unsafe_storage().unsafeGetStorageImpl();
    const auto [found, is_new] =
        known.try_emplace({memory, tensor.storage_offset(), tensor.sizes().vec(),
                           OrderOf(tensor.sizes(), tensor.strides())},
                          weights.size());
    if (is_new) {
      weights.push_back({.name = name,
                         .shape = tensor.sizes().vec(),
                         .dtype = tensor.scalar_type(),
                         .tensor = tensor});
    } else {
      weights[found->second].other_names.push_back(name);
    }
  }
  return weights;
}

absl::Status AddFileBuffers(std::span<const NamedTensor> buffers,
                            std::vector<FileWeight>& weights) {
  std::unordered_set<const void*> known;
  std::unordered_set<std::string> names;
  for (const FileWeight& weight : weights) {
    names.insert(weight.name);
    names.insert(weight.other_names.begin(), weight.other_names.end());
  }
  for (const auto& [name, tensor] : buffers) {
    if (!tensor.defined() || !known.insert(tensor.unsafeGetTensorImpl()).second ||
        !names.insert(name).second)
      continue;
    if (!FileDtypeOf(tensor.scalar_type()).has_value()) {
      return MakeError(ErrorId::kUnsupportedModel,
                       absl::StrCat("buffer '", name, "' has dtype ",
                                    c10::toString(tensor.scalar_type()), ", which files have not"));
    }
    weights.push_back({.name = name,
                       .shape = tensor.sizes().vec(),
                       .dtype = tensor.scalar_type(),
                       .tensor = tensor,
                       .is_buffer = true});
  }
  return absl::OkStatus();
}

WeightFile::WeightFile(HfCheckpoint checkpoint)
    : checkpoint_(std::move(checkpoint)), buffer_(kConversionElements * sizeof(float)) {}

absl::StatusOr<WeightFile> WeightFile::Open(const std::string& path,
                                            const std::vector<FileWeight>& weights,
                                            const LoadOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(HfCheckpoint checkpoint, HfCheckpoint::Open(path));
  std::vector<WantedTensor> wanted;
  std::vector<std::string> ignored = options.ignored;
  const bool has_buffers = std::any_of(weights.begin(), weights.end(), [&](const auto& weight) {
    return weight.is_buffer && checkpoint.Find(weight.name) != nullptr;
  });
  for (const FileWeight& weight : weights) {
    if (weight.is_buffer && !has_buffers) continue;
    wanted.push_back({.name = weight.name,
                      .shape = FileShape(weight),
                      .is_double = weight.dtype == at::kDouble,
                      .any_type = weight.is_buffer});
    ignored.insert(ignored.end(), weight.other_names.begin(), weight.other_names.end());
  }
  OFFLOAD_RETURN_IF_ERROR(CheckFits(checkpoint, wanted, ignored));
  return WeightFile(std::move(checkpoint));
}

absl::Status WeightFile::ReadBuffer(const FileWeight& buffer) {
  const FileEntry* const entry = checkpoint_.Find(buffer.name);
  OFFLOAD_CHECK(entry != nullptr) << buffer.name;
  const std::optional<at::ScalarType> dtype = ScalarTypeOf(entry->tensor.dtype);
  if (!dtype.has_value() || (*dtype != buffer.dtype &&
                             !(c10::isFloatingType(*dtype) && c10::isFloatingType(buffer.dtype)))) {
    return MakeError(ErrorId::kFileDtype,
                     absl::StrCat("buffer '", buffer.name, "' has the type ",
                                  std::string(FileDtypeName(entry->tensor.dtype))));
  }
  const at::NoGradGuard no_grad;
  at::Tensor read = at::empty(buffer.shape, at::TensorOptions().dtype(*dtype));
  const size_t size_bytes = read.numel() * read.element_size();
  OFFLOAD_RETURN_IF_ERROR(checkpoint_.Read(
      buffer.name, 0, std::span(static_cast<std::byte*>(read.mutable_data_ptr()), size_bytes)));
  at::Tensor target = buffer.tensor.detach();
  target.copy_(read);
  return absl::OkStatus();
}

absl::Status AppendBuffer(const FileWeight& buffer, HfCheckpointWriter& writer) {
  const at::Tensor bytes = ValuesInOrder(buffer.tensor);
  return writer.Append(buffer.name, std::span(static_cast<const std::byte*>(bytes.const_data_ptr()),
                                              bytes.numel() * bytes.element_size()));
}

absl::Status WeightFile::Read(const FileWeight& weight, uint64_t first_element,
                              uint64_t element_count, std::byte* target) {
  const FileEntry* const entry = checkpoint_.Find(weight.name);
  OFFLOAD_CHECK(entry != nullptr) << weight.name;
  const at::ScalarType file_dtype = *ScalarTypeOf(entry->tensor.dtype);
  const uint64_t file_bytes = c10::elementSize(file_dtype);
  const uint64_t own_bytes = c10::elementSize(weight.dtype);
  if (file_dtype == weight.dtype) {
    return checkpoint_.Read(weight.name, first_element * own_bytes,
                            std::span(target, element_count * own_bytes));
  }
  const at::NoGradGuard no_grad;
  for (uint64_t done = 0; done < element_count;) {
    const uint64_t count = std::min(element_count - done, kConversionElements);
    OFFLOAD_RETURN_IF_ERROR(checkpoint_.Read(weight.name, (first_element + done) * file_bytes,
                                             std::span(buffer_.data(), count * file_bytes)));
    const int64_t size = static_cast<int64_t>(count);
    at::from_blob(target + done * own_bytes, {size}, weight.dtype)
        .copy_(at::from_blob(buffer_.data(), {size}, file_dtype));
    done += count;
  }
  return absl::OkStatus();
}

bool SavesAverage(const SaveOptions& options, bool keeps_average) {
  if (options.plane == "weight") return false;
  const std::string call = absl::StrCat("SaveWeights() of plane \"", options.plane, "\"");
  if (options.plane != "average")
    ThrowStatus(MakeError(ErrorId::kBadValue, call, "Save \"weight\" or \"average\""));
  if (!keeps_average) {
    ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat(call, ", which the job does not keep"),
                          "Set Options::average when the job is made"));
  }
  return true;
}

absl::StatusOr<std::unique_ptr<HfCheckpointWriter>> CreateWeightFiles(
    const std::string& folder, const std::vector<FileWeight>& weights, const SaveOptions& options) {
  if (folder.empty()) return MakeError(ErrorId::kFileWrite, "SaveWeights() is given no folder");
  std::vector<FileTensor> tensors;
  for (const FileWeight& weight : weights) {
    OFFLOAD_ASSIGN_OR_RETURN(const FileDtype dtype, weight.is_buffer
                                                        ? *FileDtypeOf(weight.dtype)
                                                        : FileDtypeOf(weight.name, weight.dtype));
    tensors.push_back({weight.name, dtype, FileShape(weight)});
  }
  return HfCheckpointWriter::Create(folder, std::move(tensors),
                                    {.shard_bytes = options.shard_bytes});
}

void LoadIntoMemory(const std::vector<FileWeight>& weights, const std::string& path,
                    const LoadOptions& options) {
  auto file = ValueOrThrow(WeightFile::Open(path, weights, options), path);
  CheckAreInMemory(weights);
  for (const FileWeight& weight : weights) {
    if (!file.Has(weight)) continue;
    if (weight.is_buffer) {
      ThrowIfError(file.ReadBuffer(weight), path);
      continue;
    }
    ThrowIfError(LoadWeight(weight, file), path);
    // As copy_() does: whoever keeps a master or a saved tensor sees the change.
    weight.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void SaveFromMemory(const std::vector<FileWeight>& weights, const std::string& folder,
                    const SaveOptions& options) {
  CheckAreInMemory(weights);
  auto writer = ValueOrThrow(CreateWeightFiles(folder, weights, options), folder);
  for (const FileWeight& weight : weights) {
    if (weight.is_buffer) {
      ThrowIfError(AppendBuffer(weight, *writer), folder);
      continue;
    }
    const at::Tensor rows = weight.tensor.detach().contiguous().cpu();
    ThrowIfError(
        writer->Append(weight.name, std::span<const std::byte>(BytesOf(rows),
                                                               rows.numel() * rows.element_size())),
        folder);
  }
  ThrowIfError(writer->Commit(), folder);
}

std::vector<FileWeight> FileWeightsOf(const torch::nn::Module& module) {
  std::vector<FileWeight> weights = ValueOrThrow(FindFileWeights(NamedParameters(module)));
  ThrowIfError(AddFileBuffers(NamedBuffers(module), weights));
  return weights;
}

}  // namespace zero3

void LoadWeights(torch::nn::Module& module, const std::string& path, const LoadOptions& options) {
  zero3::LoadIntoMemory(zero3::FileWeightsOf(module), path, options);
}

void SaveWeights(const torch::nn::Module& module, const std::string& folder,
                 const SaveOptions& options) {
  zero3::SaveFromMemory(zero3::FileWeightsOf(module), folder, options);
}

}  // namespace offload

#include "tools/plan_model.h"

#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/hf_layout.h"

namespace offload::tools {
namespace {

namespace fs = std::filesystem;

constexpr size_t kConfigBytesMax = 1 << 20;
constexpr char kConfigName[] = "config.json";

absl::StatusOr<std::string> ReadConfig(const fs::path& path) {
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? path / kConfigName : path;
  std::ifstream stream(file, std::ios::binary);
  std::string text(kConfigBytesMax + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(stream.gcount()));
  if (!text.empty() && text.size() <= kConfigBytesMax) return text;
  return MakeError(ErrorId::kBadValue,
                   absl::StrCat(file.string(), " cannot be read, is empty, or is larger than ",
                                kConfigBytesMax, " bytes"),
                   "Name a config.json, or the directory that holds it");
}

PlanModel ModelOf(const zero3::ModelShape& shape, proto::Dtype dtype) {
  return {zero3::Describe(shape), zero3::LlamaTensors(shape, dtype)};
}

absl::StatusOr<PlanModel> FromConfig(const std::string& path, proto::Dtype dtype) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::string text, ReadConfig(path));
  OFFLOAD_ASSIGN_OR_RETURN(const zero3::ModelShape shape, zero3::ParseLlamaConfig(text));
  return ModelOf(shape, dtype);
}

absl::StatusOr<PlanModel> FromParameters(const ModelSource& source, proto::Dtype dtype) {
  OFFLOAD_ASSIGN_OR_RETURN(const uint64_t parameters, ParseCount(source.parameters));
  OFFLOAD_ASSIGN_OR_RETURN(
      const zero3::ModelShape shape,
      zero3::ShapeForParameters({.parameters = parameters, .vocabulary = source.vocabulary}));
  return ModelOf(shape, dtype);
}

// What is not of a floating type is a table, never a parameter; so are the rotary frequencies that
// old checkpoints hold.
bool IsParameter(const zero3::FileTensor& tensor) {
  const bool is_float =
      tensor.dtype == zero3::FileDtype::kF32 || tensor.dtype == zero3::FileDtype::kF16 ||
      tensor.dtype == zero3::FileDtype::kBF16 || tensor.dtype == zero3::FileDtype::kF64;
  return is_float && !tensor.name.ends_with("rotary_emb.inv_freq");
}

absl::StatusOr<PlanModel> FromSafetensors(const std::string& path, proto::Dtype dtype) {
  OFFLOAD_ASSIGN_OR_RETURN(const zero3::HfCheckpoint checkpoint, zero3::HfCheckpoint::Open(path));
  PlanModel model;
  for (const std::string& name : checkpoint.Names()) {
    const zero3::FileEntry& entry = *checkpoint.Find(name);
    if (!IsParameter(entry.tensor)) continue;
    proto::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape.assign(entry.tensor.shape.begin(), entry.tensor.shape.end());
    tensor.element_count = entry.size_bytes * 8 / zero3::FileDtypeBits(entry.tensor.dtype);
    model.tensors.push_back(std::move(tensor));
  }
  if (model.tensors.empty()) {
    return MakeError(ErrorId::kFileMismatch, absl::StrCat(path, " holds no parameters"));
  }
  model.description = absl::StrCat(path, ", ", model.tensors.size(), " tensors");
  return model;
}

// A path without a flag: what it is says what it means.
absl::StatusOr<PlanModel> FromPath(const std::string& path, proto::Dtype dtype) {
  std::error_code ignored;
  const bool is_checkpoint =
      fs::is_directory(path, ignored)
          ? !fs::exists(fs::path(path) / kConfigName, ignored) &&
                (fs::exists(fs::path(path) / zero3::kSingleFileName, ignored) ||
                 fs::exists(fs::path(path) / zero3::kIndexFileName, ignored))
          : path.ends_with(".safetensors");
  return is_checkpoint ? FromSafetensors(path, dtype) : FromConfig(path, dtype);
}

}  // namespace

absl::StatusOr<PlanModel> ReadModel(const ModelSource& source, proto::Dtype dtype) {
  int given = 0;
  for (const std::string* text :
       {&source.model, &source.config, &source.safetensors, &source.parameters}) {
    if (!text->empty()) ++given;
  }
  if (given != 1) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("a plan needs one model, not ", given),
                     "Give --params N, or a config.json, or a checkpoint");
  }
  if (!source.parameters.empty()) return FromParameters(source, dtype);
  if (!source.config.empty()) return FromConfig(source.config, dtype);
  if (!source.safetensors.empty()) return FromSafetensors(source.safetensors, dtype);
  return FromPath(source.model, dtype);
}

}  // namespace offload::tools

#include "tools/universal_source.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/split.h"
#include "tools/universal.h"
#include "zero3/file_errors.h"

namespace offload::tools {
namespace {

namespace fs = std::filesystem;
using zero3::FileDtype;
using zero3::PickledObject;
using Kind = PickledObject::Kind;

absl::Status CheckName(const std::string& name) {
  if (!LeadsOut(name)) return absl::OkStatus();
  return MakeError(ErrorId::kFileMismatch,
                   absl::StrCat("a parameter is called \"", name, "\", which is no folder"));
}

absl::StatusOr<std::string> FolderOfLatest(const std::string& folder) {
  const fs::path latest = fs::path(folder) / kLatestUniversal;
  std::error_code error;
  if (!fs::is_regular_file(latest, error)) return folder;
  std::ifstream file(latest);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return zero3::CannotRead(latest.string(), EIO);
  const std::string tag(absl::StripAsciiWhitespace(text.str()));
  if (tag.empty() || tag == ".." || tag == "." || fs::path(tag).filename() != fs::path(tag)) {
    return zero3::Malformed(latest.string(),
                            absl::StrCat("it names '", tag, "', which is no folder beside it"));
  }
  return (fs::path(folder) / tag).string();
}

absl::StatusOr<std::shared_ptr<const zero3::SavedFile>> OpenFile(const std::string& path) {
  OFFLOAD_ASSIGN_OR_RETURN(zero3::SavedFile file, zero3::SavedFile::Open(path));
  return std::make_shared<const zero3::SavedFile>(std::move(file));
}

// A file that holds data, and nothing that would have to be run: what it holds, or its "param".
absl::StatusOr<const PickledObject*> HeldBy(const zero3::SavedFile& file) {
  if (file.contents().has_others())
    return zero3::Malformed(file.path(), "it holds more than a tensor, and is not run");
  const PickledObject& root = file.contents().root();
  if (root.kind != Kind::kDictionary) return &root;
  const PickledObject* const held = root.Find("param");
  if (held == nullptr) return zero3::Malformed(file.path(), "it has no \"param\"");
  return held;
}

// The one element of a tensor.
absl::StatusOr<double> ElementOf(std::shared_ptr<const zero3::SavedFile> file,
                                 const zero3::TensorOnFile& tensor) {
  const std::string path = file->path();
  OFFLOAD_ASSIGN_OR_RETURN(zero3::SavedTensorReader reader,
                           zero3::SavedTensorReader::Open(std::move(file), tensor));
  std::byte bytes[sizeof(double)] = {};
  OFFLOAD_RETURN_IF_ERROR(reader.Next(std::span(bytes).first(reader.element_bytes())));
  const auto as = [&]<typename T>(T number) {
    std::memcpy(&number, bytes, sizeof(number));
    return number;
  };
  switch (tensor.dtype) {
    case FileDtype::kF32:
      return as(float{});
    case FileDtype::kF64:
      return as(double{});
    case FileDtype::kBF16: {
      const uint32_t bits = uint32_t{as(uint16_t{})} << 16;
      float number;
      std::memcpy(&number, &bits, sizeof(number));
      return number;
    }
    case FileDtype::kF16:
      return kernels::FromHalf(as(kernels::Half{}));
    case FileDtype::kI64:
      return static_cast<double>(as(int64_t{}));
    case FileDtype::kI32:
      return as(int32_t{});
    case FileDtype::kI16:
      return as(int16_t{});
    case FileDtype::kI8:
      return as(int8_t{});
    case FileDtype::kU8:
      return as(uint8_t{});
    default:
      return zero3::Malformed(path, "it holds no number of steps");
  }
}

// A number of steps, which is a number or a tensor of one.
absl::StatusOr<uint64_t> CountOf(const std::shared_ptr<const zero3::SavedFile>& file,
                                 const PickledObject& held) {
  std::optional<double> number = held.Number();
  if (held.kind == Kind::kTensor && held.tensor->element_count == 1) {
    OFFLOAD_ASSIGN_OR_RETURN(number, ElementOf(file, *held.tensor));
  }
  constexpr double kStepsMax = 9007199254740992;  // from there on not every number is one
  if (number.has_value() && *number >= 0 && *number < kStepsMax && *number == std::floor(*number))
    return static_cast<uint64_t>(*number);
  return zero3::Malformed(file->path(), "it holds no number of steps");
}

bool HoldsNumbers(FileDtype dtype) {
  return dtype == FileDtype::kF32 || dtype == FileDtype::kF64 || dtype == FileDtype::kBF16 ||
         dtype == FileDtype::kF16;
}

}  // namespace

absl::StatusOr<UniversalSource> UniversalSource::Open(const std::string& folder) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::string tag, FolderOfLatest(folder));
  const fs::path zero = fs::path(tag) / "zero";
  std::error_code error;
  if (fs::is_directory(zero, error)) return UniversalSource(zero.string());
  return MakeError(
      ErrorId::kFileRead,
      absl::StrCat(tag, " has no folder zero: it is no universal checkpoint of DeepSpeed"),
      "Convert a checkpoint of DeepSpeed with its ds_to_universal.py");
}

bool UniversalSource::Has(const std::string& name) const {
  std::error_code error;
  return CheckName(name).ok() && fs::is_directory(fs::path(zero_) / name, error);
}

absl::StatusOr<std::vector<std::string>> UniversalSource::Names() const {
  std::vector<std::string> names;
  std::error_code error;
  for (auto it = fs::directory_iterator(zero_, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    std::error_code ignored;
    if (fs::is_regular_file(it->path() / "fp32.pt", ignored))
      names.push_back(it->path().filename().string());
  }
  if (error) return zero3::CannotRead(zero_, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::set<std::string>> UniversalSource::StatesOf(const std::string& name) const {
  OFFLOAD_RETURN_IF_ERROR(CheckName(name));
  std::set<std::string> states;
  std::error_code error;
  const fs::path folder = fs::path(zero_) / name;
  for (auto it = fs::directory_iterator(folder, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    const fs::path file = it->path().filename();
    if (file.extension() == ".pt" && file != "fp32.pt" && file != "step.pt")
      states.insert(file.stem().string());
  }
  if (error) return zero3::CannotRead(folder.string(), error.value());
  return states;
}

absl::StatusOr<std::optional<uint64_t>> UniversalSource::StepOf(const std::string& name) const {
  OFFLOAD_RETURN_IF_ERROR(CheckName(name));
  const fs::path path = fs::path(zero_) / name / "step.pt";
  std::error_code error;
  if (!fs::exists(path, error)) return std::optional<uint64_t>();
  OFFLOAD_ASSIGN_OR_RETURN(const std::shared_ptr<const zero3::SavedFile> file,
                           OpenFile(path.string()));
  OFFLOAD_ASSIGN_OR_RETURN(const PickledObject* const held, HeldBy(*file));
  OFFLOAD_ASSIGN_OR_RETURN(const uint64_t count, CountOf(file, *held));
  return std::optional<uint64_t>(count);
}

// Beside the count that file holds whatever its program has kept: that is left out, and not run.
absl::StatusOr<std::set<uint64_t>> UniversalSource::CommonSteps() {
  if (common_steps_.has_value()) return *common_steps_;
  std::set<uint64_t> steps;
  const fs::path path = fs::path(zero_) / "optimizer_state.pt";
  std::error_code error;
  if (fs::exists(path, error)) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::shared_ptr<const zero3::SavedFile> file,
                             OpenFile(path.string()));
    const PickledObject* const optimizer = file->contents().root().Find("optimizer_state_dict");
    const PickledObject* const states = optimizer != nullptr ? optimizer->Find("state") : nullptr;
    const bool is_there = states != nullptr && states->kind == Kind::kDictionary;
    for (size_t i = 1; is_there && i < states->items.size(); i += 2) {
      const PickledObject* const step = states->items[i]->Find("step");
      if (step == nullptr) continue;
      OFFLOAD_ASSIGN_OR_RETURN(const uint64_t count, CountOf(file, *step));
      steps.insert(count);
    }
  }
  common_steps_ = steps;
  return steps;
}

absl::StatusOr<zero3::SavedTensorReader> UniversalSource::Tensor(const proto::Tensor& parameter,
                                                                 const std::string& file) const {
  OFFLOAD_RETURN_IF_ERROR(CheckName(parameter.name));
  const fs::path path = fs::path(zero_) / parameter.name / absl::StrCat(file, ".pt");
  OFFLOAD_ASSIGN_OR_RETURN(const std::shared_ptr<const zero3::SavedFile> saved,
                           OpenFile(path.string()));
  OFFLOAD_ASSIGN_OR_RETURN(const PickledObject* const held, HeldBy(*saved));
  if (held->kind != Kind::kTensor || !HoldsNumbers(held->tensor->dtype))
    return zero3::Malformed(path.string(), "it holds no tensor of numbers");
  const zero3::TensorOnFile& tensor = *held->tensor;
  const bool is_flat = tensor.shape.size() == 1 && tensor.element_count == parameter.element_count;
  if (tensor.shape != parameter.shape && !is_flat) {
    return MakeError(
        ErrorId::kFileMismatch,
        absl::StrCat(path.string(), " does not fit the model: '", parameter.name, "' has shape [",
                     absl::StrJoin(tensor.shape, ", "), "], the model's has [",
                     absl::StrJoin(parameter.shape, ", "), "]"));
  }
  return zero3::SavedTensorReader::Open(saved, tensor);
}

}  // namespace offload::tools

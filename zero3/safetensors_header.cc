// The pure part of safetensors.h: types, sizes, and the check of a header.

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/file_errors.h"
#include "zero3/safetensors.h"
#include "zero3/strict_json.h"

namespace offload::zero3 {
namespace {

struct DtypeRow {
  FileDtype dtype;
  std::string_view name;
  uint64_t bits;
};

constexpr DtypeRow kDtypes[] = {
    {FileDtype::kBool, "BOOL", 8},
    {FileDtype::kU8, "U8", 8},
    {FileDtype::kI8, "I8", 8},
    {FileDtype::kI16, "I16", 16},
    {FileDtype::kU16, "U16", 16},
    {FileDtype::kI32, "I32", 32},
    {FileDtype::kU32, "U32", 32},
    {FileDtype::kI64, "I64", 64},
    {FileDtype::kU64, "U64", 64},
    {FileDtype::kF16, "F16", 16},
    {FileDtype::kBF16, "BF16", 16},
    {FileDtype::kF32, "F32", 32},
    {FileDtype::kF64, "F64", 64},
    {FileDtype::kC64, "C64", 64},
    {FileDtype::kF8E4M3, "F8_E4M3", 8},
    {FileDtype::kF8E5M2, "F8_E5M2", 8},
    {FileDtype::kF8E8M0, "F8_E8M0", 8},
    {FileDtype::kF8E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {FileDtype::kF8E5M2FNUZ, "F8_E5M2FNUZ", 8},
    {FileDtype::kF6E2M3, "F6_E2M3", 6},
    {FileDtype::kF6E3M2, "F6_E3M2", 6},
    {FileDtype::kF4, "F4", 4},
};

constexpr size_t kShownNameBytes = 120;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Follows the only structure a header may have:
//   {"__metadata__": null | {string: string}, name: {"dtype": string, "shape": [n…],
//   "data_offsets": [b, e]}, …}
class HeaderHandler final : public StrictJsonHandler {
 public:
  FileHeader header;
  std::vector<std::string> dtypes;  // beside header.entries, still as text

  bool null() override {
    return state_ == State::kMetadataValue ? Become(State::kTop) : Refuse("null");
  }

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::kBegin:
        return Become(State::kTop);
      case State::kMetadataValue:
        return Become(State::kMetadata);
      case State::kTensorValue:
        return Become(State::kTensor);
      default:
        return Refuse("an object");
    }
  }

  bool end_object() override {
    switch (state_) {
      case State::kTop:
        return Become(State::kEnd);
      case State::kMetadata:
        return Become(State::kTop);
      case State::kTensor:
        return EndTensor();
      default:
        return Refuse("the end of an object");
    }
  }

  bool key(string_t& name) override {
    switch (state_) {
      case State::kTop:
        return TopKey(name);
      case State::kMetadata:
        metadata_key_ = name;
        return !header.metadata.contains(name) ? Become(State::kMetadataText) : Twice(name);
      case State::kTensor:
        return TensorKey(name);
      default:
        return Refuse("a key");
    }
  }

  bool string(string_t& text) override {
    switch (state_) {
      case State::kMetadataText:
        header.metadata.emplace(metadata_key_, text);
        return Become(State::kMetadata);
      case State::kDtype:
        dtypes.back() = text;
        return Become(State::kTensor);
      default:
        return Refuse("a string");
    }
  }

  bool start_array(std::size_t) override {
    if (state_ == State::kShapeValue) return Become(State::kShape);
    if (state_ == State::kOffsetsValue) return Become(State::kOffsets);
    return Refuse("an array");
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (state_ == State::kShape) {
      std::vector<uint64_t>& shape = header.entries.back().tensor.shape;
      shape.push_back(number);
      return shape.size() <= FileLimits().rank || Refuse("too many dimensions");
    }
    if (state_ == State::kOffsets && offset_count_ < 2) {
      offsets_[offset_count_++] = number;
      return true;
    }
    return Refuse("a number");
  }

  bool end_array() override {
    if (state_ == State::kShape) return Become(State::kTensor);
    if (state_ == State::kOffsets && offset_count_ == 2) return EndOffsets();
    return Refuse("the end of an array");
  }

 protected:
  std::string Position() const override {
    if (header.entries.empty() || state_ == State::kTop) return "the top level";
    return absl::StrCat("tensor \"", ShownName(header.entries.back().tensor.name), "\"");
  }

 private:
  enum class State {
    kBegin,
    kTop,
    kMetadataValue,
    kMetadata,
    kMetadataText,
    kTensorValue,
    kTensor,
    kDtype,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kEnd,
  };

  bool Become(State state) {
    state_ = state;
    return true;
  }

  bool Twice(std::string_view name) {
    return Fail(absl::StrCat("has the key \"", ShownName(name), "\" twice"));
  }

  // Tensor names are checked for duplicates afterwards, by sorting: no second copy of all names
  // here.
  bool TopKey(const std::string& name) {
    if (name == kMetadataKey) {
      if (has_metadata_) return Twice(name);
      has_metadata_ = true;
      return Become(State::kMetadataValue);
    }
    FileEntry entry;
    entry.tensor.name = name;
    header.entries.push_back(std::move(entry));
    dtypes.emplace_back();
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return Become(State::kTensorValue);
  }

  bool TensorKey(const std::string& name) {
    const auto once = [&](bool& seen, State next) {
      if (std::exchange(seen, true)) return Twice(name);
      return Become(next);
    };
    if (name == "dtype") return once(has_dtype_, State::kDtype);
    if (name == "shape") return once(has_shape_, State::kShapeValue);
    offset_count_ = 0;
    if (name == "data_offsets") return once(has_offsets_, State::kOffsetsValue);
    return Refuse(absl::StrCat("the key \"", ShownName(name), "\""));
  }

  bool EndOffsets() {
    if (offsets_[1] < offsets_[0]) return Refuse("an end before the begin");
    header.entries.back().offset_bytes = offsets_[0];
    header.entries.back().size_bytes = offsets_[1] - offsets_[0];
    return Become(State::kTensor);
  }

  bool EndTensor() {
    if (!has_dtype_ || !has_shape_ || !has_offsets_) {
      return Fail(absl::StrCat("lacks dtype, shape or data_offsets at ", Position()));
    }
    return Become(State::kTop);
  }

  State state_ = State::kBegin;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::string metadata_key_;
  uint64_t offsets_[2] = {0, 0};
  int offset_count_ = 0;
};

std::string Quoted(const FileEntry& entry) {
  return absl::StrCat("tensor \"", ShownName(entry.tensor.name), "\"");
}

absl::Status CheckNames(const std::vector<FileEntry>& entries, const std::string& path) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const FileEntry& entry : entries) names.push_back(entry.tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return absl::OkStatus();
  return Malformed(path, absl::StrCat("the header has the key \"", ShownName(*twice), "\" twice"));
}

absl::Status CheckSize(const FileEntry& entry, const std::string& path) {
  const std::optional<uint64_t> size = DataBytes(entry.tensor);
  if (size == entry.size_bytes) return absl::OkStatus();
  return Malformed(path, absl::StrCat(Quoted(entry), " has ", entry.size_bytes,
                                      " bytes, but its shape and type make ",
                                      size.has_value() ? absl::StrCat(*size) : "an overflow"));
}

// Sorted by place, every tensor begins where the last one ended.
absl::Status CheckCover(const std::vector<FileEntry>& entries, uint64_t data_bytes,
                        const std::string& path) {
  uint64_t end = 0;
  for (const FileEntry& entry : entries) {
    if (entry.offset_bytes != end) {
      const std::string_view fault = entry.offset_bytes < end ? "overlaps" : "leaves a hole behind";
      return Malformed(path, absl::StrCat(Quoted(entry), " begins at ", entry.offset_bytes, " and ",
                                          std::string(fault), " the one that ends at ", end));
    }
    if (!IsInside(entry.offset_bytes, entry.size_bytes, data_bytes)) {
      return Malformed(
          path, absl::StrCat(Quoted(entry), " ends at ", entry.offset_bytes + entry.size_bytes,
                             ", behind the data of ", data_bytes, " bytes"));
    }
    end += entry.size_bytes;
  }
  if (end == data_bytes) return absl::OkStatus();
  return Malformed(path, absl::StrCat("tensors end at ", end, ", the data at ", data_bytes));
}

}  // namespace

std::string_view FileDtypeName(FileDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }

std::optional<FileDtype> FileDtypeByName(std::string_view name) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

uint64_t FileDtypeBits(FileDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bits; }

std::optional<uint64_t> DataBytes(const FileTensor& tensor) {
  uint64_t bits = FileDtypeBits(tensor.dtype);
  // A zero anywhere makes the tensor empty, whatever the other dimensions would overflow to.
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) return 0;
  for (const uint64_t dimension : tensor.shape) {
    const std::optional<uint64_t> product = CheckedMultiply(bits, dimension);
    if (!product.has_value()) return std::nullopt;
    bits = *product;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

absl::StatusOr<FileHeader> ParseHeader(std::string_view json, uint64_t data_begin_bytes,
                                       uint64_t data_bytes, const std::string& path) {
  if (json.starts_with(kByteOrderMark)) return Malformed(path, "the header begins with a mark");
  HeaderHandler handler;
  if (!ReadStrictJson(json, handler)) {
    return Malformed(path, absl::StrCat("the header ", handler.error()));
  }
  FileHeader header = std::move(handler.header);
  for (size_t i = 0; i < header.entries.size(); ++i) {
    const std::optional<FileDtype> dtype = FileDtypeByName(handler.dtypes[i]);
    if (!dtype.has_value()) {
      return MakeError(ErrorId::kFileDtype,
                       absl::StrCat(path, ": ", Quoted(header.entries[i]), " has the type \"",
                                    ShownName(handler.dtypes[i]), "\""));
    }
    header.entries[i].tensor.dtype = *dtype;
    OFFLOAD_RETURN_IF_ERROR(CheckSize(header.entries[i], path));
  }
  OFFLOAD_RETURN_IF_ERROR(CheckNames(header.entries, path));
  std::sort(header.entries.begin(), header.entries.end(),
            [](const FileEntry& a, const FileEntry& b) {
              return std::tie(a.offset_bytes, a.size_bytes, a.tensor.name) <
                     std::tie(b.offset_bytes, b.size_bytes, b.tensor.name);
            });
  OFFLOAD_RETURN_IF_ERROR(CheckCover(header.entries, data_bytes, path));
  for (FileEntry& entry : header.entries) entry.offset_bytes += data_begin_bytes;
  return header;
}

std::string ShownName(std::string_view name) {
  const std::string shown = absl::Utf8SafeCHexEscape(std::string(name.substr(0, kShownNameBytes)));
  return name.size() > kShownNameBytes ? shown + "…" : shown;
}

}  // namespace offload::zero3

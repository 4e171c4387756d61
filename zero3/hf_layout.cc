#include "zero3/hf_layout.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "zero3/file_errors.h"
#include "zero3/strict_json.h"

namespace offload::zero3 {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaximumTextBytes = 100'000'000;
constexpr size_t kMaximumShards = 512;  // each is an open file
constexpr std::string_view kExtension = ".safetensors";
constexpr std::string_view kRotaryTable = "rotary_emb.inv_freq";

bool IsPlainFileName(std::string_view name) {
  return name.size() > kExtension.size() && name.size() <= 255 && name.ends_with(kExtension) &&
         !name.starts_with('.') && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

// Follows {"weight_map": {name: file, …}, anything else: skipped}.
class IndexHandler final : public StrictJsonHandler {
 public:
  HfIndex index;
  bool has_map = false;

  bool null() override { return Skipped(); }
  bool boolean(bool) override { return Skipped(); }
  bool number_integer(number_integer_t) override { return Skipped(); }
  bool number_unsigned(number_unsigned_t) override { return Skipped(); }
  bool number_float(number_float_t, const string_t&) override { return Skipped(); }

  bool string(string_t& text) override {
    if (!in_map_) return Skipped();
    if (!IsPlainFileName(text)) {
      return Fail(absl::StrCat("names the file \"", ShownName(text), "\" for a tensor"));
    }
    if (!index.file_by_tensor.emplace(name_, text).second) {
      return Fail(absl::StrCat("has the key \"", ShownName(name_), "\" twice"));
    }
    return true;
  }

  bool key(string_t& name) override {
    if (in_map_) {
      name_ = name;
    } else if (depth_ == 1) {
      if (!top_keys_.insert(name).second) return Fail("has a key twice: " + ShownName(name));
      map_follows_ = name == "weight_map";
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (in_map_) return Refuse("an object");
    if (map_follows_) in_map_ = has_map = !(map_follows_ = false);
    ++depth_;
    return true;
  }
  bool end_object() override {
    in_map_ = false;
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    ++depth_;
    return Skipped();
  }
  bool end_array() override {
    --depth_;
    return true;
  }

 protected:
  std::string Position() const override {
    return in_map_ ? absl::StrCat("\"", ShownName(name_), "\"") : "the top level";
  }

 private:
  // A value that does not matter, unless it stands where the map must be or is all there is.
  bool Skipped() {
    return in_map_ || map_follows_ || depth_ == 0 ? Refuse("another value than the map's") : true;
  }

  uint64_t depth_ = 0;
  bool map_follows_ = false, in_map_ = false;
  std::string name_;
  std::set<std::string> top_keys_;
};

std::string ShapeText(const std::vector<uint64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::Status CheckTensorFits(const FileEntry* entry, const WantedTensor& wanted) {
  const std::string name = absl::StrCat("tensor \"", ShownName(wanted.name), "\"");
  if (entry == nullptr) {
    return MakeError(ErrorId::kFileMismatch, absl::StrCat(name, " is not in the checkpoint"));
  }
  if (entry->tensor.shape != wanted.shape) {
    return MakeError(
        ErrorId::kFileMismatch,
        absl::StrCat(name, " has the shape ", ShapeText(entry->tensor.shape),
                     " in the checkpoint, ", ShapeText(wanted.shape), " in the model"));
  }
  const FileDtype dtype = entry->tensor.dtype;
  if (wanted.any_type || dtype == FileDtype::kF32 || dtype == FileDtype::kBF16 ||
      dtype == FileDtype::kF16 || (wanted.is_double && dtype == FileDtype::kF64)) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kFileDtype,
                   absl::StrCat(name, " has the type ", std::string(FileDtypeName(dtype))));
}

// Cuts the tensors, in their order, into shards of at most `shard_bytes`.
absl::StatusOr<std::vector<std::vector<FileTensor>>> Cut(std::vector<FileTensor> tensors,
                                                         uint64_t shard_bytes) {
  std::vector<std::vector<FileTensor>> shards(1);
  uint64_t filled_bytes = 0;
  for (FileTensor& tensor : tensors) {
    const std::optional<uint64_t> size = DataBytes(tensor);
    if (!size.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", ShownName(tensor.name), "\" has a size that overflows"));
    }
    if (!shards.back().empty() && !IsInside(filled_bytes, *size, shard_bytes)) {
      shards.emplace_back();
      filled_bytes = 0;
    }
    filled_bytes += *size;
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

uint64_t ElementCount(const FileTensor& tensor) {
  return *DataBytes(tensor) * 8 / FileDtypeBits(tensor.dtype);
}

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!file.valid() || ::fstat(file.get(), &status) != 0) return CannotRead(path, errno);
  if (!S_ISREG(status.st_mode)) return Malformed(path, "is not a regular file");
  const uint64_t size = static_cast<uint64_t>(status.st_size);
  if (size > kMaximumTextBytes) return Malformed(path, absl::StrCat("has ", size, " bytes"));
  std::string text(size, '\0');
  OFFLOAD_RETURN_IF_ERROR(
      PreadFully(file.get(), 0, std::as_writable_bytes(std::span(text.data(), text.size()))));
  return text;
}

absl::Status WriteTextFile(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".partial-", ::getpid());
  UniqueFd file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file.valid()) return CannotWrite(path, errno);
  OFFLOAD_RETURN_IF_ERROR(WriteFully(file.get(), std::as_bytes(std::span(text))));
  if (::fsync(file.get()) != 0) return CannotWrite(path, errno);
  if (::rename(temporary.c_str(), path.c_str()) != 0) return CannotWrite(path, errno);
  return SyncFolder(fs::path(path).parent_path().string());
}

absl::Status CheckHoldsNoCheckpoint(const std::string& folder) {
  std::error_code error;
  if (!fs::exists(folder, error)) return absl::OkStatus();
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name == kIndexFileName || (name.starts_with("model") && name.ends_with(kExtension))) {
      return MakeError(ErrorId::kFileWrite, absl::StrCat(folder, " already holds ", name));
    }
  }
  return error ? CannotWrite(folder, error.value()) : absl::OkStatus();
}

std::string ShardFileName(size_t index, size_t count) {
  if (count == 1) return kSingleFileName;
  return absl::StrFormat("model-%05d-of-%05d.safetensors", index + 1, count);
}

absl::StatusOr<HfIndex> ParseIndex(std::string_view json, const std::string& path) {
  IndexHandler handler;
  if (!ReadStrictJson(json, handler)) return Malformed(path, "the index " + handler.error());
  if (!handler.has_map) return Malformed(path, "the index has no weight_map");
  return std::move(handler.index);
}

absl::StatusOr<HfCheckpoint> HfCheckpoint::Open(const std::string& path) {
  HfCheckpoint checkpoint;
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return CannotRead(path, errno);
  if (!S_ISDIR(status.st_mode)) {
    OFFLOAD_RETURN_IF_ERROR(checkpoint.AddShard(path));
    return checkpoint;
  }
  const std::string index_path = (fs::path(path) / kIndexFileName).string();
  if (::stat(index_path.c_str(), &status) != 0) {
    OFFLOAD_RETURN_IF_ERROR(checkpoint.AddShard((fs::path(path) / kSingleFileName).string()));
    return checkpoint;
  }
  OFFLOAD_ASSIGN_OR_RETURN(const std::string json, ReadTextFile(index_path));
  OFFLOAD_ASSIGN_OR_RETURN(const HfIndex index, ParseIndex(json, index_path));
  std::set<std::string> files;
  for (const auto& [tensor, file] : index.file_by_tensor) files.insert(file);
  if (files.size() > kMaximumShards) {
    return Malformed(
        index_path, absl::StrCat("names ", files.size(), " shards; the limit is ", kMaximumShards));
  }
  for (const std::string& file : files) {
    OFFLOAD_RETURN_IF_ERROR(checkpoint.AddShard((fs::path(path) / file).string()));
  }
  OFFLOAD_RETURN_IF_ERROR(checkpoint.CheckIndex(index, index_path));
  return checkpoint;
}

absl::Status HfCheckpoint::AddShard(const std::string& path) {
  OFFLOAD_ASSIGN_OR_RETURN(SafetensorsReader reader, SafetensorsReader::Open(path));
  shards_.push_back(std::make_unique<SafetensorsReader>(std::move(reader)));
  const SafetensorsReader* shard = shards_.back().get();
  for (const FileEntry& entry : shard->entries()) {
    if (!locations_.emplace(entry.tensor.name, Location{shard, &entry}).second) {
      return Malformed(path, absl::StrCat("tensor \"", ShownName(entry.tensor.name),
                                          "\" is in another shard too"));
    }
  }
  return absl::OkStatus();
}

absl::Status HfCheckpoint::CheckIndex(const HfIndex& index, const std::string& path) const {
  for (const auto& [name, file] : index.file_by_tensor) {
    const auto found = locations_.find(name);
    if (found == locations_.end() ||
        fs::path(found->second.shard->path()).filename().string() != file) {
      return Malformed(path, absl::StrCat("tensor \"", ShownName(name), "\" is not in ", file,
                                          ", where the index says it is"));
    }
  }
  for (const auto& [name, location] : locations_) {
    if (!index.file_by_tensor.contains(std::string(name))) {
      return Malformed(path, absl::StrCat("tensor \"", ShownName(name), "\" of ",
                                          location.shard->path(), " is not in the index"));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> HfCheckpoint::Names() const {
  std::vector<std::string> names;
  names.reserve(locations_.size());
  for (const auto& shard : shards_) {
    for (const FileEntry& entry : shard->entries()) names.push_back(entry.tensor.name);
  }
  return names;
}

const FileEntry* HfCheckpoint::Find(std::string_view name) const {
  const auto found = locations_.find(name);
  return found == locations_.end() ? nullptr : found->second.entry;
}

absl::Status HfCheckpoint::Read(std::string_view name, uint64_t offset_bytes,
                                std::span<std::byte> bytes) const {
  const auto found = locations_.find(name);
  if (found == locations_.end()) {
    return absl::NotFoundError(absl::StrCat("no tensor \"", ShownName(name), "\""));
  }
  return found->second.shard->Read(*found->second.entry, offset_bytes, bytes);
}

absl::Status CheckFits(const HfCheckpoint& checkpoint, std::span<const WantedTensor> wanted,
                       std::span<const std::string> ignored) {
  std::unordered_set<std::string_view> known(ignored.begin(), ignored.end());
  for (const WantedTensor& tensor : wanted) {
    OFFLOAD_RETURN_IF_ERROR(CheckTensorFits(checkpoint.Find(tensor.name), tensor));
    known.insert(tensor.name);
  }
  for (const std::string& name : checkpoint.Names()) {
    if (known.contains(name) || name.ends_with(kRotaryTable)) continue;
    return MakeError(ErrorId::kFileMismatch,
                     absl::StrCat("the checkpoint has a tensor \"", ShownName(name),
                                  "\" that the model has not"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HfCheckpointWriter>> HfCheckpointWriter::Create(
    const std::string& folder, std::vector<FileTensor> tensors, const Settings& settings) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return CannotWrite(folder, error.value());
  OFFLOAD_RETURN_IF_ERROR(CheckHoldsNoCheckpoint(folder));
  OFFLOAD_ASSIGN_OR_RETURN(std::vector<std::vector<FileTensor>> shards,
                           Cut(std::move(tensors), settings.shard_bytes));
  std::unique_ptr<HfCheckpointWriter> writer(new HfCheckpointWriter());
  writer->folder_ = folder;
  for (size_t index = 0; index < shards.size(); ++index) {
    for (const FileTensor& tensor : shards[index]) {
      if (!writer->shard_by_tensor_.emplace(tensor.name, index).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor name \"", ShownName(tensor.name), "\" is there twice"));
      }
      writer->total_bytes_ += *DataBytes(tensor);
      writer->total_parameters_ += ElementCount(tensor);
    }
    const std::string path = (fs::path(folder) / ShardFileName(index, shards.size())).string();
    OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsWriter> shard,
                             SafetensorsWriter::Create(path, std::move(shards[index])));
    writer->shards_.push_back(std::move(shard));
  }
  return writer;
}

absl::Status HfCheckpointWriter::Append(std::string_view name, std::span<const std::byte> bytes) {
  const auto found = shard_by_tensor_.find(std::string(name));
  if (found == shard_by_tensor_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", ShownName(name), "\" was not declared"));
  }
  return shards_[found->second]->Append(name, bytes);
}

absl::Status HfCheckpointWriter::Commit() {
  for (const auto& shard : shards_) OFFLOAD_RETURN_IF_ERROR(shard->CheckComplete());
  for (const auto& shard : shards_) OFFLOAD_RETURN_IF_ERROR(shard->Commit());
  return shards_.size() == 1 ? absl::OkStatus() : WriteIndex();
}

absl::Status HfCheckpointWriter::WriteIndex() const {
  const std::map<std::string, size_t> sorted(shard_by_tensor_.begin(), shard_by_tensor_.end());
  nlohmann::ordered_json index;
  index["metadata"] = {{"total_parameters", total_parameters_}, {"total_size", total_bytes_}};
  auto& map = index["weight_map"] = nlohmann::ordered_json::object();
  for (const auto& [name, shard] : sorted) {
    map.push_back({name, ShardFileName(shard, shards_.size())});
  }
  return WriteTextFile((fs::path(folder_) / kIndexFileName).string(), index.dump(2) + "\n");
}

}  // namespace offload::zero3

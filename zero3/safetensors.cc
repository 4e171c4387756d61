#include "zero3/safetensors.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "zero3/file_errors.h"

namespace offload::zero3 {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kLengthBytes = sizeof(uint64_t);
constexpr uint64_t kDataAlignmentBytes = 4096;
constexpr int kTemporaryNames = 100;

// A writer holds a lock on its temporary file while it lives.
bool TryLock(const UniqueFd& file) {
  return file.valid() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
}

std::string TemporaryPrefix(const std::string& path) { return absl::StrCat(path, ".partial-"); }

// Gives back the room of temporary files for `path` whose writers were killed.
void RemoveAbandoned(const std::string& path) {
  namespace fs = std::filesystem;
  const std::string prefix = fs::path(TemporaryPrefix(path)).filename();
  const fs::path folder = fs::path(path).parent_path();
  std::error_code error;
  for (fs::directory_iterator entry(folder.empty() ? "." : folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const fs::path& found = entry->path();
    if (!found.filename().string().starts_with(prefix)) continue;
    const UniqueFd file(::open(found.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (TryLock(file)) ::unlink(found.c_str());
  }
}

// Orders tensors as files are laid out: widest type first, so that every tensor is aligned to its
// width.
bool IsBefore(const FileTensor& a, const FileTensor& b) {
  const uint64_t a_bits = FileDtypeBits(a.dtype), b_bits = FileDtypeBits(b.dtype);
  return a_bits != b_bits ? a_bits > b_bits : a.name < b.name;
}

absl::Status CheckDeclared(const std::vector<FileTensor>& tensors) {
  std::vector<std::string_view> names;
  for (const FileTensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == kMetadataKey || (i > 0 && names[i] == names[i - 1])) {
      return absl::InvalidArgumentError(absl::StrCat("tensor name \"", ShownName(names[i]),
                                                     "\" cannot be used or is there twice"));
    }
  }
  return absl::OkStatus();
}

// Gives every tensor its place, counted from the beginning of the data.
absl::StatusOr<std::vector<FileEntry>> LayOut(std::vector<FileTensor> tensors) {
  OFFLOAD_RETURN_IF_ERROR(CheckDeclared(tensors));
  std::sort(tensors.begin(), tensors.end(), IsBefore);
  std::vector<FileEntry> entries;
  entries.reserve(tensors.size());
  uint64_t end = 0;
  for (FileTensor& tensor : tensors) {
    const std::optional<uint64_t> size = DataBytes(tensor);
    const std::optional<uint64_t> next = size.has_value() ? CheckedAdd(end, *size) : std::nullopt;
    if (!next.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", ShownName(tensor.name), "\" has a size that overflows"));
    }
    entries.push_back({.tensor = std::move(tensor), .offset_bytes = end, .size_bytes = *size});
    end = *next;
  }
  return entries;
}

// Length word and JSON, padded with spaces so that the data begins at a page.
absl::StatusOr<std::string> SerializeHeader(const std::vector<FileEntry>& entries) {
  std::string text(kLengthBytes, '\0');
  absl::StrAppend(&text, "{\"", std::string(kMetadataKey), "\":{\"format\":\"pt\"}");
  for (const FileEntry& entry : entries) {
    try {
      absl::StrAppend(&text, ",", nlohmann::json(entry.tensor.name).dump());
    } catch (const nlohmann::json::exception&) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor name \"", ShownName(entry.tensor.name), "\" is not UTF-8"));
    }
    absl::StrAppend(&text, ":{\"dtype\":\"", std::string(FileDtypeName(entry.tensor.dtype)),
                    "\",\"shape\":[", absl::StrJoin(entry.tensor.shape, ","),
                    "],\"data_offsets\":[", entry.offset_bytes, ",",
                    entry.offset_bytes + entry.size_bytes, "]}");
  }
  text.push_back('}');
  text.resize(AlignUp(text.size(), kDataAlignmentBytes), ' ');
  const uint64_t length = text.size() - kLengthBytes;
  if (length > FileLimits().header_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("header of ", length, " bytes is too long"));
  }
  std::memcpy(text.data(), &length, kLengthBytes);
  return text;
}

absl::StatusOr<std::string> ReadHeader(int file, uint64_t file_bytes, const std::string& path,
                                       const FileLimits& limits) {
  if (file_bytes < kLengthBytes) {
    return Malformed(path, absl::StrCat("is too short, ", file_bytes, " bytes"));
  }
  uint64_t length = 0;
  OFFLOAD_RETURN_IF_ERROR(PreadFully(file, 0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > limits.header_bytes || length > file_bytes - kLengthBytes) {
    return Malformed(path, absl::StrCat("says its header has ", length, " bytes; the file has ",
                                        file_bytes, ", the limit is ", limits.header_bytes));
  }
  std::string json(length, '\0');
  OFFLOAD_RETURN_IF_ERROR(
      PreadFully(file, kLengthBytes, std::as_writable_bytes(std::span(json.data(), json.size()))));
  return json;
}

}  // namespace

absl::StatusOr<SafetensorsReader> SafetensorsReader::Open(const std::string& path,
                                                          const FileLimits& limits) {
  // O_NONBLOCK: a pipe under this name must not stop us before we have seen that it is one.
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!file.valid() || ::fstat(file.get(), &status) != 0) return CannotRead(path, errno);
  if (!S_ISREG(status.st_mode)) return Malformed(path, "is not a regular file");
  const uint64_t file_bytes = static_cast<uint64_t>(status.st_size);
  OFFLOAD_ASSIGN_OR_RETURN(const std::string json,
                           ReadHeader(file.get(), file_bytes, path, limits));
  const uint64_t data_begin = kLengthBytes + json.size();
  OFFLOAD_ASSIGN_OR_RETURN(FileHeader header,
                           ParseHeader(json, data_begin, file_bytes - data_begin, path));
  return SafetensorsReader(path, std::move(file), std::move(header));
}

// Moving a vector keeps its elements where they are, so the views of their names stay valid.
SafetensorsReader::SafetensorsReader(std::string path, UniqueFd file, FileHeader header)
    : path_(std::move(path)), file_(std::move(file)), header_(std::move(header)) {
  for (size_t i = 0; i < header_.entries.size(); ++i) {
    index_by_name_.emplace(header_.entries[i].tensor.name, i);
  }
}

const FileEntry* SafetensorsReader::Find(std::string_view name) const {
  const auto found = index_by_name_.find(name);
  return found == index_by_name_.end() ? nullptr : &header_.entries[found->second];
}

absl::Status SafetensorsReader::Read(const FileEntry& entry, uint64_t offset_bytes,
                                     std::span<std::byte> bytes) const {
  OFFLOAD_CHECK(IsInside(offset_bytes, bytes.size(), entry.size_bytes))
      << offset_bytes << " + " << bytes.size() << " of " << entry.size_bytes;
  const absl::Status status = PreadFully(file_.get(), entry.offset_bytes + offset_bytes, bytes);
  if (status.ok()) return status;
  return MakeError(
      ErrorId::kFileRead,
      absl::StrCat(path_, ": tensor \"", ShownName(entry.tensor.name), "\": ", status.message()),
      "The file changed or the drive failed; make or copy it again");
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    std::string path, std::vector<FileTensor> tensors) {
  OFFLOAD_ASSIGN_OR_RETURN(std::vector<FileEntry> entries, LayOut(std::move(tensors)));
  OFFLOAD_ASSIGN_OR_RETURN(const std::string header, SerializeHeader(entries));
  const uint64_t data_bytes =
      entries.empty() ? 0 : entries.back().offset_bytes + entries.back().size_bytes;
  const std::optional<uint64_t> file_bytes = CheckedAdd(header.size(), data_bytes);
  if (!file_bytes.has_value() || *file_bytes > INT64_MAX) {
    return absl::InvalidArgumentError(absl::StrCat(path, " would have a size that overflows"));
  }
  for (FileEntry& entry : entries) entry.offset_bytes += header.size();
  std::unique_ptr<SafetensorsWriter> writer(
      new SafetensorsWriter(std::move(path), std::move(entries), *file_bytes));
  OFFLOAD_RETURN_IF_ERROR(writer->OpenTemporary(header));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<FileEntry> entries,
                                     uint64_t file_bytes)
    : path_(std::move(path)), file_bytes_(file_bytes) {
  for (FileEntry& entry : entries) {
    std::string name = entry.tensor.name;
    progress_.emplace(std::move(name), Progress{.entry = std::move(entry)});
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!temporary_path_.empty()) ::unlink(temporary_path_.c_str());
}

absl::Status SafetensorsWriter::OpenTemporary(const std::string& header) {
  RemoveAbandoned(path_);
  for (int attempt = 0; attempt < kTemporaryNames && !file_.valid(); ++attempt) {
    const std::string name = absl::StrCat(TemporaryPrefix(path_), ::getpid(), "-", attempt);
    file_.reset(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file_.valid() && errno != EEXIST) return CannotWrite(path_, errno);
    if (!file_.valid()) continue;
    temporary_path_ = name;
    const bool is_locked = TryLock(file_) || errno != EWOULDBLOCK;  // not every file system can
    struct stat status;
    if (!is_locked || ::fstat(file_.get(), &status) != 0 || status.st_nlink == 0) {
      file_.reset();  // another writer has taken it for one that was abandoned
      temporary_path_.clear();
    }
  }
  if (!file_.valid()) return CannotWrite(path_, EEXIST);
  // A full drive is better met now than after an hour of writing. Not every file system can tell.
  if (::fallocate(file_.get(), 0, 0, static_cast<off_t>(file_bytes_)) != 0 && errno != EOPNOTSUPP) {
    return CannotWrite(path_, errno);
  }
  return PwriteFully(file_.get(), 0, std::as_bytes(std::span(header)));
}

absl::Status SafetensorsWriter::Append(std::string_view name, std::span<const std::byte> bytes) {
  const auto found = progress_.find(name);
  if (found == progress_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", ShownName(name), "\" was not declared for ", path_));
  }
  Progress& progress = found->second;
  if (bytes.size() > progress.entry.size_bytes - progress.written_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", ShownName(name), "\" has ", progress.entry.size_bytes, " bytes; ",
                     progress.written_bytes, " were written and ", bytes.size(), " more came"));
  }
  OFFLOAD_RETURN_IF_ERROR(
      PwriteFully(file_.get(), progress.entry.offset_bytes + progress.written_bytes, bytes));
  progress.written_bytes += bytes.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::CheckComplete() const {
  for (const auto& [name, progress] : progress_) {
    if (progress.written_bytes != progress.entry.size_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("tensor \"", ShownName(name), "\" of ", path_, " has ",
                       progress.written_bytes, " of ", progress.entry.size_bytes, " bytes"));
    }
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Commit() {
  if (temporary_path_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(path_, " is committed already"));
  }
  OFFLOAD_RETURN_IF_ERROR(CheckComplete());
  struct stat status;
  if (::fstat(file_.get(), &status) != 0) return CannotWrite(path_, errno);
  if (static_cast<uint64_t>(status.st_size) != file_bytes_) {
    return MakeError(ErrorId::kFileWrite, absl::StrCat(path_, " has ", status.st_size, " of ",
                                                       file_bytes_, " bytes after writing"));
  }
  if (::fsync(file_.get()) != 0) return CannotWrite(path_, errno);
  if (::rename(temporary_path_.c_str(), path_.c_str()) != 0) return CannotWrite(path_, errno);
  file_.reset();
  temporary_path_.clear();
  return SyncFolder(std::filesystem::path(path_).parent_path().string());
}

absl::Status SyncFolder(const std::string& folder) {
  const std::string name = folder.empty() ? "." : folder;
  const UniqueFd file(::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file.valid() || ::fsync(file.get()) != 0) return CannotWrite(name, errno);
  return absl::OkStatus();
}

}  // namespace offload::zero3

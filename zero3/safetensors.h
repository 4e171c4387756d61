// zero3/safetensors.h
//
// Reads and writes safetensors files, strictly and in constant memory.
//
// A file is a little-endian uint64 N, N bytes of JSON that name every tensor's type, shape and
// place, and the data. The reader believes nothing: a file is opened only when its header is within
// limits, has no key twice, and its tensors cover the data exactly, from the first byte to the
// last, without hole or overlap. What was opened can be read without another check.
//
// The writer declares all tensors first, then takes their bytes in any order of tensors. It writes
// to a temporary file in the same folder; Commit() checks the sizes, makes the file durable and
// renames it, so a file under its own name is always whole.
//
// Errors: OFD-1401 malformed, OFD-1403 unknown type, OFD-1404 cannot be written, OFD-1405 cannot be
// read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace offload::zero3 {

enum class FileDtype {
  kBool,
  kU8,
  kI8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF8E4M3FNUZ,
  kF8E5M2FNUZ,
  kF6E2M3,
  kF6E3M2,
  kF4,
};

// Names a type as files do: "BF16".
std::string_view FileDtypeName(FileDtype dtype);
std::optional<FileDtype> FileDtypeByName(std::string_view name);
// Some types are narrower than a byte; their tensors still fill whole bytes.
uint64_t FileDtypeBits(FileDtype dtype);

// The one key of a header that names no tensor.
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct FileLimits {
  uint64_t header_bytes = 100'000'000;
  uint64_t rank = 64;
};

// A tensor to be written.
struct FileTensor {
  std::string name;
  FileDtype dtype = FileDtype::kF32;
  std::vector<uint64_t> shape;  // empty: a scalar; a zero among them: no elements

  friend bool operator==(const FileTensor&, const FileTensor&) = default;
};

// Bytes of a tensor's data; nothing when that overflows or is no whole number of bytes.
std::optional<uint64_t> DataBytes(const FileTensor& tensor);

// A tensor in a file.
struct FileEntry {
  FileTensor tensor;
  uint64_t offset_bytes = 0;  // from the beginning of the file
  uint64_t size_bytes = 0;
};

struct FileHeader {
  std::vector<FileEntry> entries;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// Checks the JSON text of a header against the length of the file's data. A pure function; entry
// offsets count from `data_begin_bytes`, and errors begin with `path`.
absl::StatusOr<FileHeader> ParseHeader(std::string_view json, uint64_t data_begin_bytes,
                                       uint64_t data_bytes, const std::string& path);

// Thread safety: immutable after Open(); Read() may be called from several threads.
class SafetensorsReader {
 public:
  static absl::StatusOr<SafetensorsReader> Open(const std::string& path,
                                                const FileLimits& limits = {});

  const std::string& path() const { return path_; }
  const std::vector<FileEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  // Null when there is no tensor of that name. Valid as long as the reader.
  const FileEntry* Find(std::string_view name) const;

  // Reads part of a tensor, from `offset_bytes` of its data. The part must lie inside of it.
  absl::Status Read(const FileEntry& entry, uint64_t offset_bytes,
                    std::span<std::byte> bytes) const;

 private:
  SafetensorsReader(std::string path, UniqueFd file, FileHeader header);

  std::string path_;
  UniqueFd file_;
  FileHeader header_;
  std::unordered_map<std::string_view, size_t> index_by_name_;  // views of header_'s names
};

// Thread safety: one thread.
class SafetensorsWriter {
 public:
  // Declares the file: its tensors are laid out by width of type, widest first, then by name.
  // Reserves the space, and removes temporary files of the same path whose writers were killed.
  // INVALID_ARGUMENT for a name twice, a name that is not UTF-8, or sizes that overflow.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(std::string path,
                                                                   std::vector<FileTensor> tensors);

  // Removes the temporary file unless Commit() succeeded.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Bytes of the whole file.
  uint64_t file_bytes() const { return file_bytes_; }

  // Appends the next bytes of a tensor: the bytes of one tensor come in order, tensors in any.
  absl::Status Append(std::string_view name, std::span<const std::byte> bytes);

  // FAILED_PRECONDITION when bytes of a tensor are still missing.
  absl::Status CheckComplete() const;

  // Refuses when a tensor is not complete. Afterwards the file is durable under its name.
  absl::Status Commit();

 private:
  struct Progress {
    FileEntry entry;
    uint64_t written_bytes = 0;
  };

  SafetensorsWriter(std::string path, std::vector<FileEntry> entries, uint64_t file_bytes);
  absl::Status OpenTemporary(const std::string& header);

  const std::string path_;
  std::string temporary_path_;  // empty: there is none
  UniqueFd file_;
  const uint64_t file_bytes_;
  std::map<std::string, Progress, std::less<>> progress_;
};

// Makes the names in a folder durable, after a rename.
absl::Status SyncFolder(const std::string& folder);

// A name from a file as it may be shown: printable and of bounded length.
std::string ShownName(std::string_view name);

}  // namespace offload::zero3

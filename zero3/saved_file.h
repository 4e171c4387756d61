// zero3/saved_file.h
//
// Reads a file of torch.save() without torch: a ZIP archive of a pickle and of storages
// (saved_tensor.h has its form). Elements are read when they are asked for, and nothing of the
// pickle is run (unpickle.h).
//
// The reader believes nothing: every length is checked against the file, and what is read to its
// end has to have its checksum. Compressed archives, those of big-endian machines and files of
// before torch 1.6 are refused.
//
// Errors: OFD-1401 malformed, OFD-1405 cannot be read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "zero3/unpickle.h"

namespace offload::zero3 {

// Thread safety: immutable after Open().
class SavedFile {
 public:
  static absl::StatusOr<SavedFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const Unpickled& contents() const { return *contents_; }

 private:
  friend class SavedTensorReader;
  struct Record {
    uint64_t offset_bytes = 0;  // of its local header
    uint64_t size_bytes = 0;
    uint32_t crc = 0;
    bool is_stored = true;  // as it is
  };

  SavedFile(std::string path, UniqueFd file, uint64_t size_bytes)
      : path_(std::move(path)), file_(std::move(file)), size_bytes_(size_bytes) {}
  absl::Status ReadDirectory();
  absl::StatusOr<std::span<const std::byte>> FindDirectory(std::string& bytes,
                                                           uint64_t* entry_count) const;
  absl::StatusOr<const Record*> Find(const std::string& name) const;
  absl::StatusOr<uint64_t> DataOffset(const Record& record) const;
  absl::StatusOr<std::string> ReadWhole(const std::string& name, uint64_t size_bytes_max) const;
  absl::Status Read(uint64_t offset_bytes, std::span<std::byte> bytes) const;

  std::string path_;
  UniqueFd file_;
  uint64_t size_bytes_ = 0;
  std::string prefix_;                     // of all names: "archive/"
  std::map<std::string, Record> records_;  // by name, without prefix
  std::unique_ptr<Unpickled> contents_;
};

// Gives the elements of a tensor of a file, row by row, from the first to the last.
//
// Thread safety: one thread.
class SavedTensorReader {
 public:
  // `tensor` is one of file.contents(), and its elements lie row by row.
  static absl::StatusOr<SavedTensorReader> Open(std::shared_ptr<const SavedFile> file,
                                                const TensorOnFile& tensor);

  const TensorOnFile& tensor() const { return *tensor_; }
  uint64_t element_bytes() const;
  // The next elements, as they are in the file; with the last ones the checksum is checked.
  // INVALID_ARGUMENT when there are not so many.
  absl::Status Next(std::span<std::byte> bytes);

 private:
  SavedTensorReader(std::shared_ptr<const SavedFile> file, const TensorOnFile& tensor)
      : file_(std::move(file)), tensor_(&tensor) {}
  absl::Status Pass(uint64_t begin_bytes, uint64_t end_bytes);

  std::shared_ptr<const SavedFile> file_;
  const TensorOnFile* tensor_;
  const SavedFile::Record* record_ = nullptr;
  uint64_t data_bytes_ = 0;                // where the storage begins
  uint64_t at_bytes_ = 0, end_bytes_ = 0;  // within the storage
  uint32_t crc_ = 0;                       // of what came before
};

}  // namespace offload::zero3

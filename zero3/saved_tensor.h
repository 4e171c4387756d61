// zero3/saved_tensor.h
//
// Writes a file as torch.save() would write it of one fp32 tensor, without torch and a piece at a
// time: a ZIP archive of a pickle, which says type and shape, and the elements.
//
//   archive/data.pkl    the tensor, or a dictionary that holds it
//   archive/byteorder   little
//   archive/data/0      the elements, row by row, at a multiple of 64 bytes
//   archive/version     3
//
// Nothing is compressed. The archive is ZIP64 throughout, so that a tensor may have any size.
//
// Errors: OFD-1404 cannot be written.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace offload::zero3 {

// Thread safety: one thread.
class SavedTensorWriter {
 public:
  enum class Form {
    kTensor,     // the tensor itself
    kParameter,  // {"param": tensor, "cat_dim": 0}, as DeepSpeed's universal checkpoints have it
  };

  // Makes the file, which must not be there. No dimensions: a scalar. Half a file is left when
  // writing ends before Commit(): the caller has put it where it harms nobody.
  static absl::StatusOr<SavedTensorWriter> Create(std::string path, std::span<const int64_t> shape,
                                                  Form form);
  // The same with any object around the tensor, a piece of pickle.h.
  static absl::StatusOr<SavedTensorWriter> Create(std::string path, std::span<const int64_t> shape,
                                                  std::string_view object);

  // Appends elements. INVALID_ARGUMENT when the tensor has not so many.
  absl::Status Append(std::span<const std::byte> bytes);
  bool is_complete() const { return written_bytes_ == elements().size_bytes; }

  // Makes the file durable. FAILED_PRECONDITION when elements are missing.
  absl::Status Commit();

 private:
  struct Record {
    std::string name;
    uint64_t size_bytes = 0;
    uint32_t crc = 0;  // of ZIP: IEEE 802.3
    uint64_t offset_bytes = 0;
    uint64_t data_offset_bytes = 0;
  };
  static constexpr size_t kElements = 2;  // index of their record
  using Contents = std::array<std::string, 4>;

  SavedTensorWriter(std::string path, UniqueFd file)
      : path_(std::move(path)), file_(std::move(file)) {}
  const Record& elements() const { return records_[kElements]; }
  void Place(const Contents& contents, uint64_t elements_bytes);
  absl::Status Write(uint64_t offset_bytes, const std::string& bytes);

  std::string path_;
  UniqueFd file_;
  std::array<Record, 4> records_;  // in the order of the file
  uint64_t directory_offset_bytes_ = 0;
  uint64_t written_bytes_ = 0;  // of the elements
};

}  // namespace offload::zero3

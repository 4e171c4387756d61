#include "zero3/saved_tensor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "zero3/file_errors.h"
#include "zero3/pickle.h"
#include "zero3/zip_crc.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kAlignmentBytes = 64;
constexpr uint64_t kElementBytes = sizeof(float);

template <typename T>
void Put(std::string& to, T number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

uint32_t CrcOf(const std::string& bytes) { return ZipCrc(0, std::as_bytes(std::span(bytes))); }

// ---- The pickle --------------------------------------------------------------------------------

std::string ObjectOf(std::span<const int64_t> shape, SavedTensorWriter::Form form) {
  if (form == SavedTensorWriter::Form::kTensor) return PickledTensor(shape);
  const std::pair<std::string, std::string> items[] = {{PickledText("param"), PickledTensor(shape)},
                                                       {PickledText("cat_dim"), PickledInteger(0)}};
  return PickledDictionary(items);
}

// ---- The archive -------------------------------------------------------------------------------

constexpr uint16_t kVersionNeeded = 45;  // ZIP64
constexpr uint16_t kFirstDay = 0x21;     // 1980-01-01
constexpr uint32_t kSeeZip64 = 0xFFFFFFFF;
constexpr uint64_t kLocalHeaderBytes = 30, kLocalZip64Bytes = 20, kFieldHeadBytes = 4;

// What local header and directory say alike, from the version on: no flags, stored as it is.
std::string CommonFields(uint32_t crc, size_t name_bytes, uint64_t extra_bytes) {
  std::string fields;
  Put(fields, kVersionNeeded);
  Put(fields, uint16_t{0});
  Put(fields, uint16_t{0});
  Put(fields, uint16_t{0});
  Put(fields, kFirstDay);
  Put(fields, crc);
  Put(fields, kSeeZip64);
  Put(fields, kSeeZip64);
  Put(fields, static_cast<uint16_t>(name_bytes));
  Put(fields, static_cast<uint16_t>(extra_bytes));
  return fields;
}

// `data_offset_bytes` counts from the header: what is left before it is filled.
std::string LocalHeader(const std::string& name, uint64_t size_bytes, uint32_t crc,
                        uint64_t data_offset_bytes) {
  std::string header = "PK\x03\x04";
  header += CommonFields(crc, name.size(), data_offset_bytes - kLocalHeaderBytes - name.size());
  header += name;
  Put(header, uint16_t{1});
  Put(header, uint16_t{16});
  Put(header, size_bytes);
  Put(header, size_bytes);
  Put(header, uint16_t{0x4246});  // a field of torch's: nothing
  Put(header, static_cast<uint16_t>(data_offset_bytes - header.size() - sizeof(uint16_t)));
  header.resize(data_offset_bytes, 'Z');
  return header;
}

std::string DirectoryEntry(const std::string& name, uint64_t size_bytes, uint32_t crc,
                           uint64_t offset_bytes) {
  constexpr uint16_t kZip64Bytes = 24;
  std::string entry = "PK\x01\x02";
  Put(entry, kVersionNeeded);
  entry += CommonFields(crc, name.size(), kFieldHeadBytes + kZip64Bytes);
  Put(entry, uint16_t{0});  // comment
  Put(entry, uint16_t{0});  // disk
  Put(entry, uint16_t{0});  // attributes
  Put(entry, uint32_t{0});
  Put(entry, kSeeZip64);
  entry += name;
  Put(entry, uint16_t{1});
  Put(entry, kZip64Bytes);
  Put(entry, size_bytes);
  Put(entry, size_bytes);
  Put(entry, offset_bytes);
  return entry;
}

// The ends of the directory, of ZIP64 and of old.
std::string DirectoryEnd(uint64_t entries, uint64_t offset_bytes, uint64_t size_bytes) {
  std::string end = "PK\x06\x06";
  Put(end, uint64_t{44});
  Put(end, kVersionNeeded);
  Put(end, kVersionNeeded);
  Put(end, uint64_t{0});  // disks
  Put(end, entries);
  Put(end, entries);
  Put(end, size_bytes);
  Put(end, offset_bytes);
  end += "PK\x06\x07";
  Put(end, uint32_t{0});
  Put(end, offset_bytes + size_bytes);
  Put(end, uint32_t{1});
  end += "PK\x05\x06";
  Put(end, uint32_t{0});  // disks
  Put(end, static_cast<uint16_t>(entries));
  Put(end, static_cast<uint16_t>(entries));
  Put(end, static_cast<uint32_t>(size_bytes));
  Put(end, kSeeZip64);
  Put(end, uint16_t{0});  // comment
  return end;
}

}  // namespace

// ---- The writer --------------------------------------------------------------------------------

absl::StatusOr<SavedTensorWriter> SavedTensorWriter::Create(std::string path,
                                                            std::span<const int64_t> shape,
                                                            Form form) {
  return Create(std::move(path), shape, ObjectOf(shape, form));
}

absl::StatusOr<SavedTensorWriter> SavedTensorWriter::Create(std::string path,
                                                            std::span<const int64_t> shape,
                                                            std::string_view object) {
  int64_t element_count = 1;
  for (const int64_t dimension : shape) element_count *= dimension;
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.valid()) return CannotWrite(path, errno);
  SavedTensorWriter writer(std::move(path), std::move(file));
  const Contents contents = {Pickle(object), "little", "", "3\n"};
  writer.Place(contents, static_cast<uint64_t>(element_count) * kElementBytes);
  for (size_t i = 0; i < contents.size(); ++i) {
    if (i == kElements) continue;
    const Record& record = writer.records_[i];
    OFFLOAD_RETURN_IF_ERROR(writer.Write(
        record.offset_bytes, LocalHeader(record.name, record.size_bytes, record.crc,
                                         record.data_offset_bytes - record.offset_bytes) +
                                 contents[i]));
  }
  return writer;
}

void SavedTensorWriter::Place(const Contents& contents, uint64_t elements_bytes) {
  constexpr std::array<const char*, 4> kNames = {"archive/data.pkl", "archive/byteorder",
                                                 "archive/data/0", "archive/version"};
  uint64_t at = 0;
  for (size_t i = 0; i < records_.size(); ++i) {
    Record& record = records_[i];
    record = {.name = kNames[i],
              .size_bytes = i == kElements ? elements_bytes : contents[i].size(),
              .crc = CrcOf(contents[i]),
              .offset_bytes = at};
    const uint64_t least =
        at + kLocalHeaderBytes + record.name.size() + kLocalZip64Bytes + kFieldHeadBytes;
    record.data_offset_bytes = (least + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
    at = record.data_offset_bytes + record.size_bytes;
  }
  directory_offset_bytes_ = at;
}

absl::Status SavedTensorWriter::Write(uint64_t offset_bytes, const std::string& bytes) {
  return PwriteFully(file_.get(), offset_bytes, std::as_bytes(std::span(bytes)));
}

absl::Status SavedTensorWriter::Append(std::span<const std::byte> bytes) {
  Record& record = records_[kElements];
  if (bytes.size() > record.size_bytes - written_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, " has ", record.size_bytes, " bytes of elements; ", written_bytes_,
                     " were written and ", bytes.size(), " more came"));
  }
  OFFLOAD_RETURN_IF_ERROR(
      PwriteFully(file_.get(), record.data_offset_bytes + written_bytes_, bytes));
  record.crc = ZipCrc(record.crc, bytes);
  written_bytes_ += bytes.size();
  return absl::OkStatus();
}

absl::Status SavedTensorWriter::Commit() {
  if (!is_complete()) {
    return absl::FailedPreconditionError(absl::StrCat(path_, " has ", written_bytes_, " of ",
                                                      elements().size_bytes, " bytes of elements"));
  }
  OFFLOAD_RETURN_IF_ERROR(
      Write(elements().offset_bytes,
            LocalHeader(elements().name, elements().size_bytes, elements().crc,
                        elements().data_offset_bytes - elements().offset_bytes)));
  std::string directory;
  for (const Record& record : records_)
    directory += DirectoryEntry(record.name, record.size_bytes, record.crc, record.offset_bytes);
  const std::string end = DirectoryEnd(records_.size(), directory_offset_bytes_, directory.size());
  OFFLOAD_RETURN_IF_ERROR(Write(directory_offset_bytes_, directory + end));
  if (::fsync(file_.get()) != 0) return CannotWrite(path_, errno);
  file_.reset();
  return absl::OkStatus();
}

}  // namespace offload::zero3

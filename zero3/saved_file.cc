#include "zero3/saved_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "zero3/file_errors.h"
#include "zero3/zip_crc.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kPickleBytesMax = uint64_t{16} << 20;
constexpr uint64_t kDirectoryBytesMax = uint64_t{64} << 20;
constexpr uint64_t kEndBytes = 22, kCommentBytesMax = 65535;
constexpr uint64_t kZip64LocatorBytes = 20, kZip64EndBytes = 56;
constexpr uint64_t kEntryBytes = 46, kLocalHeaderBytes = 30;
constexpr uint32_t kSeeZip64 = 0xFFFFFFFF;
constexpr uint64_t kPassBytes = uint64_t{1} << 20;

template <typename T>
T NumberAt(const std::byte* bytes) {
  T number;
  std::memcpy(&number, bytes, sizeof(number));
  return number;
}

std::span<std::byte> WritableBytes(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

// Fields that did not fit stand in the extra field of ZIP64, those and no others, in this order.
bool TakeZip64(std::span<const std::byte> extra, std::initializer_list<uint64_t*> fields) {
  constexpr uint16_t kZip64 = 1;
  while (extra.size() >= 4) {
    const auto id = NumberAt<uint16_t>(extra.data());
    const size_t size_bytes = NumberAt<uint16_t>(extra.data() + 2);
    if (size_bytes > extra.size() - 4) return false;
    std::span<const std::byte> field = extra.subspan(4, size_bytes);
    extra = extra.subspan(4 + size_bytes);
    if (id != kZip64) continue;
    for (uint64_t* const number : fields) {
      if (*number != kSeeZip64) continue;
      if (field.size() < sizeof(uint64_t)) return false;
      *number = NumberAt<uint64_t>(field.data());
      field = field.subspan(sizeof(uint64_t));
    }
    return true;
  }
  return std::none_of(fields.begin(), fields.end(),
                      [](const uint64_t* number) { return *number == kSeeZip64; });
}

}  // namespace

// ---- The archive -------------------------------------------------------------------------------

absl::StatusOr<SavedFile> SavedFile::Open(const std::string& path) {
  UniqueFd descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!descriptor.valid()) return CannotRead(path, errno);
  struct stat status;
  if (::fstat(descriptor.get(), &status) != 0) return CannotRead(path, errno);
  if (!S_ISREG(status.st_mode)) return CannotRead(path, EINVAL);
  SavedFile file(path, std::move(descriptor), static_cast<uint64_t>(status.st_size));
  OFFLOAD_RETURN_IF_ERROR(file.ReadDirectory());
  if (file.records_.contains("byteorder")) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::string order, file.ReadWhole("byteorder", 64));
    if (order != "little")
      return Malformed(path,
                       absl::StrCat("its bytes are in the order of ", "another kind of machine"));
  }
  OFFLOAD_ASSIGN_OR_RETURN(const std::string pickle, file.ReadWhole("data.pkl", kPickleBytesMax));
  absl::StatusOr<Unpickled> contents = Unpickle(pickle);
  if (!contents.ok()) return Malformed(path, std::string(contents.status().message()));
  file.contents_ = std::make_unique<Unpickled>(*std::move(contents));
  return file;
}

absl::Status SavedFile::Read(uint64_t offset_bytes, std::span<std::byte> bytes) const {
  const absl::Status status = PreadFully(file_.get(), offset_bytes, bytes);
  if (status.ok()) return status;
  if (absl::IsDataLoss(status)) return Malformed(path_, "it became shorter while it was read");
  return MakeError(ErrorId::kFileRead, absl::StrCat(path_, ": ", status.message()));
}

// The bytes of the directory, which `bytes` keeps.
absl::StatusOr<std::span<const std::byte>> SavedFile::FindDirectory(std::string& bytes,
                                                                    uint64_t* entry_count) const {
  constexpr std::string_view kNoArchive = "it is no file of torch.save() since torch 1.6";
  if (size_bytes_ < kEndBytes) return Malformed(path_, std::string(kNoArchive));
  std::string tail(std::min(size_bytes_, kEndBytes + kCommentBytesMax + kZip64LocatorBytes), 0);
  const uint64_t tail_offset = size_bytes_ - tail.size();
  OFFLOAD_RETURN_IF_ERROR(Read(tail_offset, WritableBytes(tail)));
  const size_t end = tail.rfind("PK\x05\x06", tail.size() - kEndBytes);
  if (end == std::string::npos) return Malformed(path_, std::string(kNoArchive));
  const auto* const fields = reinterpret_cast<const std::byte*>(tail.data()) + end;
  *entry_count = NumberAt<uint16_t>(fields + 10);
  uint64_t size_bytes = NumberAt<uint32_t>(fields + 12);
  uint64_t offset_bytes = NumberAt<uint32_t>(fields + 16);
  if (end >= kZip64LocatorBytes && tail.compare(end - kZip64LocatorBytes, 4, "PK\x06\x07") == 0) {
    const uint64_t at = NumberAt<uint64_t>(fields - kZip64LocatorBytes + 8);
    std::string zip64(kZip64EndBytes, 0);
    if (at > size_bytes_ || size_bytes_ - at < zip64.size())
      return Malformed(path_, "its directory is outside of it");
    OFFLOAD_RETURN_IF_ERROR(Read(at, WritableBytes(zip64)));
    if (!zip64.starts_with("PK\x06\x06")) return Malformed(path_, "its directory is damaged");
    const auto* const wide = reinterpret_cast<const std::byte*>(zip64.data());
    *entry_count = NumberAt<uint64_t>(wide + 32);
    size_bytes = NumberAt<uint64_t>(wide + 40);
    offset_bytes = NumberAt<uint64_t>(wide + 48);
  }
  if (offset_bytes > size_bytes_ || size_bytes > size_bytes_ - offset_bytes ||
      size_bytes > kDirectoryBytesMax)
    return Malformed(path_, "its directory is outside of it");
  bytes.resize(size_bytes);
  OFFLOAD_RETURN_IF_ERROR(Read(offset_bytes, WritableBytes(bytes)));
  return std::as_bytes(std::span(bytes));
}

absl::Status SavedFile::ReadDirectory() {
  std::string bytes;
  uint64_t entry_count = 0;
  OFFLOAD_ASSIGN_OR_RETURN(std::span<const std::byte> left, FindDirectory(bytes, &entry_count));
  std::map<std::string, Record> records;
  for (uint64_t i = 0; i < entry_count; ++i) {
    const std::byte* const entry = left.data();
    if (left.size() < kEntryBytes || NumberAt<uint32_t>(entry) != 0x02014b50)
      return Malformed(path_, "its directory is damaged");
    const size_t name_bytes = NumberAt<uint16_t>(entry + 28);
    const size_t extra_bytes = NumberAt<uint16_t>(entry + 30);
    const size_t all_bytes =
        kEntryBytes + name_bytes + extra_bytes + NumberAt<uint16_t>(entry + 32);
    if (left.size() < all_bytes) return Malformed(path_, "its directory is damaged");
    const std::string name(reinterpret_cast<const char*>(entry + kEntryBytes), name_bytes);
    uint64_t stored_bytes = NumberAt<uint32_t>(entry + 20);
    Record record = {.offset_bytes = NumberAt<uint32_t>(entry + 42),
                     .size_bytes = NumberAt<uint32_t>(entry + 24),
                     .crc = NumberAt<uint32_t>(entry + 16)};
    if (!TakeZip64(left.subspan(kEntryBytes + name_bytes, extra_bytes),
                   {&record.size_bytes, &stored_bytes, &record.offset_bytes}))
      return Malformed(path_, "its directory is damaged");
    constexpr uint16_t kEncrypted = 1;
    record.is_stored = NumberAt<uint16_t>(entry + 10) == 0 && stored_bytes == record.size_bytes &&
                       (NumberAt<uint16_t>(entry + 8) & kEncrypted) == 0;
    if (!records.emplace(name, record).second)
      return Malformed(path_, "a name is twice in its directory");
    left = left.subspan(all_bytes);
    if (name.ends_with("/data.pkl") && name.find('/') == name.size() - 9)
      prefix_ = name.substr(0, name.size() - 8);
  }
  if (prefix_.empty()) return Malformed(path_, "it is an archive, and none of torch.save()");
  for (auto& [name, record] : records) {
    if (name.starts_with(prefix_)) records_.emplace(name.substr(prefix_.size()), record);
  }
  return absl::OkStatus();
}

absl::StatusOr<const SavedFile::Record*> SavedFile::Find(const std::string& name) const {
  const auto found = records_.find(name);
  if (found == records_.end())
    return Malformed(path_, absl::StrCat("it has no ", prefix_, name, " in it"));
  if (!found->second.is_stored)
    return Malformed(path_, absl::StrCat(prefix_, name, " is compressed in it, or encrypted"));
  return &found->second;
}

// Behind its local header, whose extra field has a length of its own.
absl::StatusOr<uint64_t> SavedFile::DataOffset(const Record& record) const {
  std::array<std::byte, kLocalHeaderBytes> header;
  if (record.offset_bytes > size_bytes_ || size_bytes_ - record.offset_bytes < header.size())
    return Malformed(path_, "a part of it is outside of it");
  OFFLOAD_RETURN_IF_ERROR(Read(record.offset_bytes, header));
  if (NumberAt<uint32_t>(header.data()) != 0x04034b50)
    return Malformed(path_, "a part of it is not where its directory says");
  const uint64_t offset_bytes = record.offset_bytes + header.size() +
                                NumberAt<uint16_t>(header.data() + 26) +
                                NumberAt<uint16_t>(header.data() + 28);
  if (offset_bytes > size_bytes_ || record.size_bytes > size_bytes_ - offset_bytes)
    return Malformed(path_, "it ends within its elements");
  return offset_bytes;
}

absl::StatusOr<std::string> SavedFile::ReadWhole(const std::string& name,
                                                 uint64_t size_bytes_max) const {
  OFFLOAD_ASSIGN_OR_RETURN(const Record* const record, Find(name));
  if (record->size_bytes > size_bytes_max) {
    return Malformed(path_, absl::StrCat(prefix_, name, " has ", record->size_bytes,
                                         " bytes in it, at most ", size_bytes_max, " are read"));
  }
  OFFLOAD_ASSIGN_OR_RETURN(const uint64_t offset_bytes, DataOffset(*record));
  std::string bytes(record->size_bytes, 0);
  OFFLOAD_RETURN_IF_ERROR(Read(offset_bytes, WritableBytes(bytes)));
  if (ZipCrc(0, std::as_bytes(std::span(bytes))) != record->crc)
    return Malformed(path_, absl::StrCat(prefix_, name, " does not have its checksum"));
  return bytes;
}

// ---- A tensor ----------------------------------------------------------------------------------

absl::StatusOr<SavedTensorReader> SavedTensorReader::Open(std::shared_ptr<const SavedFile> file,
                                                          const TensorOnFile& tensor) {
  SavedTensorReader reader(std::move(file), tensor);
  if (!tensor.is_row_by_row)
    return Malformed(reader.file_->path(), "its elements do not lie row by row");
  OFFLOAD_ASSIGN_OR_RETURN(reader.record_,
                           reader.file_->Find(absl::StrCat("data/", tensor.storage)));
  OFFLOAD_ASSIGN_OR_RETURN(reader.data_bytes_, reader.file_->DataOffset(*reader.record_));
  // As many as the pickle says: it has compared them with the tensor's.
  const uint64_t element_bytes = reader.element_bytes(), size_bytes = reader.record_->size_bytes;
  if (tensor.storage_elements != size_bytes / element_bytes || size_bytes % element_bytes != 0) {
    return Malformed(reader.file_->path(),
                     absl::StrCat("it has ", size_bytes, " bytes of elements, and says ",
                                  tensor.storage_elements, " of ", element_bytes, " bytes"));
  }
  const uint64_t begin_bytes = tensor.offset_elements * element_bytes;
  // The rest of a storage that is larger than its tensor counts for the checksum.
  OFFLOAD_RETURN_IF_ERROR(reader.Pass(0, begin_bytes));
  reader.at_bytes_ = begin_bytes;
  reader.end_bytes_ = begin_bytes + tensor.element_count * element_bytes;
  return reader;
}

uint64_t SavedTensorReader::element_bytes() const { return FileDtypeBits(tensor_->dtype) / 8; }

absl::Status SavedTensorReader::Pass(uint64_t begin_bytes, uint64_t end_bytes) {
  std::vector<std::byte> bytes;
  while (begin_bytes < end_bytes) {
    bytes.resize(std::min(kPassBytes, end_bytes - begin_bytes));
    OFFLOAD_RETURN_IF_ERROR(file_->Read(data_bytes_ + begin_bytes, bytes));
    crc_ = ZipCrc(crc_, bytes);
    begin_bytes += bytes.size();
  }
  return absl::OkStatus();
}

absl::Status SavedTensorReader::Next(std::span<std::byte> bytes) {
  if (bytes.size() > end_bytes_ - at_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat(file_->path(), " has ", end_bytes_ - at_bytes_,
                                                   " more bytes of elements, and ", bytes.size(),
                                                   " are asked for"));
  }
  OFFLOAD_RETURN_IF_ERROR(file_->Read(data_bytes_ + at_bytes_, bytes));
  crc_ = ZipCrc(crc_, bytes);
  at_bytes_ += bytes.size();
  if (at_bytes_ < end_bytes_) return absl::OkStatus();
  OFFLOAD_RETURN_IF_ERROR(Pass(end_bytes_, record_->size_bytes));
  if (crc_ == record_->crc) return absl::OkStatus();
  return Malformed(file_->path(), "its elements do not have their checksum");
}

}  // namespace offload::zero3

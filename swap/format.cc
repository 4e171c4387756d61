#include "swap/format.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/string_view.h"
#include "swap/layout.h"

namespace offload::swap {
namespace {

// Takes the checksum of a page, skipping the four bytes at `crc_offset` that hold it.
uint32_t PageCrc(const void* page, size_t crc_offset) {
  const char* bytes = static_cast<const char*>(page);
  const size_t after = crc_offset + sizeof(uint32_t);
  return Crc32c(Crc32c(0, bytes, crc_offset), bytes + after, kPageBytes - after);
}

constexpr size_t kPrefixCrcOffset = offsetof(PagePrefix, crc);

bool AllZero(std::span<const uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
}

absl::Status Damaged(std::string_view what) { return absl::DataLossError(ToAbsl(what)); }

// Appends and takes plain values; a taker that has run out stays failed.
template <typename T>
void Append(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Take() {
    T value{};
    const std::string_view taken = TakeBytes(sizeof(T));
    if (!failed_) std::memcpy(&value, taken.data(), sizeof(T));
    return value;
  }
  std::string_view TakeBytes(uint64_t count) {
    if (failed_ || count > bytes_.size()) {
      failed_ = true;
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  uint64_t remaining() const { return bytes_.size(); }
  bool failed() const { return failed_; }

 private:
  std::string_view bytes_;
  bool failed_ = false;
};

constexpr uint64_t kTensorRecordBytesMin = sizeof(uint64_t) + sizeof(uint32_t);

absl::StatusOr<TensorSpec> DecodeTensor(Cursor* cursor) {
  TensorSpec tensor;
  tensor.element_count = cursor->Take<uint64_t>();
  const uint32_t plane_count = cursor->Take<uint32_t>();
  if (plane_count > kPlaneCount)
    return Damaged(absl::StrCat("a tensor has ", plane_count, " planes"));
  for (uint32_t slot = 0; slot < plane_count; ++slot) {
    const uint32_t plane = cursor->Take<uint32_t>();
    const uint32_t bits_per_element = cursor->Take<uint32_t>();
    if (plane >= kPlaneCount) return Damaged(absl::StrCat("unknown plane ", plane));
    tensor.planes.push_back({static_cast<Plane>(plane), bits_per_element});
  }
  return tensor;
}

// A record is free and blank, or names a commit that is older than the one that lists it, by a name
// of its own.
bool IsGoodSnapshot(const SuperblockPage& page, uint32_t number) {
  const SnapshotRecord& record = page.snapshots[number];
  if (!record.in_use()) {
    constexpr SnapshotRecord kFree{};
    return std::memcmp(&record, &kFree, sizeof(record)) == 0;
  }
  const std::string_view name = record.name_view();
  for (uint32_t other = 0; other < number; ++other) {
    if (page.snapshots[other].in_use() && page.snapshots[other].name_view() == name) return false;
  }
  return number < page.generation_count && record.sequence < page.sequence &&
         record.blob_bytes <= Limits::kBlobBytesMax && record.lost <= 1 &&
         IsValidSnapshotName(name) &&
         std::all_of(record.name + name.size(), std::end(record.name),
                     [](char byte) { return byte == 0; });
}

}  // namespace

void SealHeader(HeaderPage* page) {
  page->prefix.magic = HeaderPage::kMagic;
  page->prefix.version = kFormatVersion;
  page->prefix.crc = PageCrc(page, kPrefixCrcOffset);
}

void SealSuperblock(SuperblockPage* page) {
  page->prefix.magic = SuperblockPage::kMagic;
  page->prefix.version = kFormatVersion;
  page->prefix.crc = PageCrc(page, kPrefixCrcOffset);
}

void SealTablePage(TablePage* page) {
  page->magic = TablePage::kMagic;
  page->crc = PageCrc(page, offsetof(TablePage, crc));
}

absl::StatusOr<HeaderPage> DecodeHeader(ConstPageBytes bytes, uint32_t copy) {
  HeaderPage page;
  std::memcpy(&page, bytes.data(), sizeof(page));
  if (page.prefix.magic != HeaderPage::kMagic) return Damaged("not a header page");
  if (page.prefix.crc != PageCrc(&page, kPrefixCrcOffset)) return Damaged("header checksum");
  if (page.prefix.version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("format version ", page.prefix.version));
  }
  if (page.copy != copy) return Damaged(absl::StrCat("header copy ", page.copy, " at ", copy));
  if (!AllZero(page.zeros)) return Damaged("header reserved bytes");
  return page;
}

bool IsBetweenSuperblocks(const SuperblockPage& newest, const std::optional<SuperblockPage>& twin,
                          bool twin_is_zero) {
  const bool is_lower = newest.copy % 2 == 0;
  const bool is_first_of_pair = newest.sequence <= 2;
  return is_lower && (twin.has_value() ? twin->sequence + 2 == newest.sequence
                                       : twin_is_zero && is_first_of_pair);
}

absl::StatusOr<SuperblockPage> DecodeSuperblock(ConstPageBytes bytes, uint32_t copy,
                                                const StoreUuid& uuid) {
  SuperblockPage page;
  std::memcpy(&page, bytes.data(), sizeof(page));
  if (page.prefix.magic != SuperblockPage::kMagic) return Damaged("not a superblock");
  if (page.prefix.crc != PageCrc(&page, kPrefixCrcOffset)) return Damaged("superblock checksum");
  if (page.prefix.version != kFormatVersion) return Damaged("superblock version");
  if (page.uuid != uuid) return Damaged("superblock of another store");
  if (page.copy != copy) return Damaged(absl::StrCat("superblock copy ", page.copy, " at ", copy));
  if (page.sequence == 0 || page.sequence % 2 != copy / 2) {
    return Damaged(absl::StrCat("superblock sequence ", page.sequence, " at copy ", copy));
  }
  if (page.generation_count > kGenerationsMax || page.reserved != 0 || page.table_copy > 1 ||
      page.blob_area > 1 || page.blob_bytes > Limits::kBlobBytesMax || !AllZero(page.zeros)) {
    return Damaged("superblock fields");
  }
  for (uint32_t number = 0; number < kGenerationsMax; ++number) {
    if (!IsGoodSnapshot(page, number)) return Damaged(absl::StrCat("snapshot record ", number));
  }
  return page;
}

absl::Status CheckTablePage(const TablePage& page, const StoreUuid& uuid, uint32_t copy,
                            uint32_t page_index, uint64_t sequence, uint64_t entry_count,
                            uint32_t place_count) {
  if (page.magic != TablePage::kMagic) return Damaged("not a table page");
  if (page.crc != PageCrc(&page, offsetof(TablePage, crc))) return Damaged("table page checksum");
  if (page.uuid != uuid) return Damaged("table page of another store");
  if (page.copy != copy || page.page != page_index) {
    return Damaged(absl::StrCat("table page ", page.page, " of copy ", page.copy, " at ",
                                page_index, " of ", copy));
  }
  if (page.sequence == 0 || page.sequence > sequence) return Damaged("table page sequence");
  const uint64_t first_entry = uint64_t{page_index} * kEntriesPerTablePage;
  for (uint32_t i = 0; i < kEntriesPerTablePage; ++i) {
    const TableEntry& entry = page.entries[i];
    const bool unused = first_entry + i >= entry_count;
    const uint32_t known_flags = TableEntry::kUserFlagsMask | ~0u << TableEntry::kPlaceShift;
    const bool blank = entry.word == 0 && entry.crc == 0 && entry.flags == 0;
    if (entry.sequence > page.sequence || (entry.flags & ~known_flags) != 0 ||
        entry.place() >= place_count || (entry.sequence == 0 && !blank) ||
        (unused && entry.sequence != 0)) {
      return Damaged(absl::StrCat("table entry ", first_entry + i));
    }
  }
  return absl::OkStatus();
}

uint32_t IdentityCrc(const SuperblockPage& page) {
  constexpr size_t kBegin = offsetof(SuperblockPage, parent_crc);
  constexpr size_t kEnd = offsetof(SuperblockPage, zeros);
  return Crc32c(Crc32c(0, page.uuid.data(), page.uuid.size()),
                reinterpret_cast<const char*>(&page) + kBegin, kEnd - kBegin);
}

uint32_t RootCrc(std::span<const uint32_t> page_crcs) {
  return Crc32c(0, page_crcs.data(), page_crcs.size_bytes());
}

uint32_t BlobCrc(const StoreUuid& uuid, uint64_t sequence, std::string_view blob) {
  const uint32_t seed = Crc32c(Crc32c(0, uuid.data(), uuid.size()), &sequence, sizeof(sequence));
  return Crc32c(seed, blob.data(), blob.size());
}

std::string EncodeSpec(const StoreSpec& spec) {
  std::string out;
  Append<uint32_t>(&out, spec.extent_elements);
  Append<uint32_t>(&out, static_cast<uint32_t>(spec.tensors.size()));
  Append<uint64_t>(&out, spec.catalogue.size());
  Append<uint32_t>(&out, static_cast<uint32_t>(spec.job.size()));
  out.append(spec.job);
  for (const TensorSpec& tensor : spec.tensors) {
    Append<uint64_t>(&out, tensor.element_count);
    Append<uint32_t>(&out, static_cast<uint32_t>(tensor.planes.size()));
    for (const PlaneSpec& plane : tensor.planes) {
      Append<uint32_t>(&out, static_cast<uint32_t>(plane.plane));
      Append<uint32_t>(&out, plane.bits_per_element);
    }
  }
  out.append(spec.catalogue);
  return out;
}

absl::StatusOr<StoreSpec> DecodeSpec(std::string_view bytes) {
  Cursor cursor(bytes);
  StoreSpec spec;
  spec.extent_elements = cursor.Take<uint32_t>();
  const uint32_t tensor_count = cursor.Take<uint32_t>();
  const uint64_t catalogue_bytes = cursor.Take<uint64_t>();
  spec.job = cursor.TakeBytes(cursor.Take<uint32_t>());
  // The count is not believed before the bytes for that many are there.
  if (cursor.failed() || tensor_count > cursor.remaining() / kTensorRecordBytesMin)
    return Damaged("spec section is too short");
  spec.tensors.reserve(tensor_count);
  for (uint32_t i = 0; i < tensor_count; ++i) {
    absl::StatusOr<TensorSpec> tensor = DecodeTensor(&cursor);
    if (!tensor.ok()) return tensor.status();
    spec.tensors.push_back(*std::move(tensor));
  }
  spec.catalogue = cursor.TakeBytes(catalogue_bytes);
  if (cursor.failed() || cursor.remaining() != 0)
    return Damaged("spec section has another length than it says");
  if (absl::Status status = ValidateSpec(spec); !status.ok())
    return Damaged(ToStd(status.message()));
  return spec;
}

uint32_t ExtentSeed(const StoreUuid& uuid, const ExtentId& id, uint64_t sequence) {
  struct Binding {
    StoreUuid uuid;
    uint64_t sequence;
    uint32_t tensor;
    uint32_t index;
    uint64_t plane;
  };
  static_assert(sizeof(Binding) == 40 && std::has_unique_object_representations_v<Binding>);
  const Binding binding{uuid, sequence, id.tensor, id.index, static_cast<uint64_t>(id.plane)};
  return Crc32c(0, &binding, sizeof(binding));
}

}  // namespace offload::swap

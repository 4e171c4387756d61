#include "swap/recovery.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace offload::swap {
namespace {

constexpr size_t kReadBytesMax = size_t{1} << 20;

class Recovery {
 public:
  Recovery(std::string_view name, uint64_t file_bytes, const ReadPages& read)
      : name_(name), file_bytes_(file_bytes), read_(read) {}

  absl::StatusOr<RecoveredStore> Run(RecoveryDepth depth) {
    OFFLOAD_RETURN_IF_ERROR(FindHeader());
    OFFLOAD_RETURN_IF_ERROR(ReadSpec());
    OFFLOAD_RETURN_IF_ERROR(ChooseSuperblock());
    if (depth == RecoveryDepth::kWhole) {
      OFFLOAD_RETURN_IF_ERROR(ReadTable());
      OFFLOAD_RETURN_IF_ERROR(ReadBlob());
    }
    return std::move(store_);
  }

 private:
  absl::Status FindHeader();
  absl::Status ReadSpec();
  absl::Status ChooseSuperblock();
  absl::Status ReadSuperblocks();
  absl::Status CheckOtherPair(uint32_t lower_copy, uint64_t newest_sequence) const;
  absl::Status ReadTable();
  absl::Status ReadBlob();

  absl::Status Damaged(std::string_view what) const {
    return MakeError(ErrorId::kStoreDamaged, absl::StrCat(ToAbsl(name_), ": ", ToAbsl(what)));
  }
  void Repaired(std::string what) { store_.repairs.push_back(std::move(what)); }

  // Reads pages; those that cannot be read become zeros, which no decode accepts. Says whether all
  // could be read.
  bool Read(uint64_t offset_bytes, std::span<std::byte> bytes);
  bool ReadOrZero(uint64_t offset_bytes, std::span<std::byte> bytes);
  bool InFile(uint64_t offset_bytes, uint64_t size_bytes) const {
    return offset_bytes <= file_bytes_ && size_bytes <= file_bytes_ - offset_bytes;
  }

  // Takes the newer of the two mirrors of a page that are intact; copies it into `best`. When both
  // are as new and differ, `tied` is set.
  bool ChooseTablePage(uint32_t page_index, TablePage* best, const TablePage& twin, bool* tied);
  bool HasRoot() const;

  const std::string_view name_;
  const uint64_t file_bytes_;
  const ReadPages& read_;
  RecoveredStore store_;
  std::array<std::optional<SuperblockPage>, kSuperblockCount> superblocks_;  // the intact ones
  std::array<std::string, kSuperblockCount> superblock_errors_;
  std::array<bool, kSuperblockCount> superblock_zero_{};  // could be read, and was never written
};

bool Recovery::ReadOrZero(uint64_t offset_bytes, std::span<std::byte> bytes) {
  if (InFile(offset_bytes, bytes.size()) && read_(offset_bytes, bytes).ok()) return true;
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  return false;
}

bool Recovery::Read(uint64_t offset_bytes, std::span<std::byte> bytes) {
  bool whole = true;
  for (size_t done = 0; done < bytes.size(); done += kReadBytesMax) {
    const std::span<std::byte> piece =
        bytes.subspan(done, std::min(kReadBytesMax, bytes.size() - done));
    if (ReadOrZero(offset_bytes + done, piece)) continue;
    whole = false;  // one bad sector must not cost its neighbours
    for (size_t page = 0; page < piece.size(); page += kPageBytes) {
      ReadOrZero(offset_bytes + done + page, piece.subspan(page, kPageBytes));
    }
  }
  return whole;
}

absl::Status Recovery::FindHeader() {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion page, MappedRegion::Anonymous(kPageBytes));
  std::optional<HeaderPage> found;
  absl::Status first_error;
  bool other_version = false;
  for (uint32_t copy = 0; copy < 2; ++copy) {
    Read(Layout::HeaderOffset(copy), page.span());
    const absl::StatusOr<HeaderPage> header = DecodeHeader(page.span().first<kPageBytes>(), copy);
    if (header.ok() && !found) {
      found = *header;
    } else if (header.ok() && (header->uuid != found->uuid || header->spec_crc != found->spec_crc ||
                               header->spec_bytes != found->spec_bytes ||
                               header->file_bytes != found->file_bytes)) {
      return Damaged("its two headers contradict each other");
    } else if (!header.ok()) {
      other_version |= absl::IsFailedPrecondition(header.status());
      Repaired(absl::StrCat("header copy ", copy, ": ", header.status().message()));
      if (first_error.ok()) first_error = header.status();
    }
  }
  if (!found && other_version) {
    return MakeError(
        ErrorId::kStoreVersion,
        absl::StrCat(ToAbsl(name_), " (this release reads version ", kFormatVersion, ")"));
  }
  if (!found) return Damaged(absl::StrCat("no intact header (", first_error.message(), ")"));
  if (found->file_bytes > file_bytes_) {
    return Damaged(
        absl::StrCat("the file has ", file_bytes_, " of its ", found->file_bytes, " bytes"));
  }
  store_.header = *found;
  return absl::OkStatus();
}

absl::Status Recovery::ReadSpec() {
  const uint64_t spec_bytes = store_.header.spec_bytes;
  if (spec_bytes == 0 || spec_bytes > file_bytes_ / 2 ||
      !InFile(kSpecAreaOffset, 2 * RoundUpToPage(spec_bytes))) {
    return Damaged(absl::StrCat("impossible spec length ", spec_bytes));
  }
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes,
                           MappedRegion::Anonymous(RoundUpToPage(spec_bytes)));
  bool found = false;
  for (uint32_t copy = 0; copy < 2 && !found; ++copy) {
    Read(Layout::SpecOffset(copy, spec_bytes), bytes.span());
    found = Crc32c(0, bytes.data(), spec_bytes) == store_.header.spec_crc;
    if (!found) Repaired(absl::StrCat("spec copy ", copy, ": checksum"));
  }
  if (!found) return Damaged("neither copy of the spec is intact");
  absl::StatusOr<StoreSpec> spec =
      DecodeSpec({reinterpret_cast<const char*>(bytes.data()), spec_bytes});
  if (!spec.ok()) return Damaged(ToStd(spec.status().message()));
  absl::StatusOr<Layout> layout = Layout::Make(*spec);
  if (!layout.ok()) return Damaged(ToStd(layout.status().message()));
  if (layout->file_bytes() != store_.header.file_bytes) {
    return Damaged(absl::StrCat("header says ", store_.header.file_bytes, " bytes, spec ",
                                layout->file_bytes()));
  }
  store_.spec = *std::move(spec);
  store_.layout = *std::move(layout);
  return absl::OkStatus();
}

// Twice, and the newer intact one counts: a read that goes wrong once must not hide a commit that
// the next start would find again, when its places may have been reused.
absl::Status Recovery::ReadSuperblocks() {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion page, MappedRegion::Anonymous(kPageBytes));
  for (uint32_t read = 0; read < 2 * kSuperblockCount; ++read) {
    const uint32_t copy = read % kSuperblockCount;
    const bool readable = Read(Layout::SuperblockOffset(copy), page.span());
    absl::StatusOr<SuperblockPage> decoded =
        DecodeSuperblock(page.span().first<kPageBytes>(), copy, store_.header.uuid);
    if (!decoded.ok()) {
      superblock_errors_[copy] = std::string(decoded.status().message());
      superblock_zero_[copy] |=
          readable && std::all_of(page.span().begin(), page.span().end(),
                                  [](std::byte byte) { return byte == std::byte{0}; });
      continue;
    }
    if (decoded->table_page_count != store_.layout.table_page_count()) {
      return Damaged(absl::StrCat("superblock ", copy, " says ", decoded->table_page_count,
                                  " table pages, spec ", store_.layout.table_page_count()));
    }
    std::optional<SuperblockPage>& found = superblocks_[copy];
    if (!found || decoded->sequence > found->sequence) found = *std::move(decoded);
  }
  return absl::OkStatus();
}

// A commit makes its lower superblock durable before it touches the higher one, so a crash leaves
// one of a pair intact. Where both are bad the drive has lost them, and nobody knows whether they
// held a commit newer than the other pair's. (Before commit 2 the pair {0,1} has never been
// written: zeros in either say so, for the other may be torn, or a bit of it have rotted.)
absl::Status Recovery::CheckOtherPair(uint32_t lower_copy, uint64_t newest_sequence) const {
  if (superblocks_[lower_copy] || superblocks_[lower_copy + 1]) return absl::OkStatus();
  const bool never_written = superblock_zero_[lower_copy] || superblock_zero_[lower_copy + 1];
  if (newest_sequence == 1 && never_written) return absl::OkStatus();
  return Damaged(absl::StrCat("neither superblock ", lower_copy, " (",
                              superblock_errors_[lower_copy], ") nor ", lower_copy + 1, " (",
                              superblock_errors_[lower_copy + 1], ") is intact"));
}

absl::Status Recovery::ChooseSuperblock() {
  OFFLOAD_RETURN_IF_ERROR(ReadSuperblocks());
  const SuperblockPage* newest = nullptr;
  for (const std::optional<SuperblockPage>& found : superblocks_) {
    if (found && (newest == nullptr || found->sequence > newest->sequence)) newest = &*found;
  }
  if (newest == nullptr)
    return Damaged(absl::StrCat("no intact superblock (", superblock_errors_[0], ")"));
  OFFLOAD_RETURN_IF_ERROR(CheckOtherPair((newest->copy & 2) ^ 2, newest->sequence));
  const uint32_t twin = newest->copy ^ 1;
  if (!superblocks_[twin]) {
    Repaired(absl::StrCat("superblock copy ", twin, ": ", superblock_errors_[twin]));
  } else if (superblocks_[twin]->sequence != newest->sequence) {
    Repaired(
        absl::StrCat("superblock copy ", twin, ": of sequence ", superblocks_[twin]->sequence));
  } else if (IdentityCrc(*superblocks_[twin]) != IdentityCrc(*newest)) {
    return Damaged(
        absl::StrCat("two superblocks of sequence ", newest->sequence, " contradict each other"));
  }
  for (const std::optional<SuperblockPage>& older : superblocks_) {
    if (older && older->sequence + 1 == newest->sequence &&
        newest->parent_crc != IdentityCrc(*older)) {
      return Damaged(
          absl::StrCat("sequence ", newest->sequence, " does not follow from ", older->sequence));
    }
  }
  store_.superblock = *newest;
  store_.superblock_twin_missing =
      !superblocks_[twin] || superblocks_[twin]->sequence != newest->sequence;
  store_.committed.sequence = newest->sequence;
  store_.committed.epoch = newest->epoch;
  return absl::OkStatus();
}

bool Recovery::ChooseTablePage(uint32_t page_index, TablePage* best, const TablePage& twin,
                               bool* tied) {
  const SuperblockPage& superblock = store_.superblock;
  const auto check = [&](const TablePage& page) {
    return CheckTablePage(page, store_.header.uuid, superblock.table_copy, page_index,
                          superblock.sequence, store_.layout.entry_count());
  };
  const absl::Status first = check(*best), second = check(twin);
  if (!first.ok() && !second.ok()) return false;
  const bool take_twin = !first.ok() || (second.ok() && twin.sequence > best->sequence);
  if (!first.ok() || !second.ok() || best->crc != twin.crc) {
    store_.repaired_table_pages.push_back(page_index);
    const absl::Status& error = take_twin ? first : second;
    Repaired(absl::StrCat("table page ", page_index, ", mirror ", take_twin ? 0 : 1, ": ",
                          error.ok() ? "a lost write" : error.message()));
  }
  *tied = first.ok() && second.ok() && best->sequence == twin.sequence && best->crc != twin.crc;
  if (take_twin) std::memcpy(best, &twin, sizeof(twin));
  return true;
}

bool Recovery::HasRoot() const {
  return RootCrc(store_.table_page_crcs) == store_.superblock.table_root_crc;
}

absl::Status Recovery::ReadTable() {
  const Layout& layout = store_.layout;
  const uint32_t table_copy = store_.superblock.table_copy;
  OFFLOAD_ASSIGN_OR_RETURN(store_.table, MappedRegion::Anonymous(layout.table_bytes()));
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion mirror,
                           MappedRegion::Anonymous(layout.table_bytes()));
  Read(layout.TableOffset(table_copy, 0), store_.table.span());
  Read(layout.TableOffset(table_copy, 1), mirror.span());
  auto* best = reinterpret_cast<TablePage*>(store_.table.data());
  const auto* twin = reinterpret_cast<const TablePage*>(mirror.data());
  std::vector<uint32_t> tied_pages;
  for (uint32_t page = 0; page < layout.table_page_count(); ++page) {
    bool tied = false;
    if (!ChooseTablePage(page, &best[page], twin[page], &tied)) {
      return Damaged(absl::StrCat("neither mirror of table page ", page, " is intact"));
    }
    store_.table_page_crcs.push_back(best[page].crc);
    if (tied) tied_pages.push_back(page);
  }
  // A commit that a crash abandoned had the sequence of the one that was made in its stead; a
  // mirror that missed the second looks as new as its twin, and only the root tells which is right.
  for (const uint32_t page : HasRoot() ? std::vector<uint32_t>{} : tied_pages) {
    std::memcpy(&best[page], &twin[page], kPageBytes);
    store_.table_page_crcs[page] = best[page].crc;
  }
  if (!HasRoot()) {
    return Damaged(absl::StrCat("the table is not that of sequence ", store_.superblock.sequence));
  }
  return absl::OkStatus();
}

absl::Status Recovery::ReadBlob() {
  const SuperblockPage& superblock = store_.superblock;
  if (superblock.blob_bytes == 0) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes,
                           MappedRegion::Anonymous(RoundUpToPage(superblock.blob_bytes)));
  const std::string_view blob(reinterpret_cast<const char*>(bytes.data()), superblock.blob_bytes);
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    Read(store_.layout.BlobOffset(superblock.blob_area, mirror), bytes.span());
    if (BlobCrc(store_.header.uuid, superblock.sequence, blob) == superblock.blob_crc) {
      store_.committed.blob = blob;
      return absl::OkStatus();
    }
    Repaired(absl::StrCat("blob mirror ", mirror, ": checksum"));
  }
  return Damaged("neither mirror of the trainer's state is intact");
}

}  // namespace

absl::StatusOr<RecoveredStore> Recover(std::string_view name, uint64_t file_bytes,
                                       const ReadPages& read, RecoveryDepth depth) {
  return Recovery(name, file_bytes, read).Run(depth);
}

}  // namespace offload::swap

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
    ListSnapshots();
    if (depth == RecoveryDepth::kSummary) return std::move(store_);
    OFFLOAD_RETURN_IF_ERROR(ReadTable());
    OFFLOAD_RETURN_IF_ERROR(ReadBlob());
    if (depth == RecoveryDepth::kWhole) OFFLOAD_RETURN_IF_ERROR(ReadSnapshotPlaces());
    return std::move(store_);
  }

  absl::StatusOr<RecoveredStore> RunSnapshot(std::string_view snapshot) {
    OFFLOAD_RETURN_IF_ERROR(FindHeader());
    OFFLOAD_RETURN_IF_ERROR(ReadSpec());
    OFFLOAD_RETURN_IF_ERROR(ChooseSuperblock());
    ListSnapshots();
    OFFLOAD_RETURN_IF_ERROR(ReadSnapshot(snapshot));
    return std::move(store_);
  }

 private:
  // A table on disk, and what of it is read.
  struct TableAddress {
    std::string_view name;  // "" for the last commit's; else how messages begin
    uint32_t copy = 0;
    uint64_t sequence = 0;
    uint32_t root_crc = 0;
    std::array<uint64_t, 2> offsets_bytes{};  // of the two mirrors
  };
  struct LoadedTable {
    MappedRegion pages;  // the better mirror of each
    std::vector<uint32_t> page_crcs;
    std::vector<std::pair<uint32_t, uint32_t>> repaired_pages;  // page, and the mirror that is bad
    std::vector<uint32_t> tied_pages;  // both mirrors are intact and as new, and differ
  };

  absl::Status FindHeader();
  absl::Status ReadSpec();
  absl::Status ChooseSuperblock();
  absl::Status ReadSuperblocks();
  absl::Status CheckOtherPair(uint32_t lower_copy, uint64_t newest_sequence) const;
  absl::Status ReadTable();
  absl::Status LoadTable(const TableAddress& address, LoadedTable* loaded);
  absl::Status ReadBlob();
  absl::Status LoadBlob(uint64_t sequence, uint32_t blob_bytes, uint32_t blob_crc,
                        const std::array<uint64_t, 2>& offsets_bytes);
  void ListSnapshots();
  absl::Status SnapshotLost(const SnapshotRecord& record) const;
  absl::Status LoadSnapshotTable(uint32_t number, LoadedTable* loaded);
  absl::Status ReadSnapshotPlaces();
  absl::Status ReadSnapshot(std::string_view snapshot);

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

  // Takes the newer of the two mirrors of a page that are intact; copies it into `best`. False when
  // neither is.
  bool ChooseTablePage(const TableAddress& address, uint32_t page_index, TablePage* best,
                       const TablePage& twin, LoadedTable* loaded);

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
  if (IsBetweenSuperblocks(*newest, superblocks_[twin], superblock_zero_[twin])) {
    // Nothing was bad.
  } else if (!superblocks_[twin]) {
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
  if (store_.layout.file_bytes(newest->generation_count) > file_bytes_) {
    return Damaged(absl::StrCat("the file has ", file_bytes_, " of its ",
                                store_.layout.file_bytes(newest->generation_count), " bytes"));
  }
  store_.superblock = *newest;
  store_.superblock_twin_missing =
      !superblocks_[twin] || superblocks_[twin]->sequence != newest->sequence;
  store_.committed.sequence = newest->sequence;
  store_.committed.epoch = newest->epoch;
  return absl::OkStatus();
}

bool Recovery::ChooseTablePage(const TableAddress& address, uint32_t page_index, TablePage* best,
                               const TablePage& twin, LoadedTable* loaded) {
  const auto check = [&](const TablePage& page) {
    return CheckTablePage(page, store_.header.uuid, address.copy, page_index, address.sequence,
                          store_.layout.entry_count(), 2 + store_.superblock.generation_count);
  };
  const absl::Status first = check(*best), second = check(twin);
  if (!first.ok() && !second.ok()) return false;
  const bool take_twin = !first.ok() || (second.ok() && twin.sequence > best->sequence);
  if (!first.ok() || !second.ok() || best->crc != twin.crc) {
    const uint32_t bad_mirror = take_twin ? 0 : 1;
    loaded->repaired_pages.emplace_back(page_index, bad_mirror);
    const absl::Status& error = take_twin ? first : second;
    Repaired(absl::StrCat(ToAbsl(address.name), "table page ", page_index, ", mirror ", bad_mirror,
                          ": ", error.ok() ? "a lost write" : error.message()));
  }
  const bool tied =
      first.ok() && second.ok() && best->sequence == twin.sequence && best->crc != twin.crc;
  if (tied) loaded->tied_pages.push_back(page_index);
  if (take_twin) std::memcpy(best, &twin, sizeof(twin));
  return true;
}

absl::Status Recovery::LoadTable(const TableAddress& address, LoadedTable* loaded) {
  const Layout& layout = store_.layout;
  OFFLOAD_ASSIGN_OR_RETURN(loaded->pages, MappedRegion::Anonymous(layout.table_bytes()));
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion mirror,
                           MappedRegion::Anonymous(layout.table_bytes()));
  Read(address.offsets_bytes[0], loaded->pages.span());
  Read(address.offsets_bytes[1], mirror.span());
  auto* best = reinterpret_cast<TablePage*>(loaded->pages.data());
  const auto* twin = reinterpret_cast<const TablePage*>(mirror.data());
  for (uint32_t page = 0; page < layout.table_page_count(); ++page) {
    if (!ChooseTablePage(address, page, &best[page], twin[page], loaded)) {
      return Damaged(
          absl::StrCat(ToAbsl(address.name), "neither mirror of table page ", page, " is intact"));
    }
    loaded->page_crcs.push_back(best[page].crc);
  }
  const auto has_root = [&] { return RootCrc(loaded->page_crcs) == address.root_crc; };
  // A commit that a crash abandoned had the sequence of the one that was made in its stead; a
  // mirror that missed the second looks as new as its twin, and only the root tells which is right.
  for (const uint32_t page : has_root() ? std::vector<uint32_t>{} : loaded->tied_pages) {
    std::memcpy(&best[page], &twin[page], kPageBytes);
    loaded->page_crcs[page] = best[page].crc;
    for (auto& [repaired, bad_mirror] : loaded->repaired_pages) {
      if (repaired == page) bad_mirror = 0;
    }
  }
  if (has_root()) return absl::OkStatus();
  return Damaged(
      absl::StrCat(ToAbsl(address.name), "the table is not that of sequence ", address.sequence));
}

absl::Status Recovery::ReadTable() {
  const SuperblockPage& superblock = store_.superblock;
  const uint32_t copy = superblock.table_copy;
  LoadedTable loaded;
  OFFLOAD_RETURN_IF_ERROR(LoadTable(
      {.copy = copy,
       .sequence = superblock.sequence,
       .root_crc = superblock.table_root_crc,
       .offsets_bytes = {store_.layout.TableOffset(copy, 0), store_.layout.TableOffset(copy, 1)}},
      &loaded));
  store_.table = std::move(loaded.pages);
  store_.table_page_crcs = std::move(loaded.page_crcs);
  for (const auto& [page, mirror] : loaded.repaired_pages)
    store_.repaired_table_pages.push_back(page);
  return absl::OkStatus();
}

absl::Status Recovery::ReadBlob() {
  const SuperblockPage& superblock = store_.superblock;
  const uint32_t area = superblock.blob_area;
  return LoadBlob(superblock.sequence, superblock.blob_bytes, superblock.blob_crc,
                  {store_.layout.BlobOffset(area, 0), store_.layout.BlobOffset(area, 1)});
}

absl::Status Recovery::LoadBlob(uint64_t sequence, uint32_t blob_bytes, uint32_t blob_crc,
                                const std::array<uint64_t, 2>& offsets_bytes) {
  if (blob_bytes == 0) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes,
                           MappedRegion::Anonymous(RoundUpToPage(blob_bytes)));
  const std::string_view blob(reinterpret_cast<const char*>(bytes.data()), blob_bytes);
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    Read(offsets_bytes[mirror], bytes.span());
    if (BlobCrc(store_.header.uuid, sequence, blob) == blob_crc) {
      store_.committed.blob = blob;
      return absl::OkStatus();
    }
    Repaired(absl::StrCat("blob mirror ", mirror, ": checksum"));
  }
  return Damaged("neither mirror of the trainer's state is intact");
}

// ---- Snapshots ---------------------------------------------------------------------------------

void Recovery::ListSnapshots() {
  for (uint32_t number = 0; number < kGenerationsMax; ++number) {
    const SnapshotRecord& record = store_.superblock.snapshots[number];
    if (!record.in_use()) continue;
    store_.snapshots[number] = {std::string(record.name_view()), record.sequence, record.epoch,
                                record.created_unix_seconds,
                                record.lost != 0 ? SnapshotLost(record) : absl::OkStatus()};
  }
}

absl::Status Recovery::SnapshotLost(const SnapshotRecord& record) const {
  return MakeError(ErrorId::kSnapshot,
                   absl::StrCat(ToAbsl(name_), ": snapshot ", ToAbsl(record.name_view()),
                                " is lost: both ", "copies of its table were damaged"));
}

absl::Status Recovery::LoadSnapshotTable(uint32_t number, LoadedTable* loaded) {
  const SnapshotRecord& record = store_.superblock.snapshots[number];
  const std::string label = absl::StrCat("snapshot ", ToAbsl(record.name_view()), ", ");
  return LoadTable({.name = label,
                    .copy = 2 + number,
                    .sequence = record.sequence,
                    .root_crc = record.table_root_crc,
                    .offsets_bytes = {store_.layout.SnapshotTableOffset(number, 0),
                                      store_.layout.SnapshotTableOffset(number, 1)}},
                   loaded);
}

// Where the extents of every snapshot stand, so that nothing is written there.
absl::Status Recovery::ReadSnapshotPlaces() {
  for (uint32_t number = 0; number < kGenerationsMax; ++number) {
    std::optional<SnapshotInfo>& snapshot = store_.snapshots[number];
    if (!snapshot || !snapshot->damage.ok()) continue;
    LoadedTable loaded;
    absl::Status status = LoadSnapshotTable(number, &loaded);
    if (absl::IsDataLoss(status)) {  // what is lost stays lost: not for a read that fails once
      loaded = {};
      status = LoadSnapshotTable(number, &loaded);
    }
    if (absl::IsDataLoss(status)) {
      snapshot->damage = SnapshotLost(store_.superblock.snapshots[number]);
      Repaired(absl::StrCat("nothing: ", status.message()));
      continue;
    }
    OFFLOAD_RETURN_IF_ERROR(status);
    const auto* pages = reinterpret_cast<const TablePage*>(loaded.pages.data());
    store_.snapshot_places[number] = PlacesOf(pages, store_.layout.entry_count());
    for (const auto& [page, mirror] : loaded.repaired_pages) {
      PageRepair repair{store_.layout.SnapshotTableOffset(number, mirror) + page * kPageBytes, {}};
      OFFLOAD_ASSIGN_OR_RETURN(repair.page, MappedRegion::Anonymous(kPageBytes));
      std::memcpy(repair.page.data(), &pages[page], kPageBytes);
      store_.snapshot_repairs.push_back(std::move(repair));
    }
  }
  return absl::OkStatus();
}

absl::Status Recovery::ReadSnapshot(std::string_view snapshot) {
  uint32_t number = 0;
  while (number < kGenerationsMax &&
         (!store_.snapshots[number] || store_.snapshots[number]->name != snapshot))
    ++number;
  if (number == kGenerationsMax) {
    return MakeError(ErrorId::kSnapshot,
                     absl::StrCat(ToAbsl(name_), " has no snapshot ", ToAbsl(snapshot)));
  }
  OFFLOAD_RETURN_IF_ERROR(store_.snapshots[number]->damage);
  LoadedTable loaded;
  OFFLOAD_RETURN_IF_ERROR(LoadSnapshotTable(number, &loaded));
  store_.table = std::move(loaded.pages);
  const SnapshotRecord& record = store_.superblock.snapshots[number];
  store_.committed.sequence = record.sequence;
  store_.committed.epoch = record.epoch;
  return LoadBlob(
      record.sequence, record.blob_bytes, record.blob_crc,
      {store_.layout.SnapshotBlobOffset(number, 0), store_.layout.SnapshotBlobOffset(number, 1)});
}

}  // namespace

absl::StatusOr<RecoveredStore> Recover(std::string_view name, uint64_t file_bytes,
                                       const ReadPages& read, RecoveryDepth depth) {
  return Recovery(name, file_bytes, read).Run(depth);
}

absl::StatusOr<RecoveredStore> RecoverSnapshot(std::string_view name, uint64_t file_bytes,
                                               const ReadPages& read, std::string_view snapshot) {
  return Recovery(name, file_bytes, read).RunSnapshot(snapshot);
}

std::vector<uint8_t> PlacesOf(const TablePage* pages, uint64_t entry_count) {
  std::vector<uint8_t> places(entry_count);
  for (uint64_t i = 0; i < entry_count; ++i) {
    const TableEntry& entry = pages[i / kEntriesPerTablePage].entries[i % kEntriesPerTablePage];
    places[i] = entry.sequence == 0 ? kNoPlace : static_cast<uint8_t>(entry.place());
  }
  return places;
}

}  // namespace offload::swap

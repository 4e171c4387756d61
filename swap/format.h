// swap/format.h
//
// The bytes of a store file's pages: small PODs, little endian, and the pure functions that make
// and judge them. DESIGN.md has the picture, a worked example and the crash table.
//
// Invariants
//   * A decode believes nothing: it checks magic, version, checksum, store, position and every
//   number, and answers with DATA_LOSS
//     (or OFD-1206 for an intact header of another version); hostile bytes never crash it.
//   * A checksum covers its whole page but the four bytes that hold it.
//   * The first 16 bytes of the header page mean the same in every version.
//
// Thread safety: pure functions.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"

namespace offload::swap {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint32_t kFormatVersion = 2;
inline constexpr uint32_t kSuperblockCount = 4;
inline constexpr uint64_t kSpecAreaOffset = (2 + kSuperblockCount) * kPageBytes;

constexpr uint64_t RoundUpToPage(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

using StoreUuid = std::array<uint8_t, 16>;

// Begins the header page and the superblocks.
struct PagePrefix {
  uint64_t magic;
  uint32_t version;
  uint32_t crc;
};
static_assert(sizeof(PagePrefix) == 16);

// Written once at format, in two copies.
struct HeaderPage {
  static constexpr uint64_t kMagic = 0x4441454844464F00;  // "\0OFDHEAD"
  PagePrefix prefix;
  StoreUuid uuid;
  uint32_t copy;      // 0 or 1
  uint32_t spec_crc;  // of the spec section, which follows the superblocks, twice
  uint64_t spec_bytes;
  uint64_t file_bytes;  // without spare generations
  uint8_t zeros[kPageBytes - 56];
};
static_assert(sizeof(HeaderPage) == kPageBytes && std::is_trivially_copyable_v<HeaderPage>);
static_assert(offsetof(HeaderPage, file_bytes) == 48);

// Names a commit that is kept: a snapshot. The record's number says where its table and blob are.
struct SnapshotRecord {
  uint64_t sequence;  // of the commit that it names; 0: the record is free
  uint64_t epoch;
  int64_t created_unix_seconds;
  uint32_t table_root_crc;
  uint32_t blob_bytes;
  uint32_t blob_crc;
  uint32_t lost;  // 1: its table was found damaged, and its places are no longer kept
  char name[kSnapshotNameBytesMax];  // zeros behind it
  bool in_use() const { return sequence != 0; }
  std::string_view name_view() const { return {name, strnlen(name, sizeof(name))}; }
};
static_assert(sizeof(SnapshotRecord) == 104 && std::is_trivially_copyable_v<SnapshotRecord>);

// Names a commit. Copies {0,1} hold even sequences, {2,3} odd ones.
struct SuperblockPage {
  static constexpr uint64_t kMagic = 0x5245505553464F00;  // "\0OFSUPER"
  PagePrefix prefix;
  StoreUuid uuid;
  uint32_t copy;            // 0 to 3
  uint32_t parent_crc;      // IdentityCrc of the commit before
  uint64_t sequence;        // counts commits, from 1
  uint64_t epoch;           // the optimizer step that the commit holds
  uint32_t table_copy;      // which of the two table copies belongs to the commit
  uint32_t table_root_crc;  // over the checksums of that copy's pages
  uint32_t table_page_count;
  uint32_t blob_area;
  uint32_t blob_bytes;
  uint32_t blob_crc;
  uint32_t generation_count;  // spare generations that the file has
  uint32_t reserved;
  SnapshotRecord snapshots[kGenerationsMax];
  uint8_t zeros[kPageBytes - 88 - kGenerationsMax * sizeof(SnapshotRecord)];
};
static_assert(sizeof(SuperblockPage) == kPageBytes && std::is_trivially_copyable_v<SuperblockPage>);
static_assert(offsetof(SuperblockPage, snapshots) == 88);

// What is known of one extent.
struct TableEntry {
  static constexpr uint32_t kPlaceShift = 28;
  static constexpr uint32_t kUserFlagsMask = 0xFFFF;
  uint64_t sequence;  // 0: never written
  uint64_t word;
  uint32_t crc;
  uint32_t flags;  // of the writer, and in the upper four bits the place
  uint32_t place() const { return flags >> kPlaceShift; }
  uint32_t user_flags() const { return flags & kUserFlagsMask; }
};
static_assert(sizeof(TableEntry) == 24 && std::is_trivially_copyable_v<TableEntry>);

static_assert(2 + kGenerationsMax <= 1u << (32 - TableEntry::kPlaceShift));

inline constexpr uint32_t kEntriesPerTablePage = 169;

struct TablePage {
  static constexpr uint32_t kMagic = 0x4C425446;  // "FTBL"
  uint32_t magic;
  uint32_t crc;
  uint32_t copy;      // 0 or 1, or 2 + the number of a snapshot; two mirrors are equal byte by byte
  uint32_t page;      // index in the copy
  uint64_t sequence;  // of the commit that wrote the page
  StoreUuid uuid;
  TableEntry entries[kEntriesPerTablePage];
};
static_assert(sizeof(TablePage) == kPageBytes && std::is_trivially_copyable_v<TablePage>);
static_assert(offsetof(TablePage, entries) == 40);

using PageBytes = std::span<std::byte, kPageBytes>;
using ConstPageBytes = std::span<const std::byte, kPageBytes>;

// Fills in magic, version and checksum of a page whose other fields are set.
void SealHeader(HeaderPage* page);
void SealSuperblock(SuperblockPage* page);
void SealTablePage(TablePage* page);

// What a crash leaves between the two writes of a commit: `newest` is in the lower copy of its
// pair, and the higher one is the commit's before, `twin`, or was never written. No damage: the
// next Open writes it.
bool IsBetweenSuperblocks(const SuperblockPage& newest, const std::optional<SuperblockPage>& twin,
                          bool twin_is_zero);

// `copy` is where the page was read from.
absl::StatusOr<HeaderPage> DecodeHeader(ConstPageBytes bytes, uint32_t copy);
absl::StatusOr<SuperblockPage> DecodeSuperblock(ConstPageBytes bytes, uint32_t copy,
                                                const StoreUuid& uuid);
// OK when the page is what commit `sequence` or one before it wrote as page `page` of table copy
// `copy` of a store with so many places. The last page of a table has entries that no extent has:
// they are zero.
absl::Status CheckTablePage(const TablePage& page, const StoreUuid& uuid, uint32_t copy,
                            uint32_t page_index, uint64_t sequence, uint64_t entry_count,
                            uint32_t place_count);

// What the four superblocks of one history have in common: the same for both copies of a commit.
uint32_t IdentityCrc(const SuperblockPage& page);
// Over the checksums of a table copy's pages, in order.
uint32_t RootCrc(std::span<const uint32_t> page_crcs);
uint32_t BlobCrc(const StoreUuid& uuid, uint64_t sequence, std::string_view blob);

// The spec section. A decoded spec has passed ValidateSpec.
std::string EncodeSpec(const StoreSpec& spec);
absl::StatusOr<StoreSpec> DecodeSpec(std::string_view bytes);

// Binds a checksum to the store, the extent and the commit that writes it; not to the place, which
// the writer does not know yet.
uint32_t ExtentSeed(const StoreUuid& uuid, const ExtentId& id, uint64_t sequence);

}  // namespace offload::swap

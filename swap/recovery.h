// swap/recovery.h
//
// From the bytes of a store file to the state of its last committed epoch: a pure function of the
// file's length and content, so that it can be tested, fuzzed and used by tools without a store, a
// lock or a device. It writes nothing.
//
// Rules
//   * The newest intact superblock names the commit. It was written only after its table was
//   durable, so when that table cannot be
//     read the store is damaged; an older commit is never taken instead, because its places may
//     have been reused.
//   * Everything but the extents exists twice; a damaged or unreadable copy is replaced by its twin
//   and reported.
//   * A snapshot whose table cannot be read is lost, and said to be; the last commit is not.
//
// Thread safety: pure functions (as far as `read` is).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mapped_region.h"
#include "swap/format.h"
#include "swap/layout.h"
#include "swap/store.h"

namespace offload::swap {

// Reads whole pages; offset, address and length are multiples of 4096. A failure counts as damage
// of those pages.
using ReadPages = std::function<absl::Status(uint64_t offset_bytes, std::span<std::byte> bytes)>;

enum class RecoveryDepth {
  kSummary,  // header, spec and superblocks: may run beside the owner of the store
  kCommit,   // table and blob of the last commit too: what the head of a striped store holds
  kWhole,    // and the tables of snapshots
};

// A page that is bad on disk, as it should be there.
struct PageRepair {
  uint64_t offset_bytes = 0;
  MappedRegion page;
};

struct RecoveredStore {
  HeaderPage header{};
  StoreSpec spec;
  Layout layout;
  SuperblockPage superblock{};
  CommitInfo committed;  // blob not with kSummary

  // Not with kSummary: the pages of the committed table copy, the better mirror of each.
  MappedRegion table;
  std::vector<uint32_t> table_page_crcs;
  std::vector<uint32_t> repaired_table_pages;  // one of their mirrors is bad on disk

  // By number of the record. Without kWhole only what the superblock says; with it also where
  // each extent of an intact snapshot stands, kNoPlace for those that were never written.
  std::array<std::optional<SnapshotInfo>, kGenerationsMax> snapshots;
  std::array<std::vector<uint8_t>, kGenerationsMax> snapshot_places;
  std::vector<PageRepair> snapshot_repairs;

  // The other superblock of the pair does not hold this commit. Until it does, one damaged page
  // could make a commit that was already told to somebody disappear: Open writes it.
  bool superblock_twin_missing = false;

  std::vector<std::string> repairs;  // what was bad and taken from its twin, for the log
};

inline constexpr uint8_t kNoPlace = 0xFF;
// The place of every entry of a table, as in RecoveredStore::snapshot_places.
std::vector<uint8_t> PlacesOf(const TablePage* pages, uint64_t entry_count);

// Errors: OFD-1206 (another version), OFD-1207 (damaged). `name` is what messages call the store.
absl::StatusOr<RecoveredStore> Recover(std::string_view name, uint64_t file_bytes,
                                       const ReadPages& read, RecoveryDepth depth);
// What a snapshot holds: `table` and `committed` are its own. May run beside the owner of the
// store. Errors also: OFD-1216 (no such snapshot, or it is lost).
absl::StatusOr<RecoveredStore> RecoverSnapshot(std::string_view name, uint64_t file_bytes,
                                               const ReadPages& read, std::string_view snapshot);

}  // namespace offload::swap

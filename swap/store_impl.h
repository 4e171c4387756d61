// swap/store_impl.h
//
// The inside of Store. Its files share it: store_create.cc and store_open.cc make one (blocking),
// store.cc moves extents, store_reread.cc reads again what went wrong, store_commit.cc commits,
// store_snapshot.cc keeps commits and makes room for that.
//
// The extent table in memory is the array of table pages that goes to disk: an entry is changed
// where it stands, when the write of its extent has completed, and a commit sends the changed pages
// from there. Each of the two table copies on disk has its own record of which pages it has not
// seen yet.
//
// Which place a write takes follows from the table and from those of the snapshots: an entry whose
// sequence is the open one is being rewritten where it stands; any other belongs to a commit, so
// the write takes the first place where neither it nor a snapshot of it stands. There always is
// one: there are two places more than spare generations, and a generation for each snapshot.
//
// Tentative writes are entries of the table like all others; beside it stands what the last commit
// says of each. While a change of snapshots commits the two are exchanged, so that the table is the
// committed one, and reads look beside it. Their sequence may be older than the open one then.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device.h"
#include "base/mapped_region.h"
#include "swap/building_members.h"
#include "swap/format.h"
#include "swap/layout.h"
#include "swap/named_files.h"
#include "swap/pool_directory.h"
#include "swap/recovery.h"
#include "swap/store.h"
#include "swap/wakeup.h"

namespace offload::swap {

struct Store::Impl {
  // One extent of a transfer. Sorted by offset before neighbours are joined.
  struct Piece {
    uint64_t offset_bytes;
    iovec memory;
    uint64_t entry;
    TableEntry written;      // for writes: what the table says afterwards
    ExtentId id{};           // for reads: what an error names
    bool tentative = false;  // for writes
    bool aside = false;      // for writes: the table says nothing of it
  };
  // The requests of one call of Read or Write, until the last of their transfers has completed.
  struct Batch {
    std::vector<Piece> pieces;
    size_t transfers_left = 0;
    absl::Status status;
    Done done;
  };
  struct OpenCommit {
    SuperblockPage superblock;
    std::string blob;
    std::optional<uint32_t> created_snapshot;  // the number of its record
    bool keeps_tentative = false;              // a change of snapshots
    Done done;
    size_t writes_left = 0;
    absl::Status status;
  };
  // Zeros on their way to the end of the file.
  struct Growth {
    uint64_t old_bytes = 0, new_bytes = 0;
    uint64_t started_bytes = 0, done_bytes = 0;  // offsets in the file
    size_t in_flight = 0;
    MappedRegion zeros;
    absl::Status status;
    std::function<void(uint64_t, uint64_t)> progress;
    Done done;
  };
  using Step = void (Impl::*)();

  Impl(PoolDirectory pool, StoreSpec store_spec, Layout store_layout,
       std::unique_ptr<aio::Device> store_device, Wakeup store_wakeup);
  ~Impl();
  absl::Status AllocateBuffers();

  // What every way to make a store ends with: over a formatted device without a commit (which
  // leaves AllocateBuffers to the caller, and `pool` to it on failure), and over one that is
  // recovered.
  static absl::StatusOr<std::unique_ptr<Impl>> OfFormat(PoolDirectory&& pool, std::string path,
                                                        const StoreSpec& spec, Layout layout,
                                                        const StoreUuid& uuid, uint32_t generations,
                                                        std::unique_ptr<aio::Device> device);
  static absl::StatusOr<std::unique_ptr<Impl>> OfRecovery(PoolDirectory pool, std::string path,
                                                          uint64_t file_bytes,
                                                          std::unique_ptr<aio::Device> device);
  absl::Status CutOffUnfinishedGrowth();
  // Over what a snapshot holds, to be read.
  static absl::StatusOr<std::unique_ptr<Impl>> OfSnapshot(std::string path, uint64_t file_bytes,
                                                          const std::string& snapshot,
                                                          std::unique_ptr<aio::Device> device);

  // store.cc
  void Read(std::span<const ReadRequest> requests, std::span<Stamp> stamps, Done done);
  void Write(std::span<const WriteRequest> requests, Done done);
  void WriteAside(std::span<const WriteRequest> requests, Done done);
  absl::Status Adopt(std::span<const WriteRequest> requests, uint64_t sequence);
  absl::Status CollectReads(std::span<const ReadRequest> requests, std::span<Stamp> stamps,
                            std::vector<Piece>* pieces) const;
  absl::Status CollectWrites(std::span<const WriteRequest> requests,
                             std::vector<Piece>* pieces) const;
  // The extent has been written since the last commit.
  bool IsOpen(uint64_t index) const {
    return entry(index).sequence == open_sequence() || tentative.contains(index);
  }
  uint32_t ChoosePlace(uint64_t index) const;
  void StartTransfers(std::unique_ptr<Batch> batch, bool is_write);
  void FinishTransfer(Batch* batch, size_t begin, size_t end, bool is_write, absl::Status status);
  void FinishPart(Batch* batch, absl::Status status);
  void SetEntry(uint64_t entry, const TableEntry& value);
  // What the table says of an extent as it was last written, also while a change of snapshots
  // commits.
  const TableEntry& CurrentEntry(uint64_t index) const;

  // store_reread.cc
  // Reads the extents of a failed transfer again, each on its own.
  void Reread(Batch* batch, size_t begin, size_t end);
  void ReadAgain(const ReadRequest& request, const Stamp& stamp, Done done);

  // Runs `done` in the next Poll(), never at once.
  void Defer(Done done, absl::Status status);
  size_t Poll(bool wait);
  bool Idle() const { return device->in_flight() == 0 && deferred.empty(); }
  void CancelGrowth();

  // store_commit.cc
  void Commit(uint64_t epoch, std::string blob, Done done);
  absl::Status CheckCommit(std::string_view blob) const;
  // What every commit begins with: it has all but the root of its table.
  std::unique_ptr<OpenCommit> MakeCommit(uint64_t epoch, std::string blob, Done done) const;
  void FlushData();
  void WriteTableAndBlob();
  void WriteTablePages(uint32_t begin_page, uint32_t end_page);
  void WriteBlob();
  void WriteSnapshotRepairs();
  void FlushTable();
  void WriteFirstSuperblock();
  void FlushFirstSuperblock();
  void WriteSecondSuperblock();
  void FlushSuperblocks();
  void FinishCommit();
  void WriteSuperblock(uint32_t copy, Step next);
  void AbandonCommit(absl::Status status);
  // Continues the commit with `next`, or abandons it.
  Done Then(Step next);
  // One of several writes of a phase; FlushTable follows the last.
  Done TableWriteDone();

  // store_snapshot.cc
  void CreateSnapshot(const std::string& name, int64_t unix_seconds, Done done);
  void DeleteSnapshot(const std::string& name, Done done);
  absl::Status CheckSnapshotChange(const std::string& name) const;
  void BeginSnapshotChange(Done done);
  void ExchangeTentative();
  std::optional<uint32_t> FindSnapshot(std::string_view name) const;
  void SealTableForSnapshot(uint32_t number);
  void WriteSnapshotTable();
  void FinishSnapshotTable();
  void ListSnapshots();
  void Grow(std::function<void(uint64_t, uint64_t)> progress, Done done);
  void GrowOn();
  void FinishGrowth(absl::Status status);

  // The first failed write or flush ends all writing: nobody knows any more what the drive holds.
  void Fail(const absl::Status& status);
  absl::Status FailedError() const;

  uint64_t open_sequence() const { return committed.sequence + 1; }
  TablePage* table_pages() const { return reinterpret_cast<TablePage*>(table.data()); }
  TableEntry& entry(uint64_t index) const {
    return table_pages()[index / kEntriesPerTablePage].entries[index % kEntriesPerTablePage];
  }
  Stamp StampOf(const TableEntry& entry) const {
    return {entry.sequence, entry.word, entry.crc, entry.user_flags()};
  }

  PoolDirectory directory;
  std::string path;
  std::unique_ptr<BuildingFile> building_file;        // until published: removed with the store
  bool replaces = false;                              // with its name, another of the job
  std::unique_ptr<BuildingMembers> building_members;  // of a store over several pools, likewise
  StoreSpec spec;
  Layout layout;
  StoreUuid uuid{};

  SuperblockPage superblock{};  // of the last commit; sequence 0 before the first
  CommitInfo committed;
  MappedRegion table;
  std::array<std::vector<uint32_t>, 2> page_crcs;  // of each copy as it is on disk
  std::array<std::vector<uint8_t>, 2>
      page_stale;  // 1: the copy on disk has not seen the last change
  MappedRegion superblock_page;
  MappedRegion blob_pages;

  std::unique_ptr<OpenCommit> commit;  // null when none runs
  size_t writes_in_flight = 0;
  bool has_uncommitted_writes = false;
  bool has_firm_writes = false;                        // uncommitted ones that are not tentative
  std::unordered_map<uint64_t, TableEntry> tentative;  // by entry: what the last commit says of it
  std::vector<std::string> repairs;

  uint32_t generation_count = 0;  // that the file has; the next commit names it
  std::array<std::vector<uint8_t>, kGenerationsMax> snapshot_places;  // as RecoveredStore
  std::vector<SnapshotInfo> snapshots;                                // by record
  std::vector<PageRepair> snapshot_repairs;  // written with the next commit
  std::unique_ptr<Growth> growth;            // null when none is under way
  bool read_only = false;
  NamedFiles files;  // none over a device that was given

  bool failed = false;
  absl::Status failure;
  std::atomic<uint64_t> checksum_mismatches{0}, lost_extents{0};

  std::deque<std::pair<Done, absl::Status>> deferred;
  size_t callbacks_run = 0;
  Wakeup wakeup;
  TransferWatch watch;
  std::unique_ptr<aio::Device> device;  // owns the descriptor and with it the lock; destroyed first
};

// Starts an operation and polls until it is done.
absl::Status RunToEnd(aio::Device& device, const std::function<void(aio::Device::Done)>& start);
absl::Status FlushToEnd(aio::Device& device);
// Whole pages, in memory that the device takes.
absl::Status WriteToEnd(aio::Device& device, uint64_t offset_bytes, std::span<std::byte> bytes);

}  // namespace offload::swap

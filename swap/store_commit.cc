// Store::Commit: data flush, table and blob, flush, one superblock, flush, the other, flush.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "swap/store_impl.h"

namespace offload::swap {
namespace {

constexpr uint32_t kTablePagesPerWrite = 256;  // 1 MiB

}  // namespace

absl::Status Store::Impl::CheckCommit(std::string_view blob) const {
  if (failed) return FailedError();
  if (read_only) return absl::FailedPreconditionError(absl::StrCat(path, " is open to be read"));
  if (commit != nullptr) return absl::FailedPreconditionError("a commit while another runs");
  if (writes_in_flight > 0)
    return absl::FailedPreconditionError(
        absl::StrCat("a commit with ", writes_in_flight, " writes in flight"));
  if (blob.size() > Limits::kBlobBytesMax) {
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat("the trainer's state is longer than 1 MiB: ", blob.size(), " bytes"));
  }
  return absl::OkStatus();
}

void Store::Impl::Commit(uint64_t epoch, std::string blob, Done done) {
  if (absl::Status status = CheckCommit(blob); !status.ok())
    return Defer(std::move(done), std::move(status));
  commit = MakeCommit(epoch, std::move(blob), std::move(done));
  FlushData();
}

std::unique_ptr<Store::Impl::OpenCommit> Store::Impl::MakeCommit(uint64_t epoch, std::string blob,
                                                                 Done done) const {
  auto made = std::make_unique<OpenCommit>();
  const uint64_t sequence = open_sequence();
  made->superblock = {
      .uuid = uuid,
      .parent_crc = superblock.sequence == 0 ? 0 : IdentityCrc(superblock),
      .sequence = sequence,
      .epoch = epoch,
      .table_copy = static_cast<uint32_t>(sequence % 2),
      .table_page_count = layout.table_page_count(),
      .blob_area = static_cast<uint32_t>(sequence % 2),
      .blob_bytes = static_cast<uint32_t>(blob.size()),
      .blob_crc = blob.empty() ? 0 : BlobCrc(uuid, sequence, blob),
      .generation_count = generation_count,
  };
  for (const SnapshotInfo& snapshot : snapshots) {
    const uint32_t number = *FindSnapshot(snapshot.name);
    made->superblock.snapshots[number] = superblock.snapshots[number];
    made->superblock.snapshots[number].lost = !snapshot.damage.ok();
  }
  made->blob = std::move(blob);
  made->done = std::move(done);
  return made;
}

Store::Done Store::Impl::Then(Step next) {
  return [this, next](absl::Status status) {
    if (!status.ok()) return AbandonCommit(std::move(status));
    (this->*next)();
  };
}

void Store::Impl::FlushData() { device->Flush(Then(&Impl::WriteTableAndBlob)); }

void Store::Impl::WriteTableAndBlob() {
  FaultPoint("store.after_data_flush");
  const uint32_t copy = commit->superblock.table_copy;
  std::vector<uint8_t>& stale = page_stale[copy];
  commit->writes_left = 1;  // ours, until all are started
  for (uint32_t begin = 0, end; begin < layout.table_page_count(); begin = end) {
    end = begin + 1;
    if (!stale[begin]) continue;
    while (end < layout.table_page_count() && stale[end] && end - begin < kTablePagesPerWrite)
      ++end;
    WriteTablePages(begin, end);
  }
  commit->superblock.table_root_crc = RootCrc(page_crcs[copy]);
  WriteBlob();
  WriteSnapshotRepairs();
  if (--commit->writes_left == 0) FlushTable();
}

void Store::Impl::WriteBlob() {
  if (commit->blob.empty()) return;
  const size_t padded_bytes = RoundUpToPage(commit->blob.size());
  std::memcpy(blob_pages.data(), commit->blob.data(), commit->blob.size());
  std::memset(blob_pages.data() + commit->blob.size(), 0, padded_bytes - commit->blob.size());
  const iovec memory{blob_pages.data(), padded_bytes};
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    device->Write(layout.BlobOffset(commit->superblock.blob_area, mirror), {&memory, 1},
                  TableWriteDone());
  }
}

// Pages of a snapshot's table that were bad in one mirror get back what their twins say.
void Store::Impl::WriteSnapshotRepairs() {
  for (PageRepair& repair : snapshot_repairs) {
    const iovec memory{repair.page.data(), kPageBytes};
    device->Write(repair.offset_bytes, {&memory, 1}, TableWriteDone());
  }
}

void Store::Impl::WriteTablePages(uint32_t begin_page, uint32_t end_page) {
  const uint32_t copy = commit->superblock.table_copy;
  for (uint32_t index = begin_page; index < end_page; ++index) {
    TablePage& page = table_pages()[index];
    page.copy = copy;
    page.page = index;
    page.sequence = commit->superblock.sequence;
    page.uuid = uuid;
    SealTablePage(&page);
    page_crcs[copy][index] = page.crc;
    page_stale[copy][index] = 0;
  }
  const iovec memory{&table_pages()[begin_page], (end_page - begin_page) * kPageBytes};
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    device->Write(layout.TableOffset(copy, mirror) + begin_page * kPageBytes, {&memory, 1},
                  TableWriteDone());
  }
}

Store::Done Store::Impl::TableWriteDone() {
  ++commit->writes_left;
  return [this](absl::Status status) {
    if (commit->status.ok()) commit->status = std::move(status);
    if (--commit->writes_left == 0) FlushTable();
  };
}

void Store::Impl::FlushTable() {
  if (!commit->status.ok()) return AbandonCommit(commit->status);
  device->Flush(Then(&Impl::WriteFirstSuperblock));
}

// The lower copy is durable before the higher one is touched, so that a crash never leaves both
// bad: recovery knows a pair that is, for the loss that it is.
void Store::Impl::WriteFirstSuperblock() {
  FaultPoint("store.after_table");
  WriteSuperblock(static_cast<uint32_t>(commit->superblock.sequence % 2) * 2,
                  &Impl::FlushFirstSuperblock);
}

void Store::Impl::FlushFirstSuperblock() { device->Flush(Then(&Impl::WriteSecondSuperblock)); }

void Store::Impl::WriteSecondSuperblock() {
  FaultPoint("store.after_first_superblock");
  WriteSuperblock(commit->superblock.copy + 1, &Impl::FlushSuperblocks);
}

void Store::Impl::WriteSuperblock(uint32_t copy, Step next) {
  commit->superblock.copy = copy;
  SealSuperblock(&commit->superblock);
  std::memcpy(superblock_page.data(), &commit->superblock, kPageBytes);
  // The pair of the check at recovery: what we write is what we would accept.
  OFFLOAD_CHECK_OK(DecodeSuperblock(superblock_page.span().first<kPageBytes>(), copy, uuid))
      << "sequence " << open_sequence();
  const iovec memory{superblock_page.data(), kPageBytes};
  device->Write(Layout::SuperblockOffset(copy), {&memory, 1}, Then(next));
}

void Store::Impl::FlushSuperblocks() {
  FaultPoint("store.after_superblocks");
  device->Flush(Then(&Impl::FinishCommit));
}

void Store::Impl::FinishCommit() {
  FaultPoint("store.after_commit");
  const std::unique_ptr<OpenCommit> finished = std::move(commit);
  superblock = finished->superblock;
  committed = {superblock.sequence, superblock.epoch, std::move(finished->blob)};
  snapshot_repairs.clear();
  for (uint32_t number = 0; number < kGenerationsMax; ++number) {
    if (!superblock.snapshots[number].in_use()) snapshot_places[number].clear();
  }
  if (finished->created_snapshot) {
    snapshot_places[*finished->created_snapshot] = PlacesOf(table_pages(), layout.entry_count());
  }
  finished->keeps_tentative ? ExchangeTentative() : tentative.clear();
  has_uncommitted_writes = !tentative.empty();
  has_firm_writes = false;
  ListSnapshots();
  ++callbacks_run;
  finished->done(absl::OkStatus());
}

void Store::Impl::AbandonCommit(absl::Status status) {
  Fail(status);
  const std::unique_ptr<OpenCommit> abandoned = std::move(commit);
  if (abandoned->keeps_tentative) ExchangeTentative();
  ++callbacks_run;
  abandoned->done(FailedError());
}

}  // namespace offload::swap

// Store::CreateSnapshot, DeleteSnapshot and Grow. A snapshot is a record in the superblock, so it
// appears and disappears with a commit; what it names beside extents, its table and blob, is
// written before that to an area that no commit looks at.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "swap/store_impl.h"

namespace offload::swap {
namespace {

constexpr uint64_t kZeroBytes = uint64_t{1} << 20;
constexpr size_t kZerosInFlightMax = 4;  // beside the reads and writes of a training run

}  // namespace

absl::Status CheckSnapshotName(const std::string& name) {
  if (IsValidSnapshotName(name)) return absl::OkStatus();
  return MakeError(ErrorId::kSnapshot, absl::StrCat("snapshot name '", name, "'"),
                   absl::StrCat("Use letters, digits and . _ - #, at most ", kSnapshotNameBytesMax,
                                ", not beginning with a dot"));
}

std::optional<uint32_t> Store::Impl::FindSnapshot(std::string_view name) const {
  for (uint32_t number = 0; number < kGenerationsMax; ++number) {
    const SnapshotRecord& record = superblock.snapshots[number];
    if (record.in_use() && record.name_view() == name) return number;
  }
  return std::nullopt;
}

absl::Status Store::Impl::CheckSnapshotChange(const std::string& name) const {
  OFFLOAD_RETURN_IF_ERROR(CheckCommit(committed.blob));
  if (has_firm_writes)
    return absl::FailedPreconditionError("a change of snapshots with writes that are uncommitted");
  if (committed.sequence == 0)
    return absl::FailedPreconditionError("a change of snapshots before the first commit");
  return CheckSnapshotName(name);
}

void Store::Impl::BeginSnapshotChange(Done done) {
  commit = MakeCommit(committed.epoch, committed.blob, std::move(done));
  ExchangeTentative();
  commit->keeps_tentative = true;
}

// Between the table and beside it.
void Store::Impl::ExchangeTentative() {
  for (auto& [index, other] : tentative) {
    const TableEntry in_table = entry(index);
    SetEntry(index, other);
    other = in_table;
  }
}

void Store::Impl::CreateSnapshot(const std::string& name, int64_t unix_seconds, Done done) {
  absl::Status status = CheckSnapshotChange(name);
  if (status.ok() && FindSnapshot(name))
    status = MakeError(ErrorId::kSnapshot, absl::StrCat(path, " has a snapshot ", name));
  uint32_t number = 0;
  while (number < generation_count && superblock.snapshots[number].in_use()) ++number;
  if (status.ok() && number == generation_count) {
    status = MakeError(ErrorId::kSnapshot,
                       absl::StrCat(path, " has ", snapshots.size(), " snapshots in ",
                                    generation_count, " spare generations: none is free"));
  }
  if (!status.ok()) return Defer(std::move(done), std::move(status));
  BeginSnapshotChange(std::move(done));
  commit->created_snapshot = number;
  SealTableForSnapshot(number);
  SnapshotRecord& record = commit->superblock.snapshots[number];
  record.sequence = superblock.sequence;
  record.epoch = superblock.epoch;
  record.created_unix_seconds = unix_seconds;
  record.blob_bytes = superblock.blob_bytes;
  record.blob_crc = superblock.blob_crc;
  std::copy(name.begin(), name.end(), record.name);
  WriteSnapshotTable();
}

// In the table itself: a page is sealed anew before it is written as one of the commit's.
void Store::Impl::SealTableForSnapshot(uint32_t number) {
  std::vector<uint32_t> crcs;
  for (uint32_t index = 0; index < layout.table_page_count(); ++index) {
    TablePage& page = table_pages()[index];
    page.copy = 2 + number;
    page.page = index;
    page.sequence = committed.sequence;
    page.uuid = uuid;
    SealTablePage(&page);
    crcs.push_back(page.crc);
  }
  commit->superblock.snapshots[number].table_root_crc = RootCrc(crcs);
}

void Store::Impl::WriteSnapshotTable() {
  const uint32_t number = *commit->created_snapshot;
  commit->writes_left = 1;  // ours, until all are started
  const auto write = [&](uint64_t offset_bytes, std::byte* bytes, size_t size_bytes) {
    const iovec memory{bytes, size_bytes};
    ++commit->writes_left;
    device->Write(offset_bytes, {&memory, 1}, [this](absl::Status status) {
      if (commit->status.ok()) commit->status = std::move(status);
      if (--commit->writes_left == 0) FinishSnapshotTable();
    });
  };
  const size_t blob_bytes = RoundUpToPage(commit->blob.size());
  std::memset(blob_pages.data(), 0, blob_bytes);
  std::copy(commit->blob.begin(), commit->blob.end(), reinterpret_cast<char*>(blob_pages.data()));
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    for (uint64_t at = 0; at < layout.table_bytes(); at += kZeroBytes) {
      write(layout.SnapshotTableOffset(number, mirror) + at, table.data() + at,
            std::min(kZeroBytes, layout.table_bytes() - at));
    }
    if (blob_bytes > 0)
      write(layout.SnapshotBlobOffset(number, mirror), blob_pages.data(), blob_bytes);
  }
  if (--commit->writes_left == 0) FinishSnapshotTable();
}

void Store::Impl::FinishSnapshotTable() {
  if (!commit->status.ok()) return AbandonCommit(commit->status);
  FaultPoint("store.after_snapshot_table");
  FlushData();  // what was written above becomes durable with it
}

void Store::Impl::DeleteSnapshot(const std::string& name, Done done) {
  absl::Status status = CheckSnapshotChange(name);
  const std::optional<uint32_t> number = FindSnapshot(name);
  if (status.ok() && !number)
    status = MakeError(ErrorId::kSnapshot, absl::StrCat(path, " has no snapshot ", name));
  if (!status.ok()) return Defer(std::move(done), std::move(status));
  BeginSnapshotChange(std::move(done));
  commit->superblock.snapshots[*number] = {};
  FlushData();
}

// What the superblock says of snapshots, and what is known of their damage.
void Store::Impl::ListSnapshots() {
  std::vector<SnapshotInfo> listed;
  for (const SnapshotRecord& record : superblock.snapshots) {
    if (!record.in_use()) continue;
    SnapshotInfo info{std::string(record.name_view()), record.sequence, record.epoch,
                      record.created_unix_seconds, absl::OkStatus()};
    for (const SnapshotInfo& known : snapshots) {
      if (known.sequence == info.sequence && known.name == info.name) info.damage = known.damage;
    }
    listed.push_back(std::move(info));
  }
  snapshots = std::move(listed);
}

// ---- Growing -----------------------------------------------------------------------------------

void Store::Impl::Grow(std::function<void(uint64_t, uint64_t)> progress, Done done) {
  absl::Status status = failed ? FailedError() : absl::OkStatus();
  if (read_only || growth != nullptr)
    status = absl::FailedPreconditionError("the store is growing, or open to be read");
  if (status.ok() && generation_count == kGenerationsMax) {
    status = MakeError(
        ErrorId::kSnapshot,
        absl::StrCat(path, " has ", kGenerationsMax, " spare generations, and may have no more"));
  }
  if (!status.ok()) return Defer(std::move(done), std::move(status));
  growth = std::make_unique<Growth>();
  growth->old_bytes = layout.file_bytes(generation_count);
  growth->new_bytes = layout.file_bytes(generation_count + 1);
  growth->started_bytes = growth->done_bytes = growth->old_bytes;
  growth->progress = std::move(progress);
  growth->done = std::move(done);
  absl::StatusOr<MappedRegion> zeros = MappedRegion::Anonymous(kZeroBytes);
  if (!zeros.ok()) return FinishGrowth(zeros.status());
  growth->zeros = *std::move(zeros);
  if (device->geometry().size_bytes < growth->new_bytes) {
    status = device->Resize(growth->new_bytes);
    if (absl::IsUnimplemented(status)) {
      status = MakeError(ErrorId::kSnapshot,
                         absl::StrCat(path,
                                      " cannot grow: a store over several pools keeps its "
                                      "length"),
                         "Make the job with generations = 1, or close it and fork its last step "
                         "into one that has them (offloadctl snapshot fork --generations 1)");
    }
    if (!status.ok()) return FinishGrowth(status);
  }
  FaultPoint("store.growth_allocated");
  GrowOn();
}

// Zeros everywhere, so that the new place has no block whose first use would allocate or convert.
void Store::Impl::GrowOn() {
  while (growth->status.ok() && growth->in_flight < kZerosInFlightMax &&
         growth->started_bytes < growth->new_bytes) {
    const uint64_t size_bytes = std::min(kZeroBytes, growth->new_bytes - growth->started_bytes);
    const iovec memory{growth->zeros.data(), size_bytes};
    ++growth->in_flight;
    device->Write(growth->started_bytes, {&memory, 1}, [this, size_bytes](absl::Status status) {
      --growth->in_flight;
      growth->status.Update(status);
      growth->done_bytes += size_bytes;
      if (growth->progress && growth->status.ok())
        growth->progress(growth->done_bytes - growth->old_bytes,
                         growth->new_bytes - growth->old_bytes);
      GrowOn();
    });
    growth->started_bytes += size_bytes;
  }
  if (growth->in_flight > 0) return;
  if (!growth->status.ok()) return FinishGrowth(growth->status);
  ++growth->in_flight;
  device->Flush([this](absl::Status status) {
    --growth->in_flight;
    if (growth->status.ok()) growth->status = std::move(status);
    if (growth->status.ok()) FaultPoint("store.growth_formatted");
    FinishGrowth(growth->status);
  });
}

void Store::Impl::FinishGrowth(absl::Status status) {
  const std::unique_ptr<Growth> finished = std::move(growth);
  if (status.ok()) {
    ++generation_count;
  } else {
    // A write or a flush that failed is final here, too: nobody knows what the drive still holds.
    if (!absl::IsCancelled(status) && finished->started_bytes > finished->old_bytes) Fail(status);
    if (device->geometry().size_bytes > finished->old_bytes)
      static_cast<void>(device->Resize(finished->old_bytes));
  }
  Defer(std::move(finished->done), std::move(status));
}

void Store::Impl::CancelGrowth() {
  if (growth != nullptr) growth->status.Update(absl::CancelledError("the growth was cancelled"));
}

}  // namespace offload::swap

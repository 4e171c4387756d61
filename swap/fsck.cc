#include "swap/fsck.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "swap/recovery.h"
#include "swap/repeated_read.h"
#include "swap/store_files.h"
#include "swap/store_impl.h"

namespace offload::swap {
namespace {

using Part = FsckFinding::Part;

constexpr size_t kReadsInFlight = 8;  // of extents

ReadPages ReadsFrom(aio::Device* device) {
  return [device](uint64_t offset_bytes, std::span<std::byte> bytes) {
    return RunToEnd(*device, [&](aio::Device::Done done) {
      ReadAgain(device, offset_bytes, bytes, nullptr, kReadTriesMax, std::move(done));
    });
  };
}

struct SuperblockCopy {
  uint32_t copy = 0;
  std::optional<SuperblockPage> page;  // when it is intact
  bool is_zero = false;
  absl::Status status;  // what is wrong with it
};

class Fsck {
 public:
  Fsck(aio::Device* device, const FsckOptions& options, FsckReport* report)
      : device_(device), options_(options), report_(report), read_(ReadsFrom(device)) {}

  absl::Status Run();

 private:
  // What stands at `offset_bytes` must be `expected`; a copy that differs is a finding.
  absl::Status CheckCopy(Part part, std::string_view name, uint64_t offset_bytes,
                         std::span<const std::byte> expected);
  absl::StatusOr<SuperblockCopy> ReadSuperblock(uint32_t copy);
  // Says of the finding that was just added how a superblock differs from the newest of its pair.
  void ExplainSuperblock(const SuperblockPage& newest, const SuperblockCopy& found);
  absl::Status Rewrite(uint64_t offset_bytes, std::span<const std::byte> expected);
  absl::Status CheckHeaders();
  absl::Status CheckSuperblocks();
  absl::Status CheckSpecs();
  absl::Status CheckTable();
  absl::Status CheckState();
  absl::Status CheckExtents();
  absl::Status CheckSnapshots();
  absl::Status CheckSnapshot(uint32_t number, const std::string& name);
  void CheckExtent(const ExtentId& id, const Layout::Where& where, MappedRegion* buffer);
  const TableEntry& entry(uint64_t index) const;

  template <typename Visit>  // (const ExtentId&, const Layout::Where&)
  void ForEachExtent(Visit visit) const {
    for (uint32_t tensor = 0; tensor < found_.layout.tensors().size(); ++tensor) {
      for (uint32_t index = 0; index < found_.layout.tensors()[tensor].index_count; ++index) {
        for (const PlaneSpec& plane : found_.spec.tensors[tensor].planes) {
          const ExtentId id{tensor, plane.plane, index};
          Layout::Where where;
          if (found_.layout.Find(id, &where)) visit(id, where);
        }
      }
    }
  }

  aio::Device* const device_;
  const FsckOptions& options_;
  FsckReport* const report_;
  const ReadPages read_;
  RecoveredStore found_;
  uint64_t written_bytes_ = 0;  // of all extents that were ever written
  size_t reads_in_flight_ = 0;
};

absl::Status Fsck::Run() {
  absl::StatusOr<RecoveredStore> found =
      Recover(report_->path, report_->file_bytes, read_, RecoveryDepth::kWhole);
  if (!found.ok()) {
    if (ErrorIdOf(found.status()) != ErrorId::kStoreDamaged) return found.status();
    report_->findings.push_back({Part::kStore, std::string(found.status().message())});
    return absl::OkStatus();
  }
  found_ = *std::move(found);
  report_->job = found_.spec.job;
  report_->committed = found_.committed;
  report_->committed.blob.clear();
  OFFLOAD_RETURN_IF_ERROR(CheckHeaders());
  OFFLOAD_RETURN_IF_ERROR(CheckSuperblocks());
  OFFLOAD_RETURN_IF_ERROR(CheckSpecs());
  OFFLOAD_RETURN_IF_ERROR(CheckTable());
  OFFLOAD_RETURN_IF_ERROR(CheckState());
  OFFLOAD_RETURN_IF_ERROR(CheckExtents());
  return CheckSnapshots();
}

absl::Status Fsck::CheckCopy(Part part, std::string_view name, uint64_t offset_bytes,
                             std::span<const std::byte> expected) {
  ++report_->copies_checked;
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion got,
                           MappedRegion::Anonymous(RoundUpToPage(expected.size())));
  const absl::Status status = read_(offset_bytes, got.span());
  if (status.ok() && std::memcmp(got.data(), expected.data(), expected.size()) == 0) {
    return absl::OkStatus();
  }
  FsckFinding finding{part, absl::StrCat(ToAbsl(name), ": ",
                                         status.ok() ? "differs from its twin" : status.message())};
  finding.has_twin = true;
  if (options_.repair) {
    OFFLOAD_RETURN_IF_ERROR(Rewrite(offset_bytes, expected));
    finding.repaired = read_(offset_bytes, got.span()).ok() &&
                       std::memcmp(got.data(), expected.data(), expected.size()) == 0;
  }
  report_->findings.push_back(std::move(finding));
  return absl::OkStatus();
}

// Durable at once, so that a crash never meets two copies that are being rewritten.
absl::Status Fsck::Rewrite(uint64_t offset_bytes, std::span<const std::byte> expected) {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion bytes,
                           MappedRegion::Anonymous(RoundUpToPage(expected.size())));
  std::memcpy(bytes.data(), expected.data(), expected.size());
  OFFLOAD_RETURN_IF_ERROR(WriteToEnd(*device_, offset_bytes, bytes.span()));
  return FlushToEnd(*device_);
}

template <typename Page>
std::span<const std::byte> BytesOf(const Page& page) {
  return std::as_bytes(std::span(&page, 1));
}

absl::Status Fsck::CheckHeaders() {
  for (uint32_t copy = 0; copy < 2; ++copy) {
    HeaderPage expected = found_.header;
    expected.copy = copy;
    SealHeader(&expected);
    OFFLOAD_RETURN_IF_ERROR(CheckCopy(Part::kHeader, absl::StrCat("header copy ", copy),
                                      Layout::HeaderOffset(copy), BytesOf(expected)));
  }
  return absl::OkStatus();
}

absl::StatusOr<SuperblockCopy> Fsck::ReadSuperblock(uint32_t copy) {
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion page, MappedRegion::Anonymous(kPageBytes));
  SuperblockCopy read{.copy = copy, .status = read_(Layout::SuperblockOffset(copy), page.span())};
  if (!read.status.ok()) return read;
  read.is_zero = std::ranges::all_of(page.span(), [](std::byte b) { return b == std::byte{0}; });
  absl::StatusOr<SuperblockPage> decoded =
      DecodeSuperblock(page.span().first<kPageBytes>(), copy, found_.header.uuid);
  read.status = decoded.status();
  if (decoded.ok()) read.page = *std::move(decoded);
  return read;
}

// Both copies of a pair hold its newer intact one. (The pair of even sequences is empty before the
// second commit.)
absl::Status Fsck::CheckSuperblocks() {
  for (uint32_t lower = 0; lower < kSuperblockCount; lower += 2) {
    std::array<SuperblockCopy, 2> pair;
    for (uint32_t i = 0; i < 2; ++i) {
      OFFLOAD_ASSIGN_OR_RETURN(pair[i], ReadSuperblock(lower + i));
    }
    const bool higher_is_newest =
        pair[1].page && (!pair[0].page || pair[1].page->sequence > pair[0].page->sequence);
    const std::optional<SuperblockPage> newest = pair[higher_is_newest ? 1 : 0].page;
    if (!newest) continue;  // recovery has said that it may be so
    for (const SuperblockCopy& each : pair) {
      SuperblockPage expected = *newest;
      expected.copy = each.copy;
      SealSuperblock(&expected);
      const size_t findings_before = report_->findings.size();
      OFFLOAD_RETURN_IF_ERROR(CheckCopy(Part::kSuperblock,
                                        absl::StrCat("superblock copy ", each.copy),
                                        Layout::SuperblockOffset(each.copy), BytesOf(expected)));
      if (report_->findings.size() > findings_before) ExplainSuperblock(*newest, each);
    }
  }
  return absl::OkStatus();
}

// A commit writes the lower copy of its pair, then the higher one. A power cut may tear either.
void Fsck::ExplainSuperblock(const SuperblockPage& newest, const SuperblockCopy& found) {
  FsckFinding& finding = report_->findings.back();
  const std::string name = absl::StrCat("superblock copy ", found.copy, ": ");
  const bool is_of_last_commit = newest.sequence == found_.superblock.sequence;
  const bool is_higher = found.copy % 2 == 1;
  if (is_of_last_commit && IsBetweenSuperblocks(newest, found.page, found.is_zero)) {
    finding.is_unfinished = true;
    finding.what = absl::StrCat(name, "a run ended between the two writes of commit ",
                                newest.sequence, ", which the other copy has");
  } else if (found.page) {
    finding.what = absl::StrCat(name, "of commit ", found.page->sequence, ", its twin of ",
                                newest.sequence, ": a write was lost");
  } else if (is_of_last_commit == is_higher) {
    finding.what = absl::StrCat(name, found.status.message(),
                                ": damaged, or cut off in its writing by a loss of power");
  } else if (!found.status.ok()) {
    finding.what = absl::StrCat(name, found.status.message());
  }
}

absl::Status Fsck::CheckSpecs() {
  std::string expected = EncodeSpec(found_.spec);
  const uint64_t spec_bytes = expected.size();
  expected.resize(RoundUpToPage(spec_bytes));
  for (uint32_t copy = 0; copy < 2; ++copy) {
    OFFLOAD_RETURN_IF_ERROR(CheckCopy(Part::kSpec, absl::StrCat("spec copy ", copy),
                                      Layout::SpecOffset(copy, spec_bytes),
                                      std::as_bytes(std::span(expected))));
  }
  return absl::OkStatus();
}

// Only the table copy of the last commit: the other one is the next commit's to write.
absl::Status Fsck::CheckTable() {
  const uint32_t table_copy = found_.superblock.table_copy;
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    for (uint32_t page = 0; page < found_.layout.table_page_count(); ++page) {
      const uint64_t at = uint64_t{page} * kPageBytes;
      OFFLOAD_RETURN_IF_ERROR(CheckCopy(Part::kTable,
                                        absl::StrCat("table page ", page, ", mirror ", mirror),
                                        found_.layout.TableOffset(table_copy, mirror) + at,
                                        found_.table.span().subspan(at, kPageBytes)));
    }
  }
  return absl::OkStatus();
}

absl::Status Fsck::CheckState() {
  std::string expected = found_.committed.blob;
  if (expected.empty()) return absl::OkStatus();
  expected.resize(RoundUpToPage(expected.size()));
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    OFFLOAD_RETURN_IF_ERROR(CheckCopy(Part::kState,
                                      absl::StrCat("trainer's state, mirror ", mirror),
                                      found_.layout.BlobOffset(found_.superblock.blob_area, mirror),
                                      std::as_bytes(std::span(expected))));
  }
  return absl::OkStatus();
}

const TableEntry& Fsck::entry(uint64_t index) const {
  const auto* pages = reinterpret_cast<const TablePage*>(found_.table.data());
  return pages[index / kEntriesPerTablePage].entries[index % kEntriesPerTablePage];
}

absl::Status Fsck::CheckExtents() {
  uint64_t size_bytes_max = 0;
  ForEachExtent([&](const ExtentId&, const Layout::Where& where) {
    size_bytes_max = std::max(size_bytes_max, where.size_bytes);
    if (entry(where.entry).sequence != 0) written_bytes_ += where.size_bytes;
  });
  std::vector<MappedRegion> buffers;
  for (size_t i = 0; i < kReadsInFlight && size_bytes_max > 0; ++i) {
    OFFLOAD_ASSIGN_OR_RETURN(MappedRegion buffer, MappedRegion::Anonymous(size_bytes_max));
    buffers.push_back(std::move(buffer));
  }
  size_t next = 0;
  absl::Status wanted;
  ForEachExtent([&](const ExtentId& id, const Layout::Where& where) {
    wanted.Update(CheckWanted(options_.store.cancelled));
    if (!wanted.ok()) return;
    CheckExtent(id, where, &buffers[next++ % kReadsInFlight]);
    // Buffers are used in turn, so all reads of a round end before the next begins.
    while (next % kReadsInFlight == 0 && reads_in_flight_ > 0) device_->Poll(/*wait=*/true);
  });
  while (reads_in_flight_ > 0) device_->Poll(/*wait=*/true);
  return wanted;
}

absl::Status Fsck::CheckSnapshots() {
  for (uint32_t number = 0; number < kGenerationsMax; ++number) {
    const std::optional<SnapshotInfo> snapshot = found_.snapshots[number];
    if (!snapshot) continue;
    if (snapshot->damage.ok()) {
      OFFLOAD_RETURN_IF_ERROR(CheckSnapshot(number, snapshot->name));
    } else {
      report_->findings.push_back({Part::kTable, std::string(snapshot->damage.message())});
    }
  }
  return absl::OkStatus();
}

// As the last commit: both mirrors of its table and of its blob, and every extent.
absl::Status Fsck::CheckSnapshot(uint32_t number, const std::string& name) {
  absl::StatusOr<RecoveredStore> snapshot =
      RecoverSnapshot(report_->path, report_->file_bytes, read_, name);
  if (!snapshot.ok()) {
    if (!ErrorIdOf(snapshot.status())) return snapshot.status();
    report_->findings.push_back(
        {Part::kState, absl::StrCat("snapshot ", name, ": ", snapshot.status().message())});
    return absl::OkStatus();
  }
  std::string blob = snapshot->committed.blob;
  blob.resize(RoundUpToPage(blob.size()));
  for (uint32_t mirror = 0; mirror < 2; ++mirror) {
    for (uint32_t page = 0; page < found_.layout.table_page_count(); ++page) {
      const uint64_t at = uint64_t{page} * kPageBytes;
      OFFLOAD_RETURN_IF_ERROR(CheckCopy(
          Part::kTable, absl::StrCat("snapshot ", name, ", table page ", page, ", mirror ", mirror),
          found_.layout.SnapshotTableOffset(number, mirror) + at,
          snapshot->table.span().subspan(at, kPageBytes)));
    }
    if (blob.empty()) continue;
    OFFLOAD_RETURN_IF_ERROR(CheckCopy(
        Part::kState, absl::StrCat("snapshot ", name, ", trainer's state, mirror ", mirror),
        found_.layout.SnapshotBlobOffset(number, mirror), std::as_bytes(std::span(blob))));
  }
  std::swap(found_.table, snapshot->table);
  const absl::Status status = CheckExtents();
  std::swap(found_.table, snapshot->table);
  return status;
}

void Fsck::CheckExtent(const ExtentId& id, const Layout::Where& where, MappedRegion* buffer) {
  const TableEntry& written = entry(where.entry);
  if (written.sequence == 0) {
    ++report_->extents_never_written;
    return;
  }
  const uint32_t seed = ExtentSeed(found_.header.uuid, id, written.sequence);
  const auto is_good = [seed, crc = written.crc](std::span<const std::byte> bytes) {
    return Crc32c(seed, bytes.data(), bytes.size()) == crc;
  };
  ++reads_in_flight_;
  ReadAgain(device_, found_.layout.PlaceOffset(written.place()) + where.area_offset_bytes,
            buffer->span().first(where.size_bytes), is_good, kReadTriesMax,
            [this, id, where](absl::Status status) {
              --reads_in_flight_;
              ++report_->extents_checked;
              report_->extent_bytes_read += where.size_bytes;
              if (!status.ok()) {
                report_->findings.push_back(
                    {Part::kExtent, absl::StrCat(NameOf(id), ": ", status.message())});
              }
              if (options_.store.progress) {
                options_.store.progress(report_->extent_bytes_read, written_bytes_);
              }
            });
}

}  // namespace

bool FsckReport::is_clean() const {
  return std::ranges::all_of(findings, &FsckFinding::is_unfinished);
}

bool FsckReport::has_loss() const {
  return std::any_of(findings.begin(), findings.end(),
                     [](const FsckFinding& finding) { return !finding.has_twin; });
}

bool FsckReport::has_unfinished() const {
  return std::ranges::any_of(findings, [](const FsckFinding& finding) {
    return finding.is_unfinished && !finding.repaired;
  });
}

bool FsckReport::has_open_repairs() const {
  return std::any_of(findings.begin(), findings.end(), [](const FsckFinding& finding) {
    return finding.has_twin && !finding.repaired && !finding.is_unfinished;
  });
}

absl::StatusOr<FsckReport> CheckStore(const std::string& pool, const std::string& job,
                                      const FsckOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(OpenedFiles files,
                           OpenStoreFiles(pool, job, options.store, /*counts_as_opening=*/false));
  FsckReport report{.job = job, .path = files.path, .file_bytes = files.size_bytes};
  OFFLOAD_RETURN_IF_ERROR(Fsck(files.device.get(), options, &report).Run());
  if (report.job != job) {
    report.findings.push_back(
        {Part::kStore, absl::StrCat("the file is the store of job '", report.job,
                                    "': give it the name of its job again")});
  }
  return report;
}

absl::StatusOr<FsckReport> CheckDevice(aio::Device* device, const std::string& name,
                                       const FsckOptions& options) {
  FsckReport report{.path = name, .file_bytes = device->geometry().size_bytes};
  OFFLOAD_RETURN_IF_ERROR(Fsck(device, options, &report).Run());
  return report;
}

}  // namespace offload::swap

#include "swap/store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "spdlog/spdlog.h"
#include "swap/store_impl.h"

namespace offload::swap {
namespace {

// Longer transfers gain nothing and would keep the pieces of a thread engine on one thread.
constexpr uint64_t kTransferBytesMax = uint64_t{16} << 20;

absl::Status UnknownExtent(const ExtentId& id) {
  return absl::InvalidArgumentError(absl::StrCat("the store has no extent ", NameOf(id)));
}

bool AllZero(std::span<const std::byte> bytes) {
  return bytes.empty() || (bytes[0] == std::byte{0} &&
                           std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

// What a watch is told of them.
Transfer WriteOf(const Store& store, std::span<const WriteRequest> requests) {
  uint64_t bytes = 0;
  for (const WriteRequest& request : requests) bytes += store.ExtentBytes(request.id);
  const ExtentId& id = requests.front().id;
  return {Transfer::Kind::kWrite, id.tensor, id.index, bytes};
}

}  // namespace

std::string NameOf(const ExtentId& id) {
  static constexpr std::array<const char*, kPlaneCount> kNames = {
      "weight", "residual", "state0", "state1", "ties", "state2", "average"};
  const auto plane = static_cast<size_t>(id.plane);
  return absl::StrCat(
      "tensor ", id.tensor, ", plane ",
      plane < kNames.size() ? std::string(kNames[plane]) : absl::StrCat("number ", plane),
      ", index ", id.index);
}

void Checksum::Update(std::span<const std::byte> bytes) {
  state_ = Crc32c(state_, bytes.data(), bytes.size());
}
uint32_t Checksum::Finish() const { return state_; }

absl::Status RunToEnd(aio::Device& device, const std::function<void(aio::Device::Done)>& start) {
  std::optional<absl::Status> result;
  start([&result](absl::Status status) { result = std::move(status); });
  while (!result.has_value()) device.Poll(/*wait=*/true);
  return *result;
}

absl::Status FlushToEnd(aio::Device& device) {
  return RunToEnd(device, [&](aio::Device::Done done) { device.Flush(std::move(done)); });
}

absl::Status WriteToEnd(aio::Device& device, uint64_t offset_bytes, std::span<std::byte> bytes) {
  const iovec memory{bytes.data(), bytes.size()};
  return RunToEnd(device, [&](aio::Device::Done done) {
    device.Write(offset_bytes, {&memory, 1}, std::move(done));
  });
}

absl::Status RunToEnd(Store& store, const std::function<void(Store::Done)>& start) {
  std::optional<absl::Status> result;
  start([&result](absl::Status status) { result = std::move(status); });
  while (!result) store.Poll(/*wait=*/true);
  return *result;
}

Store::Impl::Impl(PoolDirectory pool, StoreSpec store_spec, Layout store_layout,
                  std::unique_ptr<aio::Device> store_device, Wakeup store_wakeup)
    : directory(std::move(pool)),
      spec(std::move(store_spec)),
      layout(std::move(store_layout)),
      wakeup(std::move(store_wakeup)),
      device(std::move(store_device)) {}

Store::Impl::~Impl() {
  CancelGrowth();
  while (!Idle()) Poll(/*wait=*/true);
  building_members.reset();  // before the main file, from which a start would find them
  building_file.reset();
  wakeup.Forget(device->event_fd());
}

absl::Status Store::Impl::AllocateBuffers() {
  for (auto& crcs : page_crcs) crcs.assign(layout.table_page_count(), 0);
  for (auto& stale : page_stale) stale.assign(layout.table_page_count(), 1);
  OFFLOAD_ASSIGN_OR_RETURN(superblock_page, MappedRegion::Anonymous(kPageBytes));
  OFFLOAD_ASSIGN_OR_RETURN(blob_pages, MappedRegion::Anonymous(Limits::kBlobBytesMax));
  return wakeup.Watch(device->event_fd());
}

absl::Status Store::Impl::CollectReads(std::span<const ReadRequest> requests,
                                       std::span<Stamp> stamps, std::vector<Piece>* pieces) const {
  if (stamps.size() != requests.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(stamps.size(), " stamps for ", requests.size(), " reads"));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    Layout::Where where;
    if (!layout.Find(requests[i].id, &where)) return UnknownExtent(requests[i].id);
    const TableEntry& found = CurrentEntry(where.entry);
    stamps[i] = StampOf(found);
    if (stamps[i].never_written()) {
      std::memset(requests[i].bytes, 0, where.size_bytes);
      continue;
    }
    pieces->push_back({layout.PlaceOffset(found.place()) + where.area_offset_bytes,
                       {requests[i].bytes, where.size_bytes},
                       where.entry,
                       {},
                       requests[i].id});
  }
  return absl::OkStatus();
}

absl::Status Store::Impl::CollectWrites(std::span<const WriteRequest> requests,
                                        std::vector<Piece>* pieces) const {
  if (failed) return FailedError();
  if (read_only) return absl::FailedPreconditionError(absl::StrCat(path, " is open to be read"));
  if (commit != nullptr) return absl::FailedPreconditionError("a write while a commit runs");
  for (const WriteRequest& request : requests) {
    Layout::Where where;
    if (!layout.Find(request.id, &where)) return UnknownExtent(request.id);
    if ((request.flags & ~TableEntry::kUserFlagsMask) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("flags ", request.flags, " of ", NameOf(request.id)));
    }
    const uint32_t place = ChoosePlace(where.entry);
    const TableEntry written{open_sequence(), request.word, request.crc,
                             request.flags | place << TableEntry::kPlaceShift};
    pieces->push_back({layout.PlaceOffset(place) + where.area_offset_bytes,
                       {const_cast<std::byte*>(request.bytes), where.size_bytes},
                       where.entry,
                       written,
                       request.id,
                       request.tentative});
  }
  return absl::OkStatus();
}

uint32_t Store::Impl::ChoosePlace(uint64_t index) const {
  const TableEntry& found = entry(index);
  if (IsOpen(index)) return found.place();
  uint32_t taken = found.sequence == 0 ? 0 : 1u << found.place();
  for (const std::vector<uint8_t>& places : snapshot_places) {
    if (!places.empty() && places[index] != kNoPlace) taken |= 1u << places[index];
  }
  const auto place = static_cast<uint32_t>(std::countr_one(taken));
  OFFLOAD_CHECK(place < 2 + generation_count) << "entry " << index << ", taken " << taken;
  return place;
}

void Store::Impl::Read(std::span<const ReadRequest> requests, std::span<Stamp> stamps, Done done) {
  auto batch = std::make_unique<Batch>();
  batch->pieces.reserve(requests.size());
  absl::Status status = CollectReads(requests, stamps, &batch->pieces);
  if (!status.ok() || batch->pieces.empty()) return Defer(std::move(done), std::move(status));
  batch->done = std::move(done);
  StartTransfers(std::move(batch), /*is_write=*/false);
}

void Store::Impl::Write(std::span<const WriteRequest> requests, Done done) {
  auto batch = std::make_unique<Batch>();
  batch->pieces.reserve(requests.size());
  absl::Status status = CollectWrites(requests, &batch->pieces);
  if (!status.ok() || batch->pieces.empty()) return Defer(std::move(done), std::move(status));
  batch->done = std::move(done);
  has_uncommitted_writes = true;
  has_firm_writes |= std::any_of(requests.begin(), requests.end(),
                                 [](const WriteRequest& request) { return !request.tentative; });
  StartTransfers(std::move(batch), /*is_write=*/true);
}

void Store::Impl::WriteAside(std::span<const WriteRequest> requests, Done done) {
  auto batch = std::make_unique<Batch>();
  batch->pieces.reserve(requests.size());
  absl::Status status = CollectWrites(requests, &batch->pieces);
  for (Piece& piece : batch->pieces) {
    piece.aside = true;
    if (IsOpen(piece.entry)) {
      status.Update(absl::FailedPreconditionError(absl::StrCat(
          NameOf(piece.id), " is written aside, and is part of the open epoch already")));
    }
  }
  if (!status.ok() || batch->pieces.empty()) return Defer(std::move(done), std::move(status));
  batch->done = std::move(done);
  StartTransfers(std::move(batch), /*is_write=*/true);
}

absl::Status Store::Impl::Adopt(std::span<const WriteRequest> requests, uint64_t sequence) {
  std::vector<Piece> pieces;
  OFFLOAD_RETURN_IF_ERROR(CollectWrites(requests, &pieces));
  for (const Piece& piece : pieces) {
    if (sequence == open_sequence() && !IsOpen(piece.entry)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        NameOf(piece.id), " was written aside in sequence ", sequence, ", the open one is ",
        open_sequence(), IsOpen(piece.entry) ? " and has it already" : ""));
  }
  for (const Piece& piece : pieces) SetEntry(piece.entry, piece.written);
  if (!pieces.empty()) has_uncommitted_writes = has_firm_writes = true;
  return absl::OkStatus();
}

// Joins pieces that are neighbours on disk. The batch owns itself until its last transfer has
// completed.
void Store::Impl::StartTransfers(std::unique_ptr<Batch> owned_batch, bool is_write) {
  Batch* const batch = owned_batch.release();
  std::vector<Piece>& pieces = batch->pieces;
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.offset_bytes < b.offset_bytes; });
  batch->transfers_left = 1;  // ours, so that the batch lives until all are started
  std::array<iovec, aio::Device::kMaxPieces> memory;
  for (size_t begin = 0, end; begin < pieces.size(); begin = end) {
    uint64_t size_bytes = 0;
    for (end = begin; end < pieces.size() && end - begin < memory.size(); ++end) {
      const bool neighbour = pieces[begin].offset_bytes + size_bytes == pieces[end].offset_bytes;
      if (end != begin &&
          (!neighbour || size_bytes + pieces[end].memory.iov_len > kTransferBytesMax))
        break;
      memory[end - begin] = pieces[end].memory;
      size_bytes += pieces[end].memory.iov_len;
    }
    ++batch->transfers_left;
    writes_in_flight += is_write;
    auto done = [this, batch, begin, end, is_write](absl::Status status) {
      FinishTransfer(batch, begin, end, is_write, std::move(status));
    };
    const std::span<const iovec> transfer(memory.data(), end - begin);
    is_write ? device->Write(pieces[begin].offset_bytes, transfer, std::move(done))
             : device->Read(pieces[begin].offset_bytes, transfer, std::move(done));
  }
  --batch->transfers_left;
  OFFLOAD_CHECK(batch->transfers_left > 0) << "a device completed outside Poll()";
}

void Store::Impl::FinishTransfer(Batch* batch, size_t begin, size_t end, bool is_write,
                                 absl::Status status) {
  if (is_write) {
    --writes_in_flight;
    if (!status.ok()) {
      Fail(status);
    } else {
      // Only now: a write that fails leaves its extent as it was, and the table never tells of
      // bytes that may not be there.
      for (size_t i = begin; i < end; ++i) {
        const Piece& piece = batch->pieces[i];
        if (piece.aside) continue;
        if (piece.tentative) tentative.try_emplace(piece.entry, entry(piece.entry));
        SetEntry(piece.entry, piece.written);
      }
    }
  }
  // A drive's bad moment, or a bad sector of one of several extents.
  if (!is_write && absl::IsDataLoss(status)) return Reread(batch, begin, end);
  FinishPart(batch, std::move(status));
}

void Store::Impl::FinishPart(Batch* batch, absl::Status status) {
  if (batch->status.ok()) batch->status = std::move(status);
  if (--batch->transfers_left > 0) return;
  const std::unique_ptr<Batch> finished(batch);
  ++callbacks_run;
  finished->done(std::move(finished->status));
}

void Store::Impl::SetEntry(uint64_t index, const TableEntry& value) {
  entry(index) = value;
  for (auto& stale : page_stale) stale[index / kEntriesPerTablePage] = 1;
}

const TableEntry& Store::Impl::CurrentEntry(uint64_t index) const {
  if (commit == nullptr || !commit->keeps_tentative) return entry(index);
  const auto found = tentative.find(index);
  return found == tentative.end() ? entry(index) : found->second;
}

void Store::Impl::Defer(Done done, absl::Status status) {
  if (deferred.empty()) wakeup.Signal();
  deferred.emplace_back(std::move(done), std::move(status));
}

size_t Store::Impl::Poll(bool wait) {
  const size_t before = callbacks_run;
  if (!deferred.empty()) {
    // What these defer anew runs in the next Poll, so that a caller that starts over in its
    // callback cannot keep us here.
    auto ready = std::exchange(deferred, {});
    wakeup.Clear();
    for (auto& [done, status] : ready) {
      ++callbacks_run;
      done(std::move(status));
    }
  }
  // A step of a commit is a completion for the device, but none for our caller.
  do {
    device->Poll(wait && callbacks_run == before);
  } while (wait && callbacks_run == before && deferred.empty() && device->in_flight() > 0);
  return callbacks_run - before;
}

void Store::Impl::Fail(const absl::Status& status) {
  if (failed) return;
  failed = true;
  failure = status;
  spdlog::error("{} has failed and takes no more writes: {}", path, ToStd(status.message()));
}

absl::Status Store::Impl::FailedError() const {
  return MakeError(ErrorId::kStoreFailed, absl::StrCat(path, " at sequence ", committed.sequence,
                                                       " (", failure.message(), ")"));
}

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

const StoreSpec& Store::spec() const { return impl_->spec; }
uint64_t Store::ExtentBytes(const ExtentId& id) const { return impl_->layout.ExtentBytes(id); }
uint32_t Store::ExtentCount(uint32_t tensor) const {
  return tensor < impl_->layout.tensors().size() ? impl_->layout.tensors()[tensor].index_count : 0;
}

void Store::Read(std::span<const ReadRequest> requests, std::span<Stamp> stamps, Done done) {
  if (impl_->watch && !requests.empty()) {
    uint64_t bytes = 0;
    for (const ReadRequest& request : requests)
      bytes += stamp(request.id).never_written() ? 0 : ExtentBytes(request.id);
    const ExtentId& id = requests.front().id;
    done = impl_->watch({Transfer::Kind::kRead, id.tensor, id.index, bytes}, std::move(done));
  }
  impl_->Read(requests, stamps, std::move(done));
}
void Store::Write(std::span<const WriteRequest> requests, Done done) {
  if (impl_->watch && !requests.empty())
    done = impl_->watch(WriteOf(*this, requests), std::move(done));
  impl_->Write(requests, std::move(done));
}
void Store::WriteAside(std::span<const WriteRequest> requests, Done done) {
  if (impl_->watch && !requests.empty())
    done = impl_->watch(WriteOf(*this, requests), std::move(done));
  impl_->WriteAside(requests, std::move(done));
}
absl::Status Store::Adopt(std::span<const WriteRequest> requests, uint64_t sequence) {
  return impl_->Adopt(requests, sequence);
}

Checksum Store::StartChecksum(const ExtentId& id, uint64_t sequence) const {
  return Checksum(ExtentSeed(impl_->uuid, id, sequence));
}

bool Store::Verify(const ExtentId& id, const Stamp& stamp, std::span<const std::byte> bytes) const {
  if (bytes.size() != ExtentBytes(id)) return false;
  if (stamp.never_written()) return AllZero(bytes);
  Checksum checksum = StartChecksum(id, stamp.sequence);
  checksum.Update(bytes);
  return checksum.Finish() == stamp.crc;
}

uint64_t Store::open_sequence() const { return impl_->open_sequence(); }

Stamp Store::stamp(const ExtentId& id) const {
  Layout::Where where;
  return impl_->layout.Find(id, &where) ? impl_->StampOf(impl_->CurrentEntry(where.entry))
                                        : Stamp{};
}

void Store::Commit(uint64_t epoch, std::string blob, Done done) {
  if (impl_->watch) done = impl_->watch({.kind = Transfer::Kind::kCommit}, std::move(done));
  impl_->Commit(epoch, std::move(blob), std::move(done));
}
void Store::CreateSnapshot(const std::string& name, int64_t unix_seconds, Done done) {
  impl_->CreateSnapshot(name, unix_seconds, std::move(done));
}
void Store::DeleteSnapshot(const std::string& name, Done done) {
  impl_->DeleteSnapshot(name, std::move(done));
}
const std::vector<SnapshotInfo>& Store::snapshots() const { return impl_->snapshots; }
uint32_t Store::generation_count() const { return impl_->generation_count; }
uint64_t Store::generation_bytes() const { return impl_->layout.generation_bytes(); }
void Store::Grow(std::function<void(uint64_t, uint64_t)> progress, Done done) {
  impl_->Grow(std::move(progress), std::move(done));
}
void Store::CancelGrowth() { impl_->CancelGrowth(); }
const CommitInfo& Store::committed() const { return impl_->committed; }
bool Store::has_uncommitted_writes() const { return impl_->has_uncommitted_writes; }
bool Store::failed() const { return impl_->failed; }
absl::Status Store::CheckFiles() const {
  return impl_->building_file == nullptr ? impl_->files.Check() : absl::OkStatus();
}
absl::Status Store::SaveRemovedFiles() {
  return impl_->building_file == nullptr ? impl_->files.Save(impl_->spec.job) : absl::OkStatus();
}
const std::vector<std::string>& Store::repairs() const { return impl_->repairs; }
void Store::ReadAgain(const ReadRequest& request, const Stamp& stamp, Done done) {
  impl_->ReadAgain(request, stamp, std::move(done));
}
ErrorCounts Store::error_counts() const {
  const aio::Counters& counters = impl_->device->counters();
  return {.checksum_mismatches = impl_->checksum_mismatches,
          .read_errors = counters.read_errors.load(std::memory_order_relaxed),
          .write_errors = counters.write_errors.load(std::memory_order_relaxed),
          .flush_errors = counters.flush_errors.load(std::memory_order_relaxed),
          .lost_extents = impl_->lost_extents,
          .repaired_copies = impl_->repairs.size()};
}

void Store::SetWatch(TransferWatch watch) { impl_->watch = std::move(watch); }
size_t Store::Poll(bool wait) { return impl_->Poll(wait); }
int Store::event_fd() const { return impl_->wakeup.fd(); }
const aio::Device& Store::device() const { return *impl_->device; }
void Store::RegisterBuffer(std::span<std::byte> bytes) { impl_->device->RegisterBuffer(bytes); }
const std::string& Store::path() const { return impl_->path; }

}  // namespace offload::swap

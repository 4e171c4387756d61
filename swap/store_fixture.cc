#include "swap/store_fixture.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/random.h"
#include "base/status_macros.h"

namespace offload::swap {

TemporaryPool::TemporaryPool() {
  const char* base = std::getenv("TEST_TMPDIR");
  path_ = absl::StrCat(base != nullptr ? base : ".", "/pool-XXXXXX");
  OFFLOAD_CHECK(mkdtemp(path_.data()) != nullptr) << path_;
}

TemporaryPool::~TemporaryPool() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryPool::Files() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

StoreSpec SmallSpec(const std::string& job) {
  const std::vector<PlaneSpec> bf16 = {{Plane::kWeight, 16},
                                       {Plane::kResidual, 16},
                                       {Plane::kState0, 32},
                                       {Plane::kState1, 32},
                                       {Plane::kTies, 1}};
  const std::vector<PlaneSpec> fp32 = {{Plane::kWeight, 32}, {Plane::kState0, 32}};
  return {.job = job,
          .extent_elements = 32768,
          .tensors = {{32768 + 5000, bf16}, {32768, fp32}, {7, fp32}},
          .catalogue = "what the trainer calls its tensors"};
}

StoreOptions QuickOptions() {
  StoreOptions options;
  options.lock_timeout_seconds = 10;
  return options;
}

std::vector<ExtentId> AllExtents(const Store& store) {
  std::vector<ExtentId> ids;
  for (uint32_t tensor = 0; tensor < store.spec().tensors.size(); ++tensor) {
    for (uint32_t index = 0; index < store.ExtentCount(tensor); ++index) {
      for (const PlaneSpec& plane : store.spec().tensors[tensor].planes)
        ids.push_back({tensor, plane.plane, index});
    }
  }
  return ids;
}

MappedRegion Buffer(uint64_t size_bytes) {
  absl::StatusOr<MappedRegion> region = MappedRegion::Anonymous(size_bytes);
  OFFLOAD_CHECK_OK(region);
  return *std::move(region);
}

namespace {

uint64_t Hash(const ExtentId& id, uint64_t sequence) {
  uint64_t state =
      sequence * 1000003 + id.tensor * 10007 + static_cast<uint64_t>(id.plane) * 101 + id.index;
  return SplitMix64(state);
}

// The commit that last wrote an extent, 0 for none.
uint64_t LastWritten(const ExtentId& id, uint64_t sequence) {
  while (sequence > 0 && !IsWrittenIn(id, sequence)) --sequence;
  return sequence;
}

}  // namespace

size_t BorrowedDevice::Poll(bool wait) {
  const size_t refused = CompleteRefused();
  return refused + behind_->Poll(wait && refused == 0);
}

void BorrowedDevice::Start(std::unique_ptr<Op> op) {
  Op* const raw = op.release();
  auto done = [this, raw](absl::Status status) {
    Complete(std::unique_ptr<Op>(raw), std::move(status));
  };
  if (raw->kind == Kind::kFlush) return behind_->Flush(done);
  raw->kind == Kind::kRead ? behind_->Read(raw->offset_bytes, raw->pieces, done)
                           : behind_->Write(raw->offset_bytes, raw->pieces, done);
}

bool IsWrittenIn(const ExtentId& id, uint64_t sequence) { return Hash(id, sequence) % 3 != 0; }

void FillExtent(const ExtentId& id, uint64_t sequence, std::span<std::byte> bytes) {
  Random(Hash(id, sequence) + 1).Fill(bytes);
}

std::string BlobOf(uint64_t sequence) {
  std::string blob(sequence * 1777 % 9000, '\0');
  Random(sequence).Fill({reinterpret_cast<std::byte*>(blob.data()), blob.size()});
  return blob;
}

uint64_t EpochOf(uint64_t sequence) { return 100 + sequence; }

absl::Status WriteNow(Store& store, std::span<const WriteRequest> requests) {
  return RunToEnd(store, [&](Store::Done done) { store.Write(requests, std::move(done)); });
}

absl::Status CommitNow(Store& store, uint64_t epoch, const std::string& blob) {
  return RunToEnd(store, [&](Store::Done done) { store.Commit(epoch, blob, std::move(done)); });
}

absl::Status ReadNow(Store& store, const ExtentId& id, std::span<std::byte> bytes, Stamp* stamp) {
  const ReadRequest request{id, bytes.data()};
  return RunToEnd(store, [&](Store::Done done) {
    store.Read({&request, 1}, {stamp, 1}, std::move(done));
  });
}

ScriptWrites MakeScriptWrites(const Store& store) {
  const uint64_t sequence = store.open_sequence();
  ScriptWrites writes;
  for (const ExtentId& id : AllExtents(store)) {
    if (!IsWrittenIn(id, sequence)) continue;
    const MappedRegion& buffer = writes.buffers.emplace_back(Buffer(store.ExtentBytes(id)));
    FillExtent(id, sequence, writes.buffers.back().span());
    Checksum checksum = store.StartChecksum(id, sequence);
    checksum.Update(buffer.span());
    writes.requests.push_back(
        {id, buffer.data(), checksum.Finish(), /*word=*/Hash(id, sequence), /*flags=*/0});
  }
  return writes;
}

absl::Status WriteScript(Store& store) { return WriteNow(store, MakeScriptWrites(store).requests); }

absl::Status CommitScript(Store& store) {
  OFFLOAD_RETURN_IF_ERROR(WriteScript(store));
  const uint64_t sequence = store.open_sequence();
  return CommitNow(store, EpochOf(sequence), BlobOf(sequence));
}

absl::Status CheckScript(Store& store, uint64_t sequence) {
  if (store.committed().sequence != sequence)
    return absl::InternalError(absl::StrCat("sequence ", store.committed().sequence));
  if (sequence > 0 && (store.committed().epoch != EpochOf(sequence) ||
                       store.committed().blob != BlobOf(sequence))) {
    return absl::InternalError("epoch or blob");
  }
  for (const ExtentId& id : AllExtents(store)) {
    const MappedRegion got = Buffer(store.ExtentBytes(id)),
                       expected = Buffer(store.ExtentBytes(id));
    const uint64_t written = LastWritten(id, sequence);
    if (written > 0) FillExtent(id, written, expected.span());
    Stamp stamp;
    OFFLOAD_RETURN_IF_ERROR(ReadNow(store, id, got.span(), &stamp));
    const bool same = std::memcmp(got.data(), expected.data(), got.size()) == 0;
    if (!same || stamp.sequence != written || (written > 0 && stamp.word != Hash(id, written)) ||
        !store.Verify(id, stamp, got.span())) {
      return absl::InternalError(absl::StrCat(
          "tensor ", id.tensor, " plane ", static_cast<int>(id.plane), " index ", id.index,
          ": bytes ", same ? "right" : "wrong", ", stamp of ", stamp.sequence, " for ", written));
    }
  }
  return absl::OkStatus();
}

}  // namespace offload::swap

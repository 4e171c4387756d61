#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "swap/simulation.h"

namespace offload::swap {
namespace {

using aio::FaultKind;

constexpr size_t kBatchExtentsMax = 6;
constexpr int64_t kUnixSeconds = 1'800'000'000;  // no clock

void FillContent(uint64_t key, std::span<std::byte> bytes) {
  if (key == 0) {
    std::memset(bytes.data(), 0, bytes.size());
  } else {
    Random(key).Fill(bytes);
  }
}

bool SameStamp(const Stamp& a, const Stamp& b) {
  return a.sequence == b.sequence && a.word == b.word && a.crc == b.crc && a.flags == b.flags;
}

}  // namespace

void Simulation::Violate(std::string what) {
  if (result_.violation.empty())
    result_.violation = absl::StrCat("operation ", result_.operations, ": ", what);
  ended_ = true;
}

uint64_t Simulation::Met(std::initializer_list<FaultKind> kinds) const {
  uint64_t met = 0;
  for (const FaultKind kind : kinds) met += drive_->faults_met(kind);
  return met;
}

bool Simulation::DamageDone() const { return rotten_offset_ || !drive_->damaged().empty(); }

// Whether the drive has spoilt what was read into the buffer.
bool Simulation::IsDamaged(const void* buffer) const {
  const auto found = read_ranges_.find(buffer);
  if (found == read_ranges_.end()) return false;  // never written: nothing was read
  const aio::ByteRange& read = found->second;
  if (rotten_offset_ && read.Overlaps({*rotten_offset_, 1})) return true;
  return std::any_of(drive_->damaged().begin(), drive_->damaged().end(),
                     [&](const aio::ByteRange& range) { return read.Overlaps(range); });
}

// A drive must have given cause for an error, and the store its code.
void Simulation::JudgeError(const absl::Status& status, std::initializer_list<FaultKind> causes) {
  trace_.Add(static_cast<uint64_t>(status.code()));
  if (status.ok()) return;
  const std::optional<ErrorId> id = ErrorIdOf(status);
  const bool known = id == ErrorId::kIo || id == ErrorId::kStoreFailed ||
                     id == ErrorId::kPoolFull || (!id && absl::IsUnavailable(status)) ||
                     (!id && absl::IsDataLoss(status));
  if (!known) Violate(absl::StrCat("an error without a documented code: ", status.ToString()));
  if (Met(causes) == 0 && !drive_->is_cut())
    Violate(absl::StrCat("an error without a cause: ", status.ToString()));
}

AlignedBytes Simulation::MakeBytes(size_t extent, uint64_t key) {
  AlignedBytes bytes = Allocate(sizes_[extent]);
  FillContent(key, {bytes.get(), sizes_[extent]});
  return bytes;
}

std::vector<size_t> Simulation::ChooseIdleExtents() {
  std::vector<size_t> chosen;
  for (uint64_t tries = 1 + random_.Below(kBatchExtentsMax); tries > 0; --tries) {
    // Neighbours become one transfer: half of the time the next one is chosen.
    const size_t extent = !chosen.empty() && random_.OneIn(2) ? (chosen.back() + 1) % ids_.size()
                                                              : random_.Below(ids_.size());
    if (!busy_[extent] && std::find(chosen.begin(), chosen.end(), extent) == chosen.end())
      chosen.push_back(extent);
  }
  return chosen;
}

void Simulation::StartWrite() {
  const std::vector<size_t> extents = ChooseIdleExtents();
  if (extents.empty()) return;
  auto write = std::make_unique<PendingWrite>();
  std::vector<WriteRequest> requests;
  const uint64_t sequence = store_->open_sequence();
  tentative_ =
      store_->has_uncommitted_writes() ? tentative_ && !random_.OneIn(8) : random_.OneIn(3);
  for (const size_t extent : extents) {
    Content content{.key = random_.Next() | 1};
    write->buffers.push_back(MakeBytes(extent, content.key));
    Checksum checksum = store_->StartChecksum(ids_[extent], sequence);
    checksum.Update({write->buffers.back().get(), sizes_[extent]});
    content.stamp = {sequence, random_.Next(), checksum.Finish(),
                     static_cast<uint32_t>(random_.Below(2))};
    requests.push_back({ids_[extent], write->buffers.back().get(), content.stamp.crc,
                        content.stamp.word, content.stamp.flags, tentative_});
    write->extents.push_back(extent);
    write->contents.push_back(content);
    busy_[extent] = 1;
  }
  ++result_.writes;
  PendingWrite* const raw = write.get();
  pending_.push_back(std::move(write));
  store_->Write(requests, [this, raw](absl::Status status) { FinishWrite(raw, status); });
}

void Simulation::FinishWrite(PendingWrite* write, const absl::Status& status) {
  JudgeError(status, {FaultKind::kWriteError, FaultKind::kNoSpace, FaultKind::kTornWrite,
                      FaultKind::kAgain, FaultKind::kFlushError});
  for (size_t i = 0; i < write->extents.size() && !closing_; ++i) {
    const size_t extent = write->extents[i];
    const Stamp now = store_->stamp(ids_[extent]);
    Content& old = open_.extents[extent];
    busy_[extent] = 0;
    if (SameStamp(now, write->contents[i].stamp)) {
      old = write->contents[i];
    } else if (status.ok() || !SameStamp(now, old.stamp)) {
      Violate(absl::StrCat("the stamp of extent ", extent, " after a write"));
    } else if (!SameStamp(old.stamp, committed_.extents[extent].stamp)) {
      uncertain_[extent] = 1;
    }
  }
  if (!closing_ && !status.ok() && !store_->failed())
    Violate("a write has failed and the store has not");
  std::erase_if(pending_, [&](const auto& each) { return each.get() == write; });
}

void Simulation::JudgeExtent(const Store& store, const State& state, size_t extent,
                             const Stamp& stamp, std::span<const std::byte> bytes, bool excused) {
  const Content& expected = state.extents[extent];
  if (!SameStamp(stamp, expected.stamp))
    return Violate(absl::StrCat("extent ", extent, " has the stamp of sequence ", stamp.sequence,
                                ", not that of ", expected.stamp.sequence));
  const AlignedBytes right = MakeBytes(extent, expected.key);
  const bool same = std::memcmp(right.get(), bytes.data(), bytes.size()) == 0;
  const bool verified = store.Verify(ids_[extent], stamp, bytes);
  trace_.Add(verified);
  if (verified && !same) Violate(absl::StrCat("wrong bytes of extent ", extent, " are accepted"));
  if (verified) return;
  if (!excused) Violate(absl::StrCat("the bytes of extent ", extent, " are lost"));
  ++result_.mismatches_seen;
}

void Simulation::Read(std::span<const size_t> extents) {
  if (extents.empty()) return;
  std::vector<AlignedBytes> buffers;
  std::vector<ReadRequest> requests;
  for (const size_t extent : extents) {
    buffers.push_back(Allocate(sizes_[extent]));
    requests.push_back({ids_[extent], buffers.back().get()});
  }
  const auto silent_kinds = {FaultKind::kBitFlip, FaultKind::kMisdirectedRead,
                             FaultKind::kStaleRead};
  const uint64_t silent_before = Met(silent_kinds);
  std::vector<Stamp> stamps(extents.size());
  std::optional<absl::Status> status;
  ++result_.reads;
  read_ranges_.clear();
  store_->Read(requests, stamps, [&](absl::Status outcome) { status = std::move(outcome); });
  PollUntil([&] { return status.has_value(); });
  JudgeError(*status, {FaultKind::kReadError, FaultKind::kShortRead, FaultKind::kAgain});
  if (!status->ok()) return;
  for (size_t i = 0; i < extents.size(); ++i) {
    const bool excused = IsDamaged(buffers[i].get()) || uncertain_[extents[i]] != 0 ||
                         Met(silent_kinds) != silent_before;
    JudgeExtent(*store_, open_, extents[i], stamps[i], {buffers[i].get(), sizes_[extents[i]]},
                excused);
  }
}

void Simulation::ReadSome() { Read(ChooseIdleExtents()); }

void Simulation::ReadAll() {
  DrainWrites();
  std::vector<size_t> all(ids_.size());
  for (size_t extent = 0; extent < all.size(); ++extent) all[extent] = extent;
  Read(all);
}

void Simulation::Commit(bool may_crash) {
  DrainWrites();
  State next = open_;
  next.commit = {store_->open_sequence(), random_.Next(), {}};
  next.commit.blob.resize(random_.OneIn(30) ? random_.Below(100000) : random_.Below(3) * 2500);
  random_.Fill(std::as_writable_bytes(std::span(next.commit.blob)));
  const CommitInfo commit = next.commit;
  RunCommit(std::move(next), /*keeps_open=*/false, may_crash,
            [&](Store::Done done) { store_->Commit(commit.epoch, commit.blob, std::move(done)); });
}

void Simulation::RunCommit(State next, bool keeps_open, bool may_crash,
                           const std::function<void(Store::Done)>& start) {
  const bool was_failed = store_->failed();
  if (!was_failed) next_ = std::move(next);
  ++result_.commits;
  // Outlives this call when there is a crash.
  auto outcome = std::make_shared<std::optional<absl::Status>>();
  start([outcome](absl::Status done) { *outcome = std::move(done); });
  if (may_crash) {
    for (uint64_t polls = random_.Below(12); polls > 0 && !*outcome; --polls) store_->Poll(false);
    if (!*outcome) return Crash();
  }
  if (random_.OneIn(3)) ReadSome();
  PollUntil([&] { return outcome->has_value(); });
  JudgeError(**outcome, {FaultKind::kWriteError, FaultKind::kNoSpace, FaultKind::kTornWrite,
                         FaultKind::kAgain, FaultKind::kFlushError});
  if ((*outcome)->ok()) {
    if (was_failed) Violate("a failed store has committed");
    committed_ = *std::move(next_);
    next_.reset();
    std::vector<Content> written = std::move(open_.extents);
    open_ = committed_;
    if (keeps_open) open_.extents = std::move(written);
  } else if (ErrorIdOf(**outcome) != ErrorId::kStoreFailed || !store_->failed()) {
    Violate(absl::StrCat("a failed commit: ", (*outcome)->ToString()));
  }
}

// Makes or deletes a snapshot of the last commit, or makes room for one.
void Simulation::ChangeSnapshots(bool may_crash) {
  DrainWrites();
  if (store_->has_uncommitted_writes() && !tentative_) Commit(/*may_crash=*/false);
  if (ended_) return;
  const bool full = open_.snapshots.size() == open_.generations;
  if (full && open_.generations < kSpareGenerationsMax && random_.OneIn(8)) return Grow(may_crash);
  if (full && open_.snapshots.empty()) return;
  State next = open_;
  next.extents = committed_.extents;
  auto kept = std::make_shared<State>(next);
  kept->snapshots.clear();
  next.commit.sequence = store_->open_sequence();
  std::string name;
  if (full || (!open_.snapshots.empty() && random_.OneIn(3))) {
    name = std::next(open_.snapshots.begin(),
                     static_cast<ptrdiff_t>(random_.Below(open_.snapshots.size())))
               ->first;
    next.snapshots.erase(name);
    return RunCommit(std::move(next), /*keeps_open=*/true, may_crash,
                     [&](Store::Done done) { store_->DeleteSnapshot(name, std::move(done)); });
  }
  name = absl::StrCat("s", ++snapshots_named_);
  next.snapshots[name] = std::move(kept);
  ++result_.snapshots;
  RunCommit(std::move(next), /*keeps_open=*/true, may_crash,
            [&](Store::Done done) { store_->CreateSnapshot(name, kUnixSeconds, std::move(done)); });
}

void Simulation::Grow(bool may_crash) {
  auto outcome = std::make_shared<std::optional<absl::Status>>();
  store_->Grow(nullptr, [outcome](absl::Status done) { *outcome = std::move(done); });
  for (uint64_t polls = random_.Below(12); may_crash && polls > 0 && !*outcome; --polls)
    store_->Poll(false);
  if (may_crash && !*outcome) return Crash();
  if (random_.OneIn(3)) ReadSome();
  PollUntil([&] { return outcome->has_value(); });
  JudgeError(**outcome, {FaultKind::kWriteError, FaultKind::kNoSpace, FaultKind::kTornWrite,
                         FaultKind::kAgain, FaultKind::kFlushError});
  if (!(*outcome)->ok()) return;
  ++open_.generations;
  ++result_.growths;
}

}  // namespace offload::swap

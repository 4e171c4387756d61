#include "swap/simulator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/memory_device.h"
#include "base/check.h"
#include "base/error.h"
#include "base/random.h"
#include "base/string_view.h"
#include "swap/format.h"
#include "swap/fsck.h"
#include "swap/layout.h"
#include "swap/store.h"
#include "swap/traced_device.h"

namespace offload::swap {
namespace {

using aio::FaultKind;

// What a store that completes nothing any more would need for ever.
constexpr int kPollsMax = 100000;
constexpr size_t kBatchExtentsMax = 6;
// Of the script of a loop over the n-th fault: each opening reads everything.
constexpr uint64_t kOperationsPerOpening = 80;
constexpr uint32_t kSpareGenerationsMax = 2;
constexpr int64_t kUnixSeconds = 1'800'000'000;  // no clock

struct AlignedFree {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;

AlignedBytes Allocate(uint64_t size_bytes) {
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, size_bytes)));
}

// What an extent holds: bytes that follow from `key`, and the stamp of their write. 0: zeros.
struct Content {
  uint64_t key = 0;
  Stamp stamp;
};

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

// What a store holds, by the model.
struct State {
  CommitInfo commit;
  std::vector<Content> extents;
  uint32_t generations = 0;
  std::map<std::string, std::shared_ptr<const State>> snapshots;
};

struct PendingWrite {
  std::vector<size_t> extents;
  std::vector<Content> contents;
  std::vector<AlignedBytes> buffers;
};

bool IsOneOf(FaultKind kind, std::initializer_list<FaultKind> kinds) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

// Small extents: the least unit of elements is 32768, so longer tensors have a bit per element.
StoreSpec ChooseSpec(Random& random) {
  StoreSpec spec{.job = "simulated", .extent_elements = 32768};
  for (uint64_t count = 1 + random.Below(3); count > 0; --count) {
    TensorSpec tensor{.element_count = 1 + random.Below(3000)};
    tensor.planes.push_back({Plane::kWeight, random.OneIn(2) ? 16u : 32u});
    if (random.OneIn(2)) tensor.planes.push_back({Plane::kResidual, 16});
    if (random.OneIn(2)) tensor.planes.push_back({Plane::kExpAvg, 32});
    if (random.OneIn(2)) tensor.planes.push_back({Plane::kTies, 1});
    spec.tensors.push_back(std::move(tensor));
  }
  const uint64_t indexes = random.OneIn(8) ? kEntriesPerTablePage : 1 + random.Below(4);
  spec.tensors.push_back({32768 * indexes + random.Below(5000), {{Plane::kWeight, 1}}});
  spec.catalogue.assign(random.Below(3) * 3000, 'c');
  return spec;
}

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options);
  SimulationResult Run();

 private:
  // Making and reopening.
  void Format();
  void Reopen();
  absl::StatusOr<std::unique_ptr<Store>> OpenWithoutWriting();
  void AddOpeningFault();
  void JudgeFound();
  void Close(aio::FaultyDevice::Survivors survivors);
  void CloseAndReopen();
  void Crash();
  bool MayRefuseToOpen() const;

  // Operations.
  void Step();
  void StartWrite();
  void FinishWrite(PendingWrite* write, const absl::Status& status);
  void Read(std::span<const size_t> extents);
  void ReadSome();
  void ReadAll();
  void Commit(bool may_crash);
  void RunCommit(State next, bool may_crash, const std::function<void(Store::Done)>& start);
  void ChangeSnapshots(bool may_crash);
  void Grow(bool may_crash);
  void JudgeSnapshots();
  void AddFault();
  void Rot();
  void AfterTheScript();
  void CheckCopies();

  // Judging.
  void JudgeExtent(const Store& store, const State& state, size_t extent, const Stamp& stamp,
                   std::span<const std::byte> bytes, bool excused);
  void JudgeError(const absl::Status& status, std::initializer_list<FaultKind> causes);
  bool DamageDone() const;
  bool IsDamaged(const void* buffer) const;
  uint64_t Met(std::initializer_list<FaultKind> kinds) const;
  void Violate(std::string what);
  template <typename Condition>
  bool PollUntil(Condition done);
  void DrainWrites() {
    PollUntil([&] { return pending_.empty(); });
  }
  std::vector<size_t> ChooseIdleExtents();
  AlignedBytes MakeBytes(size_t extent, uint64_t key);

  const SimulationOptions options_;
  Random random_;
  const StoreSpec spec_;
  Trace trace_;
  ReadPlaces places_;  // of the extents of the last Read()
  std::unique_ptr<aio::FaultyDevice> drive_;
  aio::MemoryDevice* memory_ = nullptr;
  std::unique_ptr<Store> store_;
  SimulationResult result_;

  std::vector<ExtentId> ids_;
  std::vector<uint64_t> sizes_;
  State committed_, open_;
  std::optional<State> next_;  // a commit that was begun and has not been acknowledged
  std::vector<uint8_t> busy_;
  std::vector<uint8_t> uncertain_;  // a rewrite in the same epoch has failed halfway
  std::vector<std::unique_ptr<PendingWrite>> pending_;
  uint64_t snapshots_named_ = 0;
  std::set<std::string> lost_snapshots_;  // could not be read at an opening: no longer kept
  bool closing_ = false, ended_ = false;
  uint64_t cuts_left_ = 0;
  bool damage_chosen_ = false;
  std::optional<uint64_t> rotten_offset_;
  std::optional<aio::Fault> opening_fault_;
  uint64_t faults_met_before_opening_ = 0;
};

Simulation::Simulation(const SimulationOptions& options)
    : options_(options), random_(options.seed), spec_(ChooseSpec(random_)) {
  const uint32_t sector_bytes = random_.OneIn(4) ? 512 : 4096;
  auto memory = std::make_unique<aio::MemoryDevice>(FormattedBytes(spec_, kSpareGenerationsMax),
                                                    std::nullopt, sector_bytes, sector_bytes);
  memory_ = memory.get();
  drive_ = std::make_unique<aio::FaultyDevice>(
      std::move(memory),
      aio::FaultyDevice::Options{
          .seed = random_.Next(), .reorders = !random_.OneIn(4), .remember_previous = true});
  cuts_left_ = random_.Below(4);
}

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
  const auto found = places_.find(buffer);
  if (found == places_.end()) return false;  // never written: nothing was read
  const aio::ByteRange& place = found->second;
  if (rotten_offset_ && place.Overlaps({*rotten_offset_, 1})) return true;
  return std::any_of(drive_->damaged().begin(), drive_->damaged().end(),
                     [&](const aio::ByteRange& range) { return place.Overlaps(range); });
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

template <typename Condition>
bool Simulation::PollUntil(Condition done) {
  for (int polls = 0; polls < kPollsMax; ++polls) {
    if (done()) return true;
    store_->Poll(/*wait=*/false);
  }
  Violate("a call does not complete");
  std::abort();  // its buffers belong to the device: there is no way on
}

AlignedBytes Simulation::MakeBytes(size_t extent, uint64_t key) {
  AlignedBytes bytes = Allocate(sizes_[extent]);
  FillContent(key, {bytes.get(), sizes_[extent]});
  return bytes;
}

void Simulation::Format() {
  StoreUuid uuid;
  random_.Fill(std::as_writable_bytes(std::span(uuid)));
  open_.generations = static_cast<uint32_t>(random_.Below(kSpareGenerationsMax + 1));
  auto store = Store::CreateOn(std::make_unique<TracedDevice>(drive_.get(), &trace_, &places_),
                               spec_, uuid, open_.generations);
  if (!store.ok()) return Violate(absl::StrCat("format: ", store.status().ToString()));
  store_ = *std::move(store);
  for (uint32_t tensor = 0; tensor < spec_.tensors.size(); ++tensor) {
    for (uint32_t index = 0; index < store_->ExtentCount(tensor); ++index) {
      for (const PlaneSpec& plane : spec_.tensors[tensor].planes) {
        ids_.push_back({tensor, plane.plane, index});
        sizes_.push_back(store_->ExtentBytes(ids_.back()));
      }
    }
  }
  open_.extents.resize(ids_.size());
  busy_.resize(ids_.size());
  uncertain_.resize(ids_.size());
  StartWrite();
  Commit(/*may_crash=*/false);
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
  for (const size_t extent : extents) {
    Content content{.key = random_.Next() | 1};
    write->buffers.push_back(MakeBytes(extent, content.key));
    Checksum checksum = store_->StartChecksum(ids_[extent], sequence);
    checksum.Update({write->buffers.back().get(), sizes_[extent]});
    content.stamp = {sequence, random_.Next(), checksum.Finish(),
                     static_cast<uint32_t>(random_.Below(2))};
    requests.push_back({ids_[extent], write->buffers.back().get(), content.stamp.crc,
                        content.stamp.word, content.stamp.flags});
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
    } else if (old.stamp.sequence == store_->open_sequence()) {
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
  places_.clear();
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
  RunCommit(std::move(next), may_crash,
            [&](Store::Done done) { store_->Commit(commit.epoch, commit.blob, std::move(done)); });
}

void Simulation::RunCommit(State next, bool may_crash,
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
    committed_ = open_ = *std::move(next_);
    next_.reset();
  } else if (ErrorIdOf(**outcome) != ErrorId::kStoreFailed || !store_->failed()) {
    Violate(absl::StrCat("a failed commit: ", (*outcome)->ToString()));
  }
}

// Makes or deletes a snapshot of the last commit, or makes room for one.
void Simulation::ChangeSnapshots(bool may_crash) {
  DrainWrites();
  if (store_->has_uncommitted_writes()) Commit(/*may_crash=*/false);
  if (ended_) return;
  const bool full = open_.snapshots.size() == open_.generations;
  if (full && open_.generations < kSpareGenerationsMax && random_.OneIn(8)) return Grow(may_crash);
  if (full && open_.snapshots.empty()) return;
  State next = open_;
  next.commit.sequence = store_->open_sequence();
  std::string name;
  if (full || (!open_.snapshots.empty() && random_.OneIn(3))) {
    name = std::next(open_.snapshots.begin(),
                     static_cast<ptrdiff_t>(random_.Below(open_.snapshots.size())))
               ->first;
    next.snapshots.erase(name);
    return RunCommit(std::move(next), may_crash,
                     [&](Store::Done done) { store_->DeleteSnapshot(name, std::move(done)); });
  }
  name = absl::StrCat("s", ++snapshots_named_);
  auto kept = std::make_shared<State>(open_);
  kept->snapshots.clear();
  next.snapshots[name] = std::move(kept);
  ++result_.snapshots;
  RunCommit(std::move(next), may_crash,
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

// Opens every snapshot as a reader does, and compares it with what was kept.
void Simulation::JudgeSnapshots() {
  if (store_->generation_count() != open_.generations ||
      store_->snapshots().size() != open_.snapshots.size())
    return Violate(absl::StrCat("found ", store_->snapshots().size(), " snapshots in ",
                                store_->generation_count(), " generations"));
  for (const auto& [name, kept] : open_.snapshots) {
    const bool lost = lost_snapshots_.count(name) != 0;
    const uint64_t faults_before = drive_->faults_met();
    auto opened = Store::OpenSnapshotOn(
        std::make_unique<TracedDevice>(drive_.get(), &trace_, &places_), name);
    trace_.Add(static_cast<uint64_t>(opened.status().code()));
    if (!opened.ok()) {
      if (!lost && !DamageDone() && drive_->faults_met() == faults_before)
        Violate(absl::StrCat("a lost snapshot: ", opened.status().ToString()));
      continue;
    }
    const CommitInfo& found = (*opened)->committed();
    if (found.sequence != kept->commit.sequence || found.epoch != kept->commit.epoch ||
        found.blob != kept->commit.blob)
      return Violate(absl::StrCat("snapshot ", name, " has another commit"));
    for (size_t extent = 0; extent < ids_.size(); ++extent) {
      const AlignedBytes bytes = Allocate(sizes_[extent]);
      const ReadRequest request{ids_[extent], bytes.get()};
      Stamp stamp;
      std::optional<absl::Status> status;
      (*opened)->Read({&request, 1}, {&stamp, 1}, [&](absl::Status done) { status = done; });
      while (!status) (*opened)->Poll(/*wait=*/false);
      JudgeError(*status, {FaultKind::kReadError, FaultKind::kShortRead, FaultKind::kAgain});
      if (!status->ok()) continue;
      const bool excused = lost || IsDamaged(bytes.get()) || drive_->faults_met() != faults_before;
      JudgeExtent(**opened, *kept, extent, stamp, {bytes.get(), sizes_[extent]}, excused);
    }
    ++result_.snapshots_read;
  }
}

void Simulation::AddFault() {
  static constexpr FaultKind kLoud[] = {FaultKind::kReadError,  FaultKind::kShortRead,
                                        FaultKind::kWriteError, FaultKind::kNoSpace,
                                        FaultKind::kTornWrite,  FaultKind::kAgain,
                                        FaultKind::kFlushError, FaultKind::kBitFlip,
                                        FaultKind::kStaleRead,  FaultKind::kMisdirectedRead};
  static constexpr FaultKind kDamage[] = {FaultKind::kTornWriteSilent, FaultKind::kLostWrite,
                                          FaultKind::kMisdirectedWrite};
  drive_->ClearFaults();
  const uint64_t nth = 1 + random_.Below(16);
  if (!damage_chosen_ && random_.OneIn(6)) {
    damage_chosen_ = true;
    if (random_.OneIn(4)) return Rot();
    return drive_->AddFault({kDamage[random_.Below(std::size(kDamage))], nth});
  }
  const FaultKind kind = kLoud[random_.Below(std::size(kLoud))];
  const bool silent =
      IsOneOf(kind, {FaultKind::kBitFlip, FaultKind::kStaleRead, FaultKind::kMisdirectedRead});
  drive_->AddFault({kind, nth, !silent && random_.OneIn(3)});
}

// Half of the bits that rot are in what leads to the extents.
void Simulation::Rot() {
  const Layout layout = *Layout::Make(spec_);
  const std::span<std::byte> bytes = memory_->bytes();
  const uint64_t head_bytes = layout.BlobOffset(0, 0);
  const uint64_t generations_bytes = layout.file_bytes(open_.generations) - layout.file_bytes();
  const uint64_t offset = generations_bytes > 0 && random_.OneIn(4)
                              ? layout.file_bytes() + random_.Below(generations_bytes)
                          : random_.OneIn(2)
                              ? random_.Below(head_bytes)
                              : layout.PlaceOffset(0) + random_.Below(2 * layout.place_bytes());
  bytes[offset] ^= std::byte(1 << random_.Below(8));
  rotten_offset_ = offset;
  ++result_.rotten_bits;
}

void Simulation::Close(aio::FaultyDevice::Survivors survivors) {
  closing_ = true;
  drive_->PowerCut(survivors);
  store_.reset();
  closing_ = false;
  pending_.clear();
  drive_->RestorePower();
  drive_->ClearFaults();
}

// In order, and without the drive's noticing: what was written stays, faults stay armed.
void Simulation::CloseAndReopen() {
  DrainWrites();
  store_.reset();
  next_.reset();
  Reopen();
}

// A killed process leaves what it had handed to the kernel; a power cut any part of what had not
// been flushed.
void Simulation::Crash() {
  using Survivors = aio::FaultyDevice::Survivors;
  if (cuts_left_ > 0 && random_.OneIn(2)) {
    --cuts_left_;
    ++result_.power_cuts;
    Close(random_.OneIn(8) ? Survivors::kFlushedOnly : Survivors::kRandom);
  } else {
    ++result_.kills;
    Close(Survivors::kAll);
  }
  if (options_.faults && !options_.fault && !DamageDone() && random_.OneIn(3)) AddOpeningFault();
  Reopen();
}

void Simulation::AddOpeningFault() {
  static constexpr FaultKind kKinds[] = {FaultKind::kReadError, FaultKind::kShortRead,
                                         FaultKind::kBitFlip,   FaultKind::kMisdirectedRead,
                                         FaultKind::kStaleRead, FaultKind::kAgain};
  const FaultKind kind = kKinds[random_.Below(std::size(kKinds))];
  const bool loud = IsOneOf(kind, {FaultKind::kReadError, FaultKind::kShortRead});
  const bool rare = IsOneOf(kind, {FaultKind::kWriteError, FaultKind::kTornWrite,
                                   FaultKind::kFlushError});  // there are one or two
  opening_fault_ = aio::Fault{kind, 1 + random_.Below(rare ? 2 : 22), loud && random_.OneIn(3)};
  drive_->AddFault(*opening_fault_);
}

bool Simulation::MayRefuseToOpen() const {
  if (options_.fault) return drive_->faults_met() > faults_met_before_opening_;
  if (drive_->faults_met(FaultKind::kMisdirectedWrite) > 0) return true;
  // A single read that fails is made good by the twin; a flush has none.
  return opening_fault_ &&
         (opening_fault_->persistent || opening_fault_->kind == FaultKind::kAgain);
}

absl::StatusOr<std::unique_ptr<Store>> Simulation::OpenWithoutWriting() {
  const uint64_t writes_before = memory_->counters().writes;
  auto store = Store::OpenOn(std::make_unique<TracedDevice>(drive_.get(), &trace_, &places_));
  const bool interrupted = drive_->is_cut();  // the drive itself writes down what survives
  if (memory_->counters().writes > writes_before + 1 && !interrupted)
    Violate("opening has written more than a superblock");
  trace_.Add(static_cast<uint64_t>(store.status().code()));
  return store;
}

void Simulation::Reopen() {
  ++result_.reopenings;
  std::fill(busy_.begin(), busy_.end(), 0);
  std::fill(uncertain_.begin(), uncertain_.end(), 0);
  faults_met_before_opening_ = drive_->faults_met();
  auto store = OpenWithoutWriting();
  if (!store.ok()) {
    ++result_.refusals_to_open;
    const std::optional<ErrorId> id = ErrorIdOf(store.status());
    if (!MayRefuseToOpen() || (id && id != ErrorId::kStoreDamaged && id != ErrorId::kIo) ||
        (!id && !absl::IsUnavailable(store.status()) && !absl::IsDataLoss(store.status())))
      return Violate(absl::StrCat("refused to open: ", store.status().ToString()));
    if (!opening_fault_ && !options_.fault) {  // the end of this store
      ended_ = true;
      return;
    }
    opening_fault_.reset();
    Close(aio::FaultyDevice::Survivors::kAll);
    return Reopen();
  }
  if (!options_.fault) drive_->ClearFaults();
  store_ = *std::move(store);
  for (const SnapshotInfo& snapshot : store_->snapshots()) {
    if (snapshot.damage.ok()) continue;
    if (!opening_fault_ && !options_.fault && !DamageDone() &&
        lost_snapshots_.count(snapshot.name) == 0)
      Violate(absl::StrCat("a lost snapshot: ", snapshot.name));
    lost_snapshots_.insert(snapshot.name);
  }
  opening_fault_.reset();
  JudgeFound();
}

void Simulation::JudgeFound() {
  const CommitInfo& found = store_->committed();
  trace_.Add(found.sequence);
  const bool is_next = next_ && found.sequence == next_->commit.sequence;
  if (!is_next && found.sequence != committed_.commit.sequence)
    return Violate(
        absl::StrCat("found sequence ", found.sequence, " after ", committed_.commit.sequence));
  if (is_next) {
    committed_ = *std::move(next_);
    ++result_.next_epochs_found;
  }
  next_.reset();
  open_ = committed_;
  if (found.epoch != committed_.commit.epoch || found.blob != committed_.commit.blob)
    return Violate("epoch or blob is not that of the sequence");
  ReadAll();
  JudgeSnapshots();
}

void Simulation::Step() {
  ++result_.operations;
  const bool plain = !options_.faults;
  if (!plain && store_->failed() && random_.OneIn(4)) return Crash();
  if (plain && result_.operations % kOperationsPerOpening == 0) return CloseAndReopen();
  const uint64_t roll = random_.Below(100);
  if (roll < 45) {
    StartWrite();
  } else if (roll < 65) {
    ReadSome();
  } else if (roll < 75) {
    store_->Poll(/*wait=*/false);
  } else if (roll < 80) {
    DrainWrites();
  } else if (roll < 83) {
    ChangeSnapshots(/*may_crash=*/!plain && random_.OneIn(6));
  } else if (roll < 93 || plain) {
    Commit(/*may_crash=*/!plain && random_.OneIn(8));
  } else if (roll < 95) {
    Crash();
  } else {
    AddFault();
  }
}

// Whatever has happened, an opened store has nothing left to repair.
void Simulation::CheckCopies() {
  if (DamageDone() || !lost_snapshots_.empty()) return;
  store_.reset();
  const absl::StatusOr<FsckReport> report = CheckDevice(drive_.get(), "the device", {});
  if (!report.ok()) return Violate(absl::StrCat("fsck: ", report.status().ToString()));
  if (!report->is_clean()) Violate(absl::StrCat("fsck: ", report->findings[0].what));
}

// What is left is a store like any other: it commits, and has committed when it is opened again.
void Simulation::AfterTheScript() {
  if (options_.fault && store_->failed()) {
    ReadAll();
    if (!ended_) Commit(/*may_crash=*/false);
  }
  for (int round = 0; round < 2 && !ended_; ++round) {
    Close(aio::FaultyDevice::Survivors::kAll);
    Reopen();
    if (ended_) return;
    if (round == 1) return CheckCopies();
    StartWrite();
    Commit(/*may_crash=*/false);
    if (next_) Violate("the store that was opened last does not commit");
  }
}

SimulationResult Simulation::Run() {
  Format();
  if (options_.fault) drive_->AddFault(*options_.fault);
  const uint64_t count =
      options_.operation_count != 0 ? options_.operation_count : 200 + random_.Below(801);
  while (!ended_ && result_.operations < count && !(options_.fault && store_->failed())) Step();
  if (!ended_) AfterTheScript();
  if (store_ != nullptr) Close(aio::FaultyDevice::Survivors::kAll);
  for (size_t kind = 0; kind < aio::kFaultKindCount; ++kind)
    result_.faults[kind] = drive_->faults_met(static_cast<FaultKind>(kind));
  result_.device_operations = drive_->started_count();
  result_.trace_hash = trace_.hash();
  return std::move(result_);
}

}  // namespace

uint64_t SimulationResult::faults_met() const {
  uint64_t sum = rotten_bits;
  for (const uint64_t count : faults) sum += count;
  return sum;
}

void SimulationResult::Add(const SimulationResult& other) {
  operations += other.operations;
  device_operations += other.device_operations;
  writes += other.writes;
  reads += other.reads;
  commits += other.commits;
  reopenings += other.reopenings;
  snapshots += other.snapshots;
  snapshots_read += other.snapshots_read;
  growths += other.growths;
  kills += other.kills;
  power_cuts += other.power_cuts;
  next_epochs_found += other.next_epochs_found;
  mismatches_seen += other.mismatches_seen;
  refusals_to_open += other.refusals_to_open;
  rotten_bits += other.rotten_bits;
  for (size_t kind = 0; kind < faults.size(); ++kind) faults[kind] += other.faults[kind];
}

SimulationResult Simulate(const SimulationOptions& options) { return Simulation(options).Run(); }

SimulationResult SimulateEveryFault(uint64_t seed, uint32_t operation_count, FaultKind kind,
                                    bool persistent, uint64_t* positions) {
  SimulationResult sum;
  for (uint64_t nth = 1;; ++nth) {
    const SimulationResult result = Simulate({.seed = seed,
                                              .operation_count = operation_count,
                                              .faults = false,
                                              .fault = aio::Fault{kind, nth, persistent}});
    sum.Add(result);
    if (!result.violation.empty()) {
      sum.violation = absl::StrCat(ToAbsl(aio::FaultName(kind)), persistent ? " for ever" : " once",
                                   " at ", nth, ": ", result.violation);
      return sum;
    }
    if (result.faults_met() == 0) return sum;
    ++*positions;
  }
}

}  // namespace offload::swap

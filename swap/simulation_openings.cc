#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "swap/fsck.h"
#include "swap/simulation.h"

namespace offload::swap {

using aio::FaultKind;

void Simulation::Format() {
  StoreUuid uuid;
  random_.Fill(std::as_writable_bytes(std::span(uuid)));
  open_.generations = static_cast<uint32_t>(random_.Below(kSpareGenerationsMax + 1));
  auto store = Store::CreateOn(std::make_unique<TracedDevice>(drive_.get(), &trace_, &read_ranges_),
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
  const bool loud = kind == FaultKind::kReadError || kind == FaultKind::kShortRead;
  opening_fault_ = aio::Fault{kind, 1 + random_.Below(22), loud && random_.OneIn(3)};
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
  auto store = Store::OpenOn(std::make_unique<TracedDevice>(drive_.get(), &trace_, &read_ranges_));
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
        std::make_unique<TracedDevice>(drive_.get(), &trace_, &read_ranges_), name);
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

// Whatever has happened, an opened store has nothing left to repair.
void Simulation::CheckCopies() {
  if (DamageDone() || !lost_snapshots_.empty()) return;
  store_.reset();
  const absl::StatusOr<FsckReport> report = CheckDevice(drive_.get(), "the device", {});
  if (!report.ok()) return Violate(absl::StrCat("fsck: ", report.status().ToString()));
  if (!report->findings.empty()) Violate(absl::StrCat("fsck: ", report->findings[0].what));
}

}  // namespace offload::swap

#include "swap/simulator.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/string_view.h"
#include "swap/layout.h"
#include "swap/simulation.h"

namespace offload::swap {
namespace {

using aio::FaultKind;

// Of the script of a loop over the n-th fault: each opening reads everything.
constexpr uint64_t kOperationsPerOpening = 80;

// Small extents: the least unit of elements is 32768, so longer tensors have a bit per element.
StoreSpec ChooseSpec(Random& random) {
  StoreSpec spec{.job = "simulated", .extent_elements = 32768};
  for (uint64_t count = 1 + random.Below(3); count > 0; --count) {
    TensorSpec tensor{.element_count = 1 + random.Below(3000)};
    tensor.planes.push_back({Plane::kWeight, random.OneIn(2) ? 16u : 32u});
    if (random.OneIn(2)) tensor.planes.push_back({Plane::kResidual, 16});
    if (random.OneIn(2)) tensor.planes.push_back({Plane::kState0, 32});
    if (random.OneIn(2)) tensor.planes.push_back({Plane::kTies, 1});
    spec.tensors.push_back(std::move(tensor));
  }
  const uint64_t indexes = random.OneIn(8) ? kEntriesPerTablePage : 1 + random.Below(4);
  spec.tensors.push_back({32768 * indexes + random.Below(5000), {{Plane::kWeight, 1}}});
  spec.catalogue.assign(random.Below(3) * 3000, 'c');
  return spec;
}

}  // namespace

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
  const bool silent = kind == FaultKind::kBitFlip || kind == FaultKind::kStaleRead ||
                      kind == FaultKind::kMisdirectedRead;
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

// swap/simulation.h
//
// One run of the simulator: a store over a faulty drive, the script that it goes through, and the
// model that judges it. simulator.cc has the script and its faults, simulation_operations.cc what
// is done with an open store, simulation_openings.cc what is found when one is opened.
//
// Internal to the simulator.
#pragma once

#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "aio/faulty_device.h"
#include "aio/memory_device.h"
#include "base/random.h"
#include "swap/format.h"
#include "swap/simulator.h"
#include "swap/store.h"
#include "swap/traced_device.h"

namespace offload::swap {

inline constexpr uint32_t kSpareGenerationsMax = 2;

struct AlignedFree {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;

inline AlignedBytes Allocate(uint64_t size_bytes) {
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, size_bytes)));
}

// What an extent holds: bytes that follow from `key`, and the stamp of their write. 0: zeros.
struct Content {
  uint64_t key = 0;
  Stamp stamp;
};

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
  // `keeps_open`: what is written since the last commit stays open.
  void RunCommit(State next, bool keeps_open, bool may_crash,
                 const std::function<void(Store::Done)>& start);
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
  void JudgeError(const absl::Status& status, std::initializer_list<aio::FaultKind> causes);
  bool DamageDone() const;
  bool IsDamaged(const void* buffer) const;
  uint64_t Met(std::initializer_list<aio::FaultKind> kinds) const;
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
  ReadRanges read_ranges_;  // of the extents of the last Read()
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
  bool tentative_ = false;          // as all writes of the open epoch are so far
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

template <typename Condition>
bool Simulation::PollUntil(Condition done) {
  constexpr int kPollsMax = 100000;  // what completes nothing any more would need them for ever
  for (int polls = 0; polls < kPollsMax; ++polls) {
    if (done()) return true;
    store_->Poll(/*wait=*/false);
  }
  Violate("a call does not complete");
  std::abort();  // its buffers belong to the device: there is no way on
}

}  // namespace offload::swap

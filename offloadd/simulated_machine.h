// offloadd/simulated_machine.h
//
// A machine whose every answer follows from a seed: its clock stands still until it is moved, its
// threads run what they were given one by one and in an order that the seed chooses, its drive is
// memory that survives kills and power cuts as a drive does.
//
// Thread safety: none.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "aio/faulty_device.h"
#include "base/clock.h"
#include "base/random.h"
#include "offloadd/machine.h"
#include "swap/traced_device.h"

namespace offload::daemon {

// Goes on by a little whenever it is looked at, so that what is under way takes its time, too.
class TickingClock final : public Clock {
 public:
  explicit TickingClock(FakeClock* clock) : clock_(*clock) {}
  int64_t NowNanoseconds() const override {
    clock_.AdvanceNanoseconds(tick_nanoseconds_);
    return clock_.NowNanoseconds();
  }
  void SetTick(int64_t nanoseconds) { tick_nanoseconds_ = nanoseconds; }

 private:
  FakeClock& clock_;
  int64_t tick_nanoseconds_ = 0;
};

class SimulatedMachine final : public Machine {
 public:
  static constexpr uint32_t kGenerationsMax = 2;  // that the drive has room for

  SimulatedMachine(Random* random, swap::Trace* trace) : random_(*random), trace_(*trace) {}

  // Runs one of the functions that wait for a thread; false when there is none.
  bool RunOne();
  FakeClock& fake_clock() { return clock_; }
  // How long a look at the clock takes.
  void SetTick(int64_t nanoseconds) { ticking_.SetTick(nanoseconds); }
  // How slow the drive is (FaultyDevice).
  void SetPollsPerCompletion(uint32_t polls);
  void SetScratchBytes(uint64_t bytes) { scratch_bytes_ = bytes; }
  // What a job that is opened finds of the pool and the processor.
  void SetRates(const swap::PoolRates& rates, uint32_t cores) {
    rates_ = rates;
    cores_ = cores;
  }
  void SetReplanOptions(const ReplanOptions& options) { replan_options_ = options; }

  // Null before a store was made.
  aio::FaultyDevice* drive() { return drive_.get(); }
  bool has_store() const { return has_store_; }
  // What a kill leaves of a store that never got its name.
  void DropUnnamedStore();
  // The committed store, or what a snapshot of it holds, for a judge.
  absl::StatusOr<std::unique_ptr<swap::Store>> OpenToRead(const std::string& snapshot = "");

  const Clock& clock() const override { return ticking_; }
  int64_t NowUnixSeconds() const override { return 1'800'000'000; }
  bool RunsLoops() const override { return false; }
  uint32_t cores() const override { return cores_; }
  swap::PoolRates MeasurePool(const std::string& pool, const aio::OpenOptions& io) override {
    return rates_;
  }
  ReplanOptions replan_options() const override { return replan_options_; }
  Placement PlacementFor(const CpuList& processors, bool is_private) override { return {}; }
  void RunThreadOn(const CpuList& processors) override {}
  Executor MakeExecutor(size_t thread_count, const std::string& name) override;
  absl::StatusOr<proto::SharedMemory> CreateMemory(const std::string& name, uint64_t size_bytes,
                                                   const Placement& placement) override;
  absl::Status CheckPool(const std::string& pool) override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<swap::Store>> OpenStore(
      const std::string& pool, const std::string& job, const swap::StoreOptions& options) override;
  absl::StatusOr<std::unique_ptr<swap::Store>> CreateStore(
      const std::string& pool, const swap::StoreSpec& spec,
      const swap::StoreOptions& options) override;
  absl::Status PublishStore(swap::Store& store) override;
  absl::StatusOr<std::unique_ptr<swap::Scratch>> CreateScratch(
      const std::string& pool, swap::ScratchOptions options) override;

 private:
  struct Work {
    uint64_t executor = 0;
    std::function<void()> work;
  };
  std::unique_ptr<aio::Device> Traced();

  Random& random_;
  swap::Trace& trace_;
  swap::ReadRanges read_ranges_;
  FakeClock clock_;
  TickingClock ticking_{&clock_};
  std::deque<Work> work_;
  uint64_t executors_ = 0;
  uint64_t scratch_bytes_ = 0;
  uint32_t polls_per_completion_ = 1;
  swap::PoolRates rates_;
  uint32_t cores_ = 2;
  ReplanOptions replan_options_;
  std::unique_ptr<aio::FaultyDevice> drive_;
  bool has_store_ = false;
};

}  // namespace offload::daemon

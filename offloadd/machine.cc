#include "offloadd/machine.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "base/worker_pool.h"
#include "offloadd/environment.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

constexpr double kAssumedLatencySeconds = 1e-4;

class RealMachine final : public Machine {
 public:
  const Clock& clock() const override { return Clock::Real(); }
  int64_t NowUnixSeconds() const override { return std::time(nullptr); }
  bool RunsLoops() const override { return true; }
  Placement PlacementFor(const CpuList& processors, bool is_private) override {
    return Place(nodes_, own_processors_, processors, is_private);
  }
  void RunThreadOn(const CpuList& processors) override {
    if (!RunOn(processors))
      spdlog::warn("no thread can run on processors {}", FormatCpuList(processors));
  }
  Executor MakeExecutor(size_t thread_count, const std::string& name) override {
    return [pool = std::make_shared<WorkerPool>(thread_count, name)](std::function<void()> work) {
      pool->Post(std::move(work));
    };
  }
  absl::StatusOr<proto::SharedMemory> CreateMemory(const std::string& name, uint64_t size_bytes,
                                                   const Placement& placement) override {
    OFFLOAD_ASSIGN_OR_RETURN(proto::SharedMemory memory,
                             proto::SharedMemory::Create(name, size_bytes));
    if (placement.nodes.empty()) return memory;
    if (const absl::Status placed = memory.PlaceOn(placement.nodes); !placed.ok())
      spdlog::warn("{}: {}", name, ToStd(placed.message()));
    return memory;
  }
  uint32_t cores() const override { return std::thread::hardware_concurrency(); }
  // OFFLOADD_REPLAN: bytes that a judgement needs; 0: nothing is replanned. OFFLOADD_REPLAN_STEPS:
  // steps, too.
  ReplanOptions replan_options() const override {
    ReplanOptions options;
    options.bytes = NumberFrom("OFFLOADD_REPLAN", options.bytes);
    options.steps = static_cast<uint32_t>(
        std::clamp(NumberFrom("OFFLOADD_REPLAN_STEPS", options.steps), 1.0, 1e6));
    options.busy_bytes =
        static_cast<uint64_t>(std::min(options.bytes, static_cast<double>(options.busy_bytes)));
    return options;
  }
  // OFFLOADD_POOL_READ, OFFLOADD_POOL_WRITE: bytes per second that are assumed instead, and with
  // both of them an ordinary drive's latency.
  swap::PoolRates MeasurePool(const std::string& pool, const aio::OpenOptions& io) override {
    const double read = NumberFrom("OFFLOADD_POOL_READ", 0);
    const double write = NumberFrom("OFFLOADD_POOL_WRITE", 0);
    if (read > 0 && write > 0) return {read, write, kAssumedLatencySeconds};
    swap::PoolRates rates = MeasureOnce(pool, io);
    if (read > 0) rates.read_bytes_per_second = read;
    if (write > 0) rates.write_bytes_per_second = write;
    return rates;
  }
  absl::Status CheckPool(const std::string& pool) override { return swap::CheckPool(pool); }
  absl::StatusOr<std::unique_ptr<swap::Store>> OpenStore(
      const std::string& pool, const std::string& job, const swap::StoreOptions& options) override {
    return swap::Store::Open(pool, job, options);
  }
  absl::StatusOr<std::unique_ptr<swap::Store>> CreateStore(
      const std::string& pool, const swap::StoreSpec& spec,
      const swap::StoreOptions& options) override {
    return swap::Store::Create(pool, spec, options);
  }
  absl::Status PublishStore(swap::Store& store) override { return store.Publish(); }
  absl::StatusOr<std::unique_ptr<swap::Scratch>> CreateScratch(
      const std::string& pool, swap::ScratchOptions options) override {
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
    return swap::Scratch::Create(pools, std::move(options));
  }

 private:
  // Two jobs that ask for one pool at once do not measure beside each other.
  swap::PoolRates MeasureOnce(const std::string& pool, const aio::OpenOptions& io) {
    std::lock_guard lock(mutex_);
    const auto known = rates_.find(pool);
    if (known != rates_.end()) return known->second;
    const absl::StatusOr<swap::PoolRates> rates = swap::MeasurePool(pool, io);
    if (!rates.ok()) {
      spdlog::info("pool {}: not measured: {}", pool, ToStd(rates.status().message()));
      return {};
    }
    spdlog::info("pool {}: reads {:.2f} GB/s, writes {:.2f} GB/s, {:.0f} us", pool,
                 rates->read_bytes_per_second * 1e-9, rates->write_bytes_per_second * 1e-9,
                 rates->latency_seconds * 1e6);
    return rates_[pool] = *rates;
  }

  // None that memory could be placed on, where the daemon's user has said where it lies (numactl).
  const std::vector<NumaNode> nodes_ =
      HasMemoryPolicy() ? std::vector<NumaNode>() : UsableNumaNodes();
  const CpuList own_processors_ = ProcessorsOf(::getpid());
  std::mutex mutex_;
  std::map<std::string, swap::PoolRates> rates_;  // by pool; guarded by mutex_
};

}  // namespace

Machine& Machine::Real() {
  static RealMachine machine;
  return machine;
}

}  // namespace offload::daemon

#include "offloadd/machine.h"

#include <ctime>
#include <utility>

#include "base/status_macros.h"
#include "base/worker_pool.h"

namespace offload::daemon {
namespace {

class RealMachine final : public Machine {
 public:
  const Clock& clock() const override { return Clock::Real(); }
  int64_t NowUnixSeconds() const override { return std::time(nullptr); }
  bool RunsLoops() const override { return true; }
  Executor MakeExecutor(size_t thread_count, const std::string& name) override {
    return [pool = std::make_shared<WorkerPool>(thread_count, name)](std::function<void()> work) {
      pool->Post(std::move(work));
    };
  }
  absl::StatusOr<proto::SharedMemory> CreateMemory(const std::string& name,
                                                   uint64_t size_bytes) override {
    return proto::SharedMemory::Create(name, size_bytes);
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
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, swap::SplitPools(pool));
    return swap::Scratch::Create(pools, std::move(options));
  }
};

}  // namespace

Machine& Machine::Real() {
  static RealMachine machine;
  return machine;
}

}  // namespace offload::daemon

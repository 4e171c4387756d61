// offloadd/machine.h
//
// What a job needs of the machine that it runs on: time, threads, memory that is shared with its
// ranks, files. The daemon's jobs run on the real one; a simulator brings one whose every answer
// follows from a seed.
//
// Thread safety: of the real one, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/cpu_list.h"
#include "offloadd/placement.h"
#include "offloadd/replan_policy.h"
#include "proto/shared_memory.h"
#include "swap/pool_rates.h"
#include "swap/scratch.h"
#include "swap/store.h"

namespace offload::daemon {

// Runs what it is given on threads of its own. The last copy of it runs, before it is gone, all
// that still waits.
using Executor = std::function<void(std::function<void()> work)>;

class Machine {
 public:
  virtual ~Machine() = default;
  // Lives for ever.
  static Machine& Real();

  virtual const Clock& clock() const = 0;
  virtual int64_t NowUnixSeconds() const = 0;
  // False: who makes a job runs its loop (EventLoop::RunOnce), too.
  virtual bool RunsLoops() const = 0;
  // Place() on this machine.
  virtual Placement PlacementFor(const CpuList& processors, bool is_private) = 0;
  // The calling thread, and threads and executors that it makes from now on, run on these, as far
  // as the kernel allows.
  virtual void RunThreadOn(const CpuList& processors) = 0;
  virtual Executor MakeExecutor(size_t thread_count, const std::string& name) = 0;
  // On the placement's nodes, as far as the kernel can.
  virtual absl::StatusOr<proto::SharedMemory> CreateMemory(const std::string& name,
                                                           uint64_t size_bytes,
                                                           const Placement& placement) = 0;

  // Cores that the process may run on.
  virtual uint32_t cores() const = 0;
  // As swap::MeasurePool, once for a pool; zeros when it cannot be measured. Off the loop.
  virtual swap::PoolRates MeasurePool(const std::string& pool, const aio::OpenOptions& io) = 0;

  // When what was measured is replaced by what steps show; a judgement of no bytes: never.
  virtual ReplanOptions replan_options() const = 0;

  // As swap::CheckPool, Store::Open, Store::Create, Store::Publish and Scratch::Create.
  virtual absl::Status CheckPool(const std::string& pool) = 0;
  virtual absl::StatusOr<std::unique_ptr<swap::Store>> OpenStore(
      const std::string& pool, const std::string& job, const swap::StoreOptions& options) = 0;
  virtual absl::StatusOr<std::unique_ptr<swap::Store>> CreateStore(
      const std::string& pool, const swap::StoreSpec& spec, const swap::StoreOptions& options) = 0;
  virtual absl::Status PublishStore(swap::Store& store) = 0;
  virtual absl::StatusOr<std::unique_ptr<swap::Scratch>> CreateScratch(
      const std::string& pool, swap::ScratchOptions options) = 0;
};

}  // namespace offload::daemon

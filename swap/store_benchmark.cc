// How fast the store moves a step's bytes: reads, writes, and the mix of an update (read 12 bytes
// per parameter, write 12). The argument says whether checksums are taken, all on the one thread
// that polls. Compare with fio in the same folder, in turns:
//
//   fio --name=x --filename=$POOL/fio --size=576m --bs=1m --iodepth=16 --ioengine=io_uring
//   --direct=1 --rw=read|write|rw
//
// The pool is the environment variable OFFLOADD_BENCHMARK_POOL, else the working directory.

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "base/check.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

constexpr uint32_t kExtentElements = 256 * 1024;  // 3 MiB in four planes
constexpr uint32_t kExtentCount = 96;
constexpr size_t kTasks = 6;  // 18 MiB in flight
constexpr Plane kPlanes[] = {Plane::kWeight, Plane::kResidual, Plane::kState0, Plane::kState1};

// One extent index in all its planes, on its way through the store.
struct Task {
  Task() : memory(Buffer(kExtentElements * 12)) {}
  MappedRegion memory;
  uint32_t index = 0;
  std::array<Stamp, std::size(kPlanes)> stamps;
};

class Bench {
 public:
  explicit Bench(bool checksums) : checksums_(checksums) {
    const char* pool = std::getenv("OFFLOADD_BENCHMARK_POOL");
    const StoreSpec spec{
        .job = "benchmark",
        .extent_elements = kExtentElements,
        .tensors = {{uint64_t{kExtentElements} * kExtentCount,
                     {{kPlanes[0], 16}, {kPlanes[1], 16}, {kPlanes[2], 32}, {kPlanes[3], 32}}}},
        .catalogue = ""};
    auto store = Store::Create(pool != nullptr ? pool : ".", spec, {});
    OFFLOAD_CHECK_OK(store);
    store_ = *std::move(store);
    for (Task& task : tasks_) FillExtent({}, 1, task.memory.span());
    Sweep(/*reads=*/false, /*writes=*/true, /*checksums=*/true);
  }

  // Takes all extents through the store once, kTasks at a time, and commits what was written.
  void Sweep(bool reads, bool writes, bool checksums) {
    reads_ = reads, writes_ = writes, take_ = checksums;
    next_index_ = 0;
    busy_ = 0;
    for (Task& task : tasks_) Begin(&task);
    while (busy_ > 0) store_->Poll(true);
    if (!writes) return;
    OFFLOAD_CHECK_OK(CommitNow(*store_, 1, ""));
  }
  void Sweep(bool reads, bool writes) { Sweep(reads, writes, checksums_); }
  static constexpr int64_t kSweepBytes = int64_t{kExtentElements} * 12 * kExtentCount;

 private:
  template <typename Visit>
  void ForEachPlane(Task* task, Visit visit) {
    std::byte* at = task->memory.data();
    for (size_t i = 0; i < std::size(kPlanes); ++i) {
      const ExtentId id{0, kPlanes[i], task->index};
      visit(i, id, std::span<std::byte>(at, store_->ExtentBytes(id)));
      at += store_->ExtentBytes(id);
    }
  }

  void Begin(Task* task) {
    if (next_index_ == kExtentCount) return;
    task->index = next_index_++;
    ++busy_;
    reads_ ? Read(task) : Write(task);
  }

  void Read(Task* task) {
    std::array<ReadRequest, std::size(kPlanes)> requests;
    ForEachPlane(task, [&](size_t i, const ExtentId& id, std::span<std::byte> bytes) {
      requests[i] = {id, bytes.data()};
    });
    store_->Read(requests, task->stamps, [this, task](absl::Status status) {
      OFFLOAD_CHECK_OK(status);
      ForEachPlane(task, [&](size_t i, const ExtentId& id, std::span<std::byte> bytes) {
        OFFLOAD_CHECK(!take_ || store_->Verify(id, task->stamps[i], bytes)) << "index " << id.index;
      });
      writes_ ? Write(task) : End(task);
    });
  }

  void Write(Task* task) {
    std::array<WriteRequest, std::size(kPlanes)> requests;
    ForEachPlane(task, [&](size_t i, const ExtentId& id, std::span<std::byte> bytes) {
      Checksum checksum = store_->StartChecksum(id, store_->open_sequence());
      if (take_) checksum.Update(bytes);
      requests[i] = {id, bytes.data(), checksum.Finish()};
    });
    store_->Write(requests, [this, task](absl::Status status) {
      OFFLOAD_CHECK_OK(status);
      End(task);
    });
  }

  void End(Task* task) {
    --busy_;
    Begin(task);
  }

  const bool checksums_;
  std::unique_ptr<Store> store_;
  std::array<Task, kTasks> tasks_;
  bool reads_ = false, writes_ = false, take_ = false;
  uint32_t next_index_ = 0;
  size_t busy_ = 0;
};

void Run(benchmark::State& state, bool reads, bool writes) {
  Bench bench(state.range(0) != 0);
  for (auto _ : state) bench.Sweep(reads, writes);
  state.SetBytesProcessed(state.iterations() * Bench::kSweepBytes * (reads + writes));
}

void BM_Read(benchmark::State& state) { Run(state, true, false); }
void BM_Write(benchmark::State& state) { Run(state, false, true); }
void BM_Update(benchmark::State& state) { Run(state, true, true); }

BENCHMARK(BM_Read)->ArgName("checksums")->Arg(0)->Arg(1)->UseRealTime()->Iterations(4);
BENCHMARK(BM_Write)->ArgName("checksums")->Arg(0)->Arg(1)->UseRealTime()->Iterations(4);
BENCHMARK(BM_Update)->ArgName("checksums")->Arg(0)->Arg(1)->UseRealTime()->Iterations(4);

}  // namespace
}  // namespace offload::swap

BENCHMARK_MAIN();

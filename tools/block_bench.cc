#include "tools/block_bench.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "base/worker_pool.h"
#include "proto/shared_memory.h"
#include "swap/store.h"

namespace offload::tools {
namespace {

constexpr uint64_t kBlockBytesMin = 4096, kBlockBytesMax = 16 << 20;
constexpr uint32_t kExtentElementsMin = 32768;
constexpr uint64_t kReadsPerExtraRead = 6;
// Of the store beside those on their way to or from the drive: blocks whose checksum is taken.
constexpr uint64_t kChecksumBlocks = 4;

// What comes back from the thread is run on the polling one.
class Worker {
 public:
  Worker() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), pool_(1, "checksums") {}

  void Compute(std::function<void()> work, std::function<void()> done) {
    pool_.Post([this, work = std::move(work), done = std::move(done)]() mutable {
      work();
      std::lock_guard lock(mutex_);
      done_.push_back(std::move(done));
      OFFLOAD_CHECK(::eventfd_write(event_.get(), 1) == 0);
    });
  }
  size_t Poll() {
    std::vector<std::function<void()>> ready;
    {
      std::lock_guard lock(mutex_);
      eventfd_t count = 0;
      if (!done_.empty()) OFFLOAD_CHECK(::eventfd_read(event_.get(), &count) == 0);
      ready.swap(done_);
    }
    for (auto& done : ready) done();
    return ready.size();
  }
  int event_fd() const { return event_.get(); }

 private:
  UniqueFd event_;
  std::mutex mutex_;
  std::vector<std::function<void()>> done_;  // guarded by mutex_
  WorkerPool pool_;                          // last: its thread uses the members above
};

// Where blocks are: the store or the device.
class Target {
 public:
  using Done = std::function<void(absl::Status)>;
  virtual ~Target() = default;
  virtual void Read(uint64_t index, std::byte* bytes, Done done) = 0;
  virtual void Write(uint64_t index, std::byte* bytes, Done done) = 0;
  virtual void Finish(Done done) = 0;
  virtual size_t Poll() = 0;
  virtual std::pair<int, int> event_fds() const = 0;
};

class StoreTarget final : public Target {
 public:
  StoreTarget(swap::Store* store, Worker* worker, uint64_t block_bytes)
      : store_(store), worker_(worker), block_bytes_(block_bytes) {}

  void Read(uint64_t index, std::byte* bytes, Done done) override {
    const swap::ExtentId id = IdOf(index);
    const swap::ReadRequest request = {id, bytes};
    auto stamp = std::make_shared<swap::Stamp>();
    swap::Stamp* const place = stamp.get();
    store_->Read({&request, 1}, {place, 1},
                 [this, id, bytes, stamp, done = std::move(done)](absl::Status status) {
                   if (!status.ok()) return done(std::move(status));
                   auto good = std::make_shared<bool>(false);
                   Compute(
                       [this, id, bytes, stamp, good] {
                         *good = store_->Verify(id, *stamp, {bytes, block_bytes_});
                       },
                       [good, done] {
                         done(*good ? absl::OkStatus()
                                    : MakeError(ErrorId::kChecksum, "a block of the benchmark"));
                       });
                 });
  }

  void Write(uint64_t index, std::byte* bytes, Done done) override {
    const swap::ExtentId id = IdOf(index);
    auto crc = std::make_shared<uint32_t>(0);
    Compute(
        [this, id, bytes, crc] {
          swap::Checksum checksum = store_->StartChecksum(id, store_->open_sequence());
          checksum.Update({bytes, block_bytes_});
          *crc = checksum.Finish();
        },
        [this, id, bytes, crc, done = std::move(done)] {
          const swap::WriteRequest request = {id, bytes, *crc};
          store_->Write({&request, 1}, done);
        });
  }

  void Finish(Done done) override {
    if (!store_->has_uncommitted_writes()) return done(absl::OkStatus());
    store_->Commit(store_->committed().epoch + 1, "", std::move(done));
  }
  size_t Poll() override {
    return store_->Poll(false) + (worker_ != nullptr ? worker_->Poll() : 0);
  }
  std::pair<int, int> event_fds() const override {
    return {store_->event_fd(), worker_ != nullptr ? worker_->event_fd() : -1};
  }

 private:
  swap::ExtentId IdOf(uint64_t index) const {
    return {0, store_->spec().tensors[0].planes[0].plane, static_cast<uint32_t>(index)};
  }
  void Compute(std::function<void()> work, std::function<void()> done) {
    if (worker_ != nullptr) return worker_->Compute(std::move(work), std::move(done));
    work();
    done();
  }

  swap::Store* store_;
  Worker* worker_;  // null: checksums are taken at once
  const uint64_t block_bytes_;
};

// Reads from one half of the file and writes to the other, which trade places after each run.
class DeviceTarget final : public Target {
 public:
  DeviceTarget(aio::Device* device, uint64_t block_bytes, uint64_t data_bytes, bool* second_half)
      : device_(device),
        block_bytes_(block_bytes),
        read_offset_bytes_(*second_half ? data_bytes : 0),
        write_offset_bytes_(*second_half ? 0 : data_bytes) {
    *second_half = !*second_half;
  }
  void Read(uint64_t index, std::byte* bytes, Done done) override {
    const iovec piece = {bytes, block_bytes_};
    device_->Read(read_offset_bytes_ + index * block_bytes_, {&piece, 1}, std::move(done));
  }
  void Write(uint64_t index, std::byte* bytes, Done done) override {
    const iovec piece = {bytes, block_bytes_};
    device_->Write(write_offset_bytes_ + index * block_bytes_, {&piece, 1}, std::move(done));
  }
  void Finish(Done done) override { device_->Flush(std::move(done)); }
  size_t Poll() override { return device_->Poll(false); }
  std::pair<int, int> event_fds() const override { return {device_->event_fd(), -1}; }

 private:
  aio::Device* device_;
  const uint64_t block_bytes_, read_offset_bytes_, write_offset_bytes_;
};

// One run of a pattern: as many blocks under way as there are buffers.
class Run {
 public:
  Run(Target& target, BlockBench::Pattern pattern, uint64_t block_count, uint64_t block_bytes)
      : target_(target), pattern_(pattern), block_count_(block_count), block_bytes_(block_bytes) {}

  absl::StatusOr<double> For(double seconds, std::span<std::byte> buffers) {
    const double begin = Clock::Real().NowSeconds();
    end_ = begin + seconds;
    for (size_t at = 0; at < buffers.size(); at += block_bytes_) Next(buffers.data() + at);
    PollUntilIdle();
    ++busy_;
    target_.Finish([this](absl::Status status) { Ended(std::move(status)); });
    PollUntilIdle();
    OFFLOAD_RETURN_IF_ERROR(status_);
    const double taken = Clock::Real().NowSeconds() - begin;
    return static_cast<double>(transfers_ * block_bytes_) / std::max(taken, 1e-9);
  }

 private:
  using Pattern = BlockBench::Pattern;

  void Next(std::byte* bytes) {
    if (!status_.ok() || Clock::Real().NowSeconds() >= end_) return;
    const uint64_t number = next_++, index = number % block_count_;
    ++busy_;
    if (pattern_ == Pattern::kWrite) return Write(index, bytes);
    const bool twice = pattern_ == Pattern::kMixed && number % kReadsPerExtraRead == 0;
    Read(index, bytes, twice ? 2 : 1);
  }
  void Read(uint64_t index, std::byte* bytes, int times) {
    target_.Read(index, bytes, [this, index, bytes, times](absl::Status status) {
      ++transfers_;
      if (!status.ok() || pattern_ == Pattern::kRead) return Done(bytes, std::move(status));
      times > 1 ? Read(index, bytes, times - 1) : Write(index, bytes);
    });
  }
  void Write(uint64_t index, std::byte* bytes) {
    target_.Write(index, bytes, [this, bytes](absl::Status status) {
      ++transfers_;
      Done(bytes, std::move(status));
    });
  }
  void Done(std::byte* bytes, absl::Status status) {
    Ended(std::move(status));
    Next(bytes);
  }
  void Ended(absl::Status status) {
    --busy_;
    if (status_.ok()) status_ = std::move(status);
  }
  void PollUntilIdle() {
    const auto [first, second] = target_.event_fds();
    while (busy_ > 0) {
      if (target_.Poll() > 0) continue;
      pollfd waiters[] = {{first, POLLIN, 0}, {second, POLLIN, 0}};
      ::poll(waiters, 2, -1);
    }
  }

  Target& target_;
  const Pattern pattern_;
  const uint64_t block_count_, block_bytes_;
  double end_ = 0;
  uint64_t next_ = 0, transfers_ = 0, busy_ = 0;
  absl::Status status_;
};

swap::StoreSpec SpecOf(const BlockBenchOptions& options) {
  const auto bits =
      static_cast<uint32_t>(std::min<uint64_t>(32, options.block_bytes * 8 / kExtentElementsMin));
  swap::StoreSpec spec;
  spec.job = absl::StrCat("block-bench-", ::getpid());
  spec.extent_elements = static_cast<uint32_t>(options.block_bytes * 8 / bits);
  spec.tensors = {{spec.extent_elements * (options.data_bytes / options.block_bytes),
                   {{swap::Plane::kWeight, bits}}}};
  return spec;
}

// With a name where others are to use it, too.
absl::StatusOr<UniqueFd> MakeScratchFile(const BlockBenchOptions& options) {
  constexpr int kFlags = O_RDWR | O_DIRECT | O_CLOEXEC;
  const std::string& path = options.scratch_path;
  UniqueFd file(path.empty() ? ::open(options.pool.c_str(), O_TMPFILE | kFlags, 0600)
                             : ::open(path.c_str(), O_CREAT | O_EXCL | kFlags, 0600));
  const auto size_bytes = static_cast<off_t>(2 * options.data_bytes);
  const int error = file.valid() ? ::posix_fallocate(file.get(), 0, size_bytes) : errno;
  if (error == 0) return file;
  return MakeError(ErrorId::kPoolNotUsable, absl::StrCat("a scratch file in ", options.pool, " ",
                                                         path, ": ", ErrnoText(error)));
}

}  // namespace

struct BlockBench::Impl {
  BlockBenchOptions options;
  proto::SharedMemory memory;  // as the daemon's slab
  std::span<std::byte> buffers;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<swap::Store> store;  // never published: its file goes with it
  std::unique_ptr<aio::Device> device;
  bool second_half = false;

  uint64_t block_count() const { return options.data_bytes / options.block_bytes; }
  absl::StatusOr<double> RunOn(Target& target, Pattern pattern, double seconds,
                               uint64_t blocks_under_way) {
    return Run(target, pattern, block_count(), options.block_bytes)
        .For(seconds, buffers.first(blocks_under_way * options.block_bytes));
  }
  absl::Status Open();
  absl::Status Fill();
};

absl::Status BlockBench::Impl::Open() {
  const uint64_t buffers_bytes =
      AlignUp((options.depth + kChecksumBlocks) * options.block_bytes, kHugePageBytes);
  OFFLOAD_ASSIGN_OR_RETURN(memory, proto::SharedMemory::Create("block_bench", buffers_bytes));
  OFFLOAD_RETURN_IF_ERROR(memory.Allocate(0, buffers_bytes));
  buffers = {memory.data(), buffers_bytes};
  Random(/*seed=*/1).Fill(buffers);  // drives may compress, or leave zeros out
  if (options.checksums_on_thread) worker = std::make_unique<Worker>();
  const aio::OpenOptions io = {
      .engine = options.engine, .queue_depth = options.depth, .thread_count = options.depth};
  OFFLOAD_ASSIGN_OR_RETURN(store, swap::Store::Create(options.pool, SpecOf(options), {.io = io}));
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, MakeScratchFile(options));
  OFFLOAD_ASSIGN_OR_RETURN(device, aio::OpenDevice(file.release(), io));
  if (!options.registers_buffers) return absl::OkStatus();
  store->RegisterBuffer(buffers);
  device->RegisterBuffer(buffers);
  return absl::OkStatus();
}

// Both places of every block, because what was never written is not read from the drive.
absl::Status BlockBench::Impl::Fill() {
  for (int place = 0; place < 2; ++place) {
    DeviceTarget bare(device.get(), options.block_bytes, options.data_bytes, &second_half);
    StoreTarget safe(store.get(), nullptr, options.block_bytes);
    for (Target* target : {static_cast<Target*>(&bare), static_cast<Target*>(&safe)}) {
      absl::Status first_error;
      uint64_t left = block_count();
      for (uint64_t index = 0; index < block_count(); ++index) {
        target->Write(index, buffers.data(), [&](absl::Status status) {
          --left;
          if (first_error.ok()) first_error = std::move(status);
        });
      }
      while (left > 0) target->Poll();
      OFFLOAD_RETURN_IF_ERROR(first_error);
      bool finished = false;
      target->Finish([&](absl::Status status) {
        finished = true;
        first_error = std::move(status);
      });
      while (!finished) target->Poll();
      OFFLOAD_RETURN_IF_ERROR(first_error);
    }
  }
  return absl::OkStatus();
}

BlockBench::BlockBench(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BlockBench::~BlockBench() = default;

absl::StatusOr<std::unique_ptr<BlockBench>> BlockBench::Make(const BlockBenchOptions& options) {
  if (!std::has_single_bit(options.block_bytes) || options.block_bytes < kBlockBytesMin ||
      options.block_bytes > kBlockBytesMax || options.data_bytes < options.block_bytes ||
      options.depth == 0) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("blocks of ", FormatBytes(options.block_bytes), " in ",
                                  FormatBytes(options.data_bytes)),
                     "Use a power of two from 4KiB to 16MiB, and at least one block");
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  OFFLOAD_RETURN_IF_ERROR(impl->Open());
  OFFLOAD_RETURN_IF_ERROR(impl->Fill());
  return std::unique_ptr<BlockBench>(new BlockBench(std::move(impl)));
}

absl::StatusOr<double> BlockBench::RunStore(Pattern pattern, double seconds) {
  StoreTarget target(impl_->store.get(), impl_->worker.get(), impl_->options.block_bytes);
  const uint64_t extra = impl_->worker != nullptr ? kChecksumBlocks : 0;
  return impl_->RunOn(target, pattern, seconds, impl_->options.depth + extra);
}

absl::StatusOr<double> BlockBench::RunDevice(Pattern pattern, double seconds) {
  DeviceTarget target(impl_->device.get(), impl_->options.block_bytes, impl_->options.data_bytes,
                      &impl_->second_half);
  return impl_->RunOn(target, pattern, seconds, impl_->options.depth);
}

std::string BlockBench::engine() const { return std::string(impl_->device->engine()); }

}  // namespace offload::tools

#include "tools/drive_benchmark.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <functional>
#include <limits>
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
    swap::Stamp* const stamps = stamp.get();
    store_->Read({&request, 1}, {stamps, 1},
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

class DeviceTarget final : public Target {
 public:
  DeviceTarget(aio::Device* device, uint64_t block_bytes, uint64_t read_offset_bytes,
               uint64_t write_offset_bytes)
      : device_(device),
        block_bytes_(block_bytes),
        read_offset_bytes_(read_offset_bytes),
        write_offset_bytes_(write_offset_bytes) {}

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
class BlockRun {
 public:
  BlockRun(Target& target, DriveBenchmark::Pattern pattern, uint64_t block_count,
           uint64_t block_bytes)
      : target_(target), pattern_(pattern), block_count_(block_count), block_bytes_(block_bytes) {}

  // Ends after the last block.
  BlockRun& Once() {
    limit_ = block_count_;
    return *this;
  }
  uint64_t transfers() const { return transfers_; }

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
  using Pattern = DriveBenchmark::Pattern;

  void Next(std::byte* bytes) {
    if (!status_.ok() || next_ == limit_ || Clock::Real().NowSeconds() >= end_) return;
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
  uint64_t limit_ = UINT64_MAX;
  uint64_t next_ = 0, transfers_ = 0, busy_ = 0;
  absl::Status status_;
};

uint64_t BlocksIn(const DriveBenchmarkOptions& options) {
  return options.file_bytes / 2 / options.block_bytes;
}

swap::StoreSpec SpecOf(const DriveBenchmarkOptions& options) {
  const auto bits =
      static_cast<uint32_t>(std::min<uint64_t>(32, options.block_bytes * 8 / kExtentElementsMin));
  swap::StoreSpec spec;
  spec.job = absl::StrCat("drive-benchmark-", ::getpid());
  spec.extent_elements = static_cast<uint32_t>(options.block_bytes * 8 / bits);
  spec.tensors = {{spec.extent_elements * BlocksIn(options), {{swap::Plane::kWeight, bits}}}};
  return spec;
}

absl::StatusOr<UniqueFd> MakeScratchFile(const DriveBenchmarkOptions& options) {
  OFFLOAD_RETURN_IF_ERROR(swap::CheckPool(options.pool));
  struct statvfs space = {};
  const uint64_t free_bytes =
      ::statvfs(options.pool.c_str(), &space) == 0 ? space.f_bavail * space.f_frsize : 0;
  if (free_bytes < options.file_bytes) {
    return MakeError(
        ErrorId::kPoolFull,
        absl::StrCat("a scratch file of ", FormatDecimalBytes(options.file_bytes), " in ",
                     options.pool, ", where ", FormatDecimalBytes(free_bytes), " are free"));
  }
  constexpr int kFlags = O_RDWR | O_DIRECT | O_CLOEXEC;
  const std::string& path = options.scratch_path;
  UniqueFd file(path.empty() ? ::open(options.pool.c_str(), O_TMPFILE | kFlags, 0600)
                             : ::open(path.c_str(), O_CREAT | O_EXCL | kFlags, 0600));
  const auto size_bytes = static_cast<off_t>(options.file_bytes);
  const int error = file.valid() ? ::posix_fallocate(file.get(), 0, size_bytes) : errno;
  if (error == 0) return file;
  return MakeError(
      error == ENOSPC ? ErrorId::kPoolFull : ErrorId::kPoolNotUsable,
      absl::StrCat("a scratch file in ", options.pool, " ", path, ": ", ErrnoText(error)));
}

}  // namespace

struct DriveBenchmark::Impl {
  DriveBenchmarkOptions options;
  proto::SharedMemory memory;  // as the daemon's slab
  std::span<std::byte> buffers;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<swap::Store> store;  // never published: its file goes with it
  std::unique_ptr<aio::Device> device;
  uint64_t block_count = 0;
  bool reads_second_half = false;

  std::span<std::byte> Buffers(uint64_t count) const {
    return buffers.first(count * options.block_bytes);
  }
  absl::Status Open();
  absl::Status Fill();
};

absl::Status DriveBenchmark::Impl::Open() {
  const uint64_t buffers_bytes =
      AlignUp((options.depth + kChecksumBlocks) * options.block_bytes, kHugePageBytes);
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, MakeScratchFile(options));
  OFFLOAD_ASSIGN_OR_RETURN(memory, proto::SharedMemory::Create("drive_benchmark", buffers_bytes));
  OFFLOAD_RETURN_IF_ERROR(memory.Allocate(0, buffers_bytes));
  buffers = {memory.data(), buffers_bytes};
  Random(/*seed=*/1).Fill(buffers);  // drives may compress, or leave zeros out
  const aio::OpenOptions io = {
      .engine = options.engine, .queue_depth = options.depth, .thread_count = options.depth};
  OFFLOAD_ASSIGN_OR_RETURN(device, aio::OpenDevice(file.release(), io));
  if (options.registers_buffers) device->RegisterBuffer(buffers);
  if (!options.has_store) return absl::OkStatus();
  if (options.checksums_on_thread) worker = std::make_unique<Worker>();
  OFFLOAD_ASSIGN_OR_RETURN(store, swap::Store::Create(options.pool, SpecOf(options), {.io = io}));
  if (options.registers_buffers) store->RegisterBuffer(buffers);
  return absl::OkStatus();
}

// Both places of every block, because what was never written is not read from the drive.
absl::Status DriveBenchmark::Impl::Fill() {
  DeviceTarget whole(device.get(), options.block_bytes, 0, 0);
  BlockRun fill(whole, Pattern::kWrite, 2 * BlocksIn(options), options.block_bytes);
  OFFLOAD_RETURN_IF_ERROR(
      fill.Once().For(options.fill_seconds_max, Buffers(options.depth)).status());
  block_count = std::max<uint64_t>(fill.transfers() / 2, 1);
  if (store == nullptr) return absl::OkStatus();
  StoreTarget safe(store.get(), nullptr, options.block_bytes);
  for (int half = 0; half < 2; ++half) {
    BlockRun fill_store(safe, Pattern::kWrite, BlocksIn(options), options.block_bytes);
    OFFLOAD_RETURN_IF_ERROR(
        fill_store.Once()
            .For(std::numeric_limits<double>::infinity(), Buffers(options.depth))
            .status());
  }
  return absl::OkStatus();
}

DriveBenchmark::DriveBenchmark(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DriveBenchmark::~DriveBenchmark() = default;

absl::StatusOr<std::unique_ptr<DriveBenchmark>> DriveBenchmark::Make(
    const DriveBenchmarkOptions& options) {
  if (!std::has_single_bit(options.block_bytes) || options.block_bytes < kBlockBytesMin ||
      options.block_bytes > kBlockBytesMax || BlocksIn(options) == 0 || options.depth == 0) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("blocks of ", FormatBytes(options.block_bytes), " in a file of ",
                                  FormatBytes(options.file_bytes)),
                     "Use a power of two from 4KiB to 16MiB, and at least two blocks");
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  OFFLOAD_RETURN_IF_ERROR(impl->Open());
  OFFLOAD_RETURN_IF_ERROR(impl->Fill());
  return std::unique_ptr<DriveBenchmark>(new DriveBenchmark(std::move(impl)));
}

// The device's blocks are read from one half of the file and written to the other; the halves trade
// places after each run, as the store's do.
absl::StatusOr<double> DriveBenchmark::Run(Through through, Pattern pattern, double seconds) {
  const DriveBenchmarkOptions& options = impl_->options;
  if (through == Through::kStore) {
    OFFLOAD_CHECK(impl_->store != nullptr);
    StoreTarget target(impl_->store.get(), impl_->worker.get(), options.block_bytes);
    const uint64_t extra = impl_->worker != nullptr ? kChecksumBlocks : 0;
    return BlockRun(target, pattern, impl_->block_count, options.block_bytes)
        .For(seconds, impl_->Buffers(options.depth + extra));
  }
  const uint64_t half_bytes = impl_->block_count * options.block_bytes;
  const bool second = std::exchange(impl_->reads_second_half, !impl_->reads_second_half);
  DeviceTarget target(impl_->device.get(), options.block_bytes, second ? half_bytes : 0,
                      second ? 0 : half_bytes);
  return BlockRun(target, pattern, impl_->block_count, options.block_bytes)
      .For(seconds, impl_->Buffers(options.depth));
}

uint64_t DriveBenchmark::file_bytes() const {
  return 2 * impl_->block_count * impl_->options.block_bytes;
}

std::string DriveBenchmark::engine() const { return std::string(impl_->device->engine()); }

absl::StatusOr<DriveRates> MeasureDrive(DriveBenchmarkOptions options, double seconds_per_pattern) {
  using Pattern = DriveBenchmark::Pattern;
  constexpr auto kDevice = DriveBenchmark::Through::kDevice;
  options.file_bytes = std::max(options.file_bytes, kMeasuredBytesMin);
  options.fill_seconds_max = seconds_per_pattern;
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<DriveBenchmark> benchmark,
                           DriveBenchmark::Make(options));
  DriveRates rates;
  rates.engine = benchmark->engine();
  rates.file_bytes = benchmark->file_bytes();
  OFFLOAD_ASSIGN_OR_RETURN(rates.read,
                           benchmark->Run(kDevice, Pattern::kRead, seconds_per_pattern));
  OFFLOAD_ASSIGN_OR_RETURN(rates.write,
                           benchmark->Run(kDevice, Pattern::kWrite, seconds_per_pattern));
  OFFLOAD_ASSIGN_OR_RETURN(rates.mixed,
                           benchmark->Run(kDevice, Pattern::kMixed, seconds_per_pattern));
  return rates;
}

}  // namespace offload::tools

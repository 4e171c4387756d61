#include "tools/drive_benchmark.h"

#include <fcntl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "swap/store.h"

namespace offload::tools {
namespace {

constexpr uint64_t kWeightBytes = 512 << 10;
constexpr uint64_t kStateBytes = 2560 << 10;
constexpr uint64_t kExtentBytes = kWeightBytes + kStateBytes;  // of one extent, all planes
constexpr size_t kDepth = 8;                                   // extents, each way

// Runs operations on one device until the time is over, then drains. A base of the patterns: they
// say what comes after what.
class Pattern {
 public:
  Pattern(aio::Device& device, const MappedRegion& memory, uint64_t file_bytes)
      : device_(device), memory_(memory), file_bytes_(file_bytes) {}
  virtual ~Pattern() = default;

  // Bytes per second, a final flush included.
  absl::StatusOr<double> Run(double seconds) {
    const double begin = Clock::Real().NowSeconds();
    end_ = begin + seconds;
    Begin();
    while (device_.in_flight() > 0) device_.Poll(/*wait=*/true);
    device_.Flush([this](absl::Status status) { Keep(std::move(status)); });
    while (device_.in_flight() > 0) device_.Poll(/*wait=*/true);
    OFFLOAD_RETURN_IF_ERROR(status_);
    return static_cast<double>(bytes_) / std::max(Clock::Real().NowSeconds() - begin, 1e-9);
  }
  uint64_t bytes() const { return bytes_; }

 protected:
  virtual void Begin() = 0;
  bool expired() const { return !status_.ok() || Clock::Real().NowSeconds() >= end_; }
  uint64_t extent_count() const { return file_bytes_ / kExtentBytes; }

  // Transfers part of a buffer that is one of 2 * kDepth, each of one extent.
  void Transfer(aio::Device::Kind kind, size_t buffer, uint64_t offset_bytes, uint64_t size_bytes,
                std::function<void()> next) {
    const iovec piece = {memory_.data() + buffer * kExtentBytes, size_bytes};
    auto done = [this, size_bytes, next = std::move(next)](absl::Status status) {
      if (status.ok()) bytes_ += size_bytes;
      Keep(std::move(status));
      next();
    };
    if (kind == aio::Device::Kind::kRead) {
      device_.Read(offset_bytes, {&piece, 1}, std::move(done));
    } else {
      device_.Write(offset_bytes, {&piece, 1}, std::move(done));
    }
  }

 private:
  void Keep(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  aio::Device& device_;
  const MappedRegion& memory_;
  const uint64_t file_bytes_;
  double end_ = 0;
  uint64_t bytes_ = 0;
  absl::Status status_;
};

// Whole extents in one direction, over and over or once.
class OneWay : public Pattern {
 public:
  OneWay(aio::Device& device, const MappedRegion& memory, uint64_t file_bytes,
         aio::Device::Kind kind, bool once)
      : Pattern(device, memory, file_bytes), kind_(kind), once_(once) {}

  uint64_t extents_done() const { return done_; }

 private:
  void Begin() override {
    for (size_t buffer = 0; buffer < 2 * kDepth; ++buffer) Next(buffer);
  }
  void Next(size_t buffer) {
    if (expired() || (once_ && next_ == extent_count())) return;
    const uint64_t offset_bytes = next_++ % extent_count() * kExtentBytes;
    Transfer(kind_, buffer, offset_bytes, kExtentBytes, [this, buffer] {
      ++done_;
      Next(buffer);
    });
  }

  const aio::Device::Kind kind_;
  const bool once_;
  uint64_t next_ = 0, done_ = 0;
};

// Extents are read from one half of the file and written to the other, as between the two places of
// a store.
class StepMix : public Pattern {
 public:
  using Pattern::Pattern;

 private:
  using Kind = aio::Device::Kind;

  void Begin() override {
    for (size_t buffer = 0; buffer < 2 * kDepth; ++buffer) free_.push_back(buffer);
    StartReads();
  }

  // State and weight for the update, and the weight once more for backward.
  void StartReads() {
    while (reading_ < kDepth && !free_.empty() && !expired()) {
      const size_t buffer = free_.front();
      free_.pop_front();
      ++reading_;
      const uint64_t offset_bytes = next_read_++ % half() * kExtentBytes;
      parts_[buffer] = 3;
      const auto done = [this, buffer] {
        if (--parts_[buffer] == 0) ReadDone(buffer);
      };
      Transfer(Kind::kRead, buffer, offset_bytes + kWeightBytes, kStateBytes, done);
      Transfer(Kind::kRead, buffer, offset_bytes, kWeightBytes, done);
      Transfer(Kind::kRead, buffer, offset_bytes, kWeightBytes, done);
    }
  }
  void ReadDone(size_t buffer) {
    --reading_;
    ready_.push_back(buffer);
    StartWrites();
    StartReads();
  }
  void StartWrites() {
    while (writing_ < kDepth && !ready_.empty()) {
      const size_t buffer = ready_.front();
      ready_.pop_front();
      ++writing_;
      const uint64_t offset_bytes = (half() + next_write_++ % half()) * kExtentBytes;
      Transfer(Kind::kWrite, buffer, offset_bytes, kExtentBytes, [this, buffer] {
        --writing_;
        free_.push_back(buffer);
        StartWrites();
        StartReads();
      });
    }
  }
  uint64_t half() const { return extent_count() / 2; }

  std::deque<size_t> free_, ready_;
  std::array<int, 2 * kDepth> parts_ = {};  // reads of a buffer's extent that are outstanding
  size_t reading_ = 0, writing_ = 0;
  uint64_t next_read_ = 0, next_write_ = 0;
};

absl::StatusOr<UniqueFd> MakeScratchFile(const std::string& pool, uint64_t file_bytes) {
  OFFLOAD_RETURN_IF_ERROR(swap::CheckPool(pool));
  struct statvfs space = {};
  const uint64_t free_bytes =
      statvfs(pool.c_str(), &space) == 0 ? space.f_bavail * space.f_frsize : 0;
  if (free_bytes < file_bytes) {
    return MakeError(ErrorId::kPoolFull,
                     absl::StrCat("a scratch file of ", FormatDecimalBytes(file_bytes), " in ",
                                  pool, ", where ", FormatDecimalBytes(free_bytes), " are free"));
  }
  UniqueFd file(open(pool.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600));
  const int error =
      file.valid() ? posix_fallocate(file.get(), 0, static_cast<off_t>(file_bytes)) : errno;
  if (error == 0) return file;
  return MakeError(error == ENOSPC ? ErrorId::kPoolFull : ErrorId::kPoolNotUsable,
                   absl::StrCat("a scratch file in ", pool, ": ", ErrnoText(error)));
}

}  // namespace

absl::StatusOr<DriveRates> MeasureDrive(const std::string& pool,
                                        const DriveBenchmarkOptions& options) {
  using Kind = aio::Device::Kind;
  const uint64_t file_bytes =
      std::max(options.file_bytes, kSmallestScratchBytes) / (2 * kExtentBytes) * 2 * kExtentBytes;
  OFFLOAD_ASSIGN_OR_RETURN(UniqueFd file, MakeScratchFile(pool, file_bytes));
  OFFLOAD_ASSIGN_OR_RETURN(
      const std::unique_ptr<aio::Device> device,
      aio::OpenDevice(file.release(), {.engine = options.engine, .queue_depth = 8 * kDepth}));
  OFFLOAD_ASSIGN_OR_RETURN(MappedRegion memory, MappedRegion::Anonymous(2 * kDepth * kExtentBytes));
  Random(/*seed=*/1).Fill(memory.span());  // drives may compress, or leave zeros out
  memory.UseHugePages(0, memory.size());   // as the daemon's slab
  device->RegisterBuffer(memory.span());

  // Unwritten blocks are read without the drive, and are slower to write: only what is filled
  // counts.
  OneWay fill(*device, memory, file_bytes, Kind::kWrite, /*once=*/true);
  OFFLOAD_RETURN_IF_ERROR(fill.Run(options.seconds_per_pattern).status());
  DriveRates rates;
  rates.engine = std::string(device->engine());
  rates.file_bytes = std::max<uint64_t>(fill.extents_done() / 2 * 2, 2) * kExtentBytes;
  OneWay read(*device, memory, rates.file_bytes, Kind::kRead, /*once=*/false);
  OFFLOAD_ASSIGN_OR_RETURN(rates.read, read.Run(options.seconds_per_pattern));
  OneWay write(*device, memory, rates.file_bytes, Kind::kWrite, /*once=*/false);
  OFFLOAD_ASSIGN_OR_RETURN(rates.write, write.Run(options.seconds_per_pattern));
  StepMix mix(*device, memory, rates.file_bytes);
  OFFLOAD_ASSIGN_OR_RETURN(rates.mixed, mix.Run(options.seconds_per_pattern));
  return rates;
}

}  // namespace offload::tools

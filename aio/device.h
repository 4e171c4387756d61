// aio/device.h
//
// Reads and writes sectors of one file, asynchronously. The engines (io_uring, libaio, thread pool,
// memory) stand behind it and differ only in how an operation reaches the kernel.
//
// Invariants
//   * An operation's buffers belong to the device from the call until its callback has begun.
//   * Every operation completes exactly once, also when the device is closed: the destructor waits
//   for all of them.
//   * A completion is whole or an error, never a short success: short transfers, EAGAIN and EINTR
//   are handled inside, bounded.
//   * A completed write is not durable until a Flush() called after its completion has completed.
//   * Callbacks run only inside Poll(), on the thread that calls it. A callback may start further
//   operations; it must neither
//     call Poll() nor destroy the device.
//
// Thread safety: one thread per Device. counters() and in_flight() may be read from any thread.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "aio/latency_histogram.h"

namespace offload::aio {

// Both properties matter apart: the memory alignment can be smaller than the offset alignment
// (reliability: 4Kn loop devices).
struct Geometry {
  uint64_t size_bytes = 0;
  uint32_t offset_alignment = 4096;  // of offsets and lengths
  uint32_t memory_alignment = 4096;  // of buffer addresses

  // Writes that are multiples of this never make a drive of 4 KiB sectors read, merge and write
  // back.
  uint32_t write_alignment() const { return std::max<uint32_t>(4096, offset_alignment); }
};

// Operations and bytes that completed without error, with the time from the call to the completion;
// and one counter for each kind of trouble: operations that ended with an error, operations that
// were refused by the checks, calls that had to be repeated after EAGAIN or EINTR, and calls that
// moved fewer bytes than they were asked to. Wrong checksums are counted where they are seen.
struct Counters {
  std::atomic<uint64_t> reads{0}, writes{0}, flushes{0};
  std::atomic<uint64_t> read_bytes{0}, written_bytes{0};
  std::atomic<uint64_t> read_errors{0}, write_errors{0}, flush_errors{0};
  std::atomic<uint64_t> refusals{0}, retries{0}, short_transfers{0};
  LatencyHistogram read_latency, write_latency, flush_latency;
};

class Device {
 public:
  using Done = std::function<void(absl::Status)>;
  enum class Kind : uint8_t { kRead, kWrite, kFlush };

  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Start one transfer of all bytes of `pieces` (in order) at `offset_bytes`. Offset, each piece's
  // length and address must be aligned (geometry()) and inside the file: otherwise `done` gets
  // INVALID_ARGUMENT in the next Poll. The pieces array is copied; the bytes that it points to are
  // lent. At most kMaxPieces pieces.
  void Read(uint64_t offset_bytes, std::span<const iovec> pieces, Done done);
  void Write(uint64_t offset_bytes, std::span<const iovec> pieces, Done done);

  // Makes durable all writes whose callbacks have begun before this call. The first failed flush is
  // final: the caller must stop.
  void Flush(Done done);

  // Hands queued operations to the kernel and runs the callbacks of completed ones; returns how
  // many ran. With `wait`, blocks until at least one has run, unless nothing is in flight.
  virtual size_t Poll(bool wait) = 0;

  // Readable when Poll(false) would run a callback. Owned by the device; -1 for a device that
  // completes only in Poll.
  virtual int event_fd() const = 0;

  // Makes the file longer, its space reserved, or shorter; geometry() follows. Nothing may be in
  // flight behind the new end. Blocking, but writes no data. OFD-1204 when there is no room, with
  // the file as long as it was; UNIMPLEMENTED for a device whose length is fixed.
  virtual absl::Status Resize(uint64_t size_bytes);

  virtual const Geometry& geometry() const = 0;
  virtual std::string_view engine() const = 0;  // "uring", "libaio", "threads", "memory"

  // A hint that many transfers will use these bytes: an engine may keep their pages pinned, so that
  // the kernel does not look them up for each. They must have their pages, and stay mapped where
  // they are until the device is gone. Never fails, changes no result, and may block for some
  // seconds where the limit of pinned memory is still used up by what was given back just now.
  virtual void RegisterBuffer(std::span<std::byte> bytes) {}
  virtual uint64_t registered_bytes() const { return 0; }

  size_t in_flight() const { return in_flight_; }
  const Counters& counters() const { return counters_; }

  static constexpr size_t kMaxPieces = 64;

 protected:
  Device() = default;
  struct Op {
    Kind kind;
    uint64_t offset_bytes = 0;
    uint64_t size_bytes = 0;  // of all pieces
    std::vector<iovec> pieces;
    Done done;
    int64_t called_at_nanoseconds = 0;
  };
  // Takes a checked operation. Must call Complete() for it exactly once, inside Poll().
  virtual void Start(std::unique_ptr<Op> op) = 0;
  void Complete(std::unique_ptr<Op> op, absl::Status status);

  // Completes operations that were refused by the checks; every Poll() begins with it.
  size_t CompleteRefused();

  // Makes event_fd() readable, because an operation was refused.
  virtual void SignalReady() {}

  // Polls until nothing is in flight; the first line of every engine's destructor. Operations that
  // callbacks start meanwhile are refused with CANCELLED.
  void Drain();

  std::atomic<size_t> in_flight_{0};  // changed by the device's thread only
  Counters counters_;

 private:
  void Submit(Kind kind, uint64_t offset_bytes, std::span<const iovec> pieces, Done done);
  absl::Status Check(const Op& op) const;
  void CountCompleted(const Op& op, const absl::Status& status);
  void Finish(std::unique_ptr<Op> op, absl::Status status);

  struct Refused {
    std::unique_ptr<Op> op;
    absl::Status status;
  };
  std::vector<Refused> refused_;
  bool draining_ = false;
};

enum class Engine { kAuto, kUring, kLibaio, kThreads };

// "auto", "uring", "libaio", "threads": in flags, messages and the environment.
std::string_view EngineName(Engine engine);
std::optional<Engine> EngineOfName(std::string_view name);
inline constexpr std::string_view kEngineNames = "auto, uring, libaio or threads";

struct OpenOptions {
  Engine engine = Engine::kAuto;
  uint32_t queue_depth = 64;
  uint32_t thread_count = 8;  // of the thread pool engine
};

// Opens a device over an open file (O_RDWR|O_DIRECT, regular, at its final size; the device
// duplicates nothing and takes ownership of `fd`). kAuto probes io_uring, then libaio, then
// threads; the choice and its reason are in `engine()` and `reason`, and each is logged the first
// time that a process meets it, a fallback as a warning. An engine asked for by name that cannot be
// had is OFD-1211, never a fallback. The environment variable OFFLOADD_IO=uring|libaio|threads is
// such a name where the options say kAuto. `fd` is closed also on failure. May block for some
// seconds where the user's limit of locked memory is used up (uring_ring.h).
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(int fd, const OpenOptions& options,
                                                   std::string* reason = nullptr);

}  // namespace offload::aio

// accelerator/host_accelerator.h
//
// The stand-in for a GPU: host memory, streams as queues, and a scheduler that is a function of a
// seed. It executes commands late, in any order that streams and events allow, and judges whether
// the order was asked for.
//
// The checker keeps vector clocks: one counter per stream and one for the host. An access is in
// order when every conflicting access before it is in its clock: through its own stream, through
// events that its stream has waited for, or through events that the host knew to be done when it
// submitted the command. So a missing wait is found in every run, whether or not the race is lost.
// All host threads together are one clock; the thread sanitizer looks after those.
//
// Reported as violations
//   * an access to device memory, or to a host range that a copy uses, which no event orders after
//     the accesses that it conflicts with
//   * a copy from or to memory that is not registered, not allocated, or was freed
//   * a host range whose bytes changed under a copy
//   * memory freed, or a registration given back, while a command may still use it
//   * a command on a stream that is being captured, a wait that can never end
//
// A copy fills its target with 0xFF, NaN in every dtype, at some time before the bytes arrive.
//
// Time passes by copies alone, one at a time: each takes its bytes over kCopiedBytesPerSecond.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "accelerator/accelerator.h"
#include "accelerator/peers.h"
#include "accelerator/sums.h"
#include "accelerator/timing.h"
#include "base/random.h"

namespace offload::accelerator {

// When commands execute.
enum class Pace : uint8_t {
  kEager,   // as soon as streams and events allow
  kRandom,  // some at each call, as the seed says
  kLate,    // when the host waits for them, and no sooner
};

class HostAccelerator final : public Accelerator,
                              public PeerDevice,
                              public SummingDevice,
                              public TimingDevice {
 public:
  static constexpr double kCopiedBytesPerSecond = 10e9;

  struct Options {
    uint64_t seed = 1;
    Pace pace = Pace::kRandom;
    // EventQuery says yes only to what the host has waited for: a device that is always late, and
    // the same in every run. Otherwise a poll may find done what nobody has waited for.
    bool queries_are_late = false;
    bool registers_read_only = true;   // HostRegister with kReadOnly
    bool registers_read_write = true;  // and with kReadWrite
    uint64_t memory_bytes = uint64_t{1} << 30;
    uint64_t failing_copy = 0;  // the n-th copy breaks the device; 0: none
    std::string peer_address;   // differs from that of every other device; "": it reaches none
  };
  struct Counters {
    uint64_t synchronizes = 0;  // EventSynchronize: the host waits
    uint64_t waits = 0;         // StreamWaitEvent
    uint64_t copies_to_device = 0, copies_to_host = 0;
    uint64_t bytes_to_device = 0, bytes_to_host = 0;
    uint64_t allocated_bytes_max = 0;   // at once
    uint64_t pageable_copies = 0;       // of others (CountCopy), where the host's end was pageable
    uint64_t copies_under_way_max = 0;  // submitted and not executed, at once
    uint64_t collectives = 0;           // gathers that have begun
    uint64_t exchanges = 0;             // of slices, the same
  };

  explicit HostAccelerator(const Options& options);
  ~HostAccelerator() override;

  std::string Name() const override { return "stand-in"; }
  Peers* peers() override { return peers_.get(); }
  absl::StatusOr<MemoryInfo> MemGetInfo() override;
  absl::StatusOr<std::byte*> Malloc(size_t size_bytes) override;
  absl::Status Free(std::byte* bytes) override;
  absl::StatusOr<bool> HostRegister(const std::byte* bytes, size_t size_bytes,
                                    HostAccess access) override;
  absl::Status HostUnregister(const std::byte* bytes) override;
  absl::StatusOr<Stream> StreamCreate() override;
  absl::Status StreamDestroy(Stream stream) override;
  absl::StatusOr<bool> StreamIsCapturing(Stream stream) override;
  absl::StatusOr<Event> EventCreate() override;
  absl::Status EventDestroy(Event event) override;
  absl::Status EventRecord(Event event, Stream stream) override;
  absl::Status StreamWaitEvent(Stream stream, Event event) override;
  absl::StatusOr<bool> EventQuery(Event event) override;
  absl::Status EventSynchronize(Event event) override;
  absl::Status MemcpyToDevice(std::byte* device, const std::byte* host, size_t size_bytes,
                              Stream stream) override;
  absl::Status MemcpyToHost(std::byte* host, const std::byte* device, size_t size_bytes,
                            Stream stream) override;
  absl::Status Memset(std::byte* device, uint8_t value, size_t size_bytes, Stream stream) override;
  absl::Status Update(const kernels::OptimizerSpec& optimizer, int64_t step,
                      const kernels::DeviceRun& run, Stream stream) override;
  absl::Status AddParts(const kernels::DeviceSum& sum, Stream stream) override;
  absl::StatusOr<Event> TimedEventCreate() override { return EventCreate(); }
  absl::StatusOr<std::optional<double>> SecondsBetween(Event begin, Event end) override;
  void NoteUse(Stream stream, Use use, const std::byte* device, size_t size_bytes) override;
  void NoteHostUse(Use use, const std::byte* bytes, size_t size_bytes) override;

  // What only a stand-in can do.

  // An operator: `kernel` runs when the stream gets there. Its accesses are to be noted first.
  void Launch(Stream stream, std::function<void()> kernel);
  // The same as soon as `is_ready` says so, which others decide: an event that stands for it may
  // be waited for, and is not done before.
  void LaunchWhenReady(Stream stream, std::function<bool()> is_ready, std::function<void()> kernel);
  void SetCapturing(Stream stream, bool capturing);
  // Executes everything that can be executed; the host learns nothing by it.
  void RunAll();
  // Executes what the stream has been given, and what that waits for; the host learns nothing by
  // it. For kernels that run on the calling thread.
  void RunStream(Stream stream);
  // As cudaFreeAsync: gives memory back behind what `stream` has been given so far, and that has to
  // come after every use of it.
  void FreeAsync(std::byte* bytes, Stream stream);
  // As if the device were of this size from now on, or so much of it were somebody else's.
  void SetMemoryBytes(uint64_t memory_bytes);
  // Others copy between the device and this memory of the host.
  void CountCopy(const std::byte* host, size_t size_bytes);
  void CountCollective();
  void CountExchange();
  // Reports a finding of one's own.
  void AddViolation(const std::string& finding);
  // Runs everything and returns what was found: "finding (how many times)".
  std::vector<std::string> Violations();
  // Memory, registrations, streams and events that nobody has given back.
  std::vector<std::string> Leftovers() const;
  Counters counters() const;

 private:
  using Clock = std::vector<uint64_t>;  // by index: 0 the host, then the streams

  struct Access {
    const std::byte* begin;
    const std::byte* end;
    Use use;
    size_t index;
    uint64_t count;
  };
  // What an event stands for since it was recorded.
  struct Record {
    bool is_done = false;
    Clock clock;
    double seconds = 0;  // when it was
  };
  struct Command {
    std::function<void()> run;                 // under the lock
    std::shared_ptr<const Record> waited_for;  // null: may run at once
    std::function<bool()> is_ready;            // none: it is
  };
  struct StreamState {
    std::deque<Command> commands;
    Clock clock;
    bool is_capturing = false;
    bool is_destroyed = false;
  };
  static constexpr size_t kHost = 0;
  static size_t IndexOf(Stream stream) { return stream.handle + 1; }

  StreamState& StateOf(Stream stream);
  void Submit(Stream stream, std::function<void()> run,
              std::shared_ptr<const Record> waited_for = nullptr);
  bool RunOne();
  bool RunOneOrWait(std::unique_lock<std::mutex>& lock);
  void RunTo(Stream stream, std::unique_lock<std::mutex>& lock);
  void Forget(std::map<const std::byte*, size_t>::iterator allocation, bool is_unused);
  void Advance();
  absl::Status Broken() const;
  void Copy(std::byte* to, const std::byte* from, size_t size_bytes, Stream stream, bool to_device);
  void Check(size_t index, Use use, const std::byte* bytes, size_t size_bytes);
  static bool IsInside(const std::map<const std::byte*, size_t>& ranges, const std::byte* bytes,
                       size_t size_bytes);
  void CheckRange(const std::map<const std::byte*, size_t>& ranges, const std::byte* bytes,
                  size_t size_bytes, const char* finding);
  void CheckRun(const kernels::OptimizerSpec& optimizer, const kernels::DeviceRun& run,
                Stream stream);
  // Reports uses that `known` does not cover; whether there are none.
  bool CheckUnused(const std::byte* bytes, size_t size_bytes, const Clock& known,
                   const char* finding);
  void Report(const std::string& finding);
  static void Join(Clock* clock, const Clock& other);
  static uint64_t At(const Clock& clock, size_t index);

  const Options options_;
  mutable std::mutex mutex_;
  Random random_;
  std::vector<std::unique_ptr<StreamState>> streams_;  // by handle
  std::map<uintptr_t, std::shared_ptr<Record>> events_;
  uintptr_t next_event_ = 1;
  std::map<const std::byte*, size_t> allocations_, registrations_;
  // Memory that commands may still use, which wait for others: kept, so that a mistake that is
  // reported does not end the process.
  std::vector<const std::byte*> freed_in_use_;
  uint64_t memory_bytes_, allocated_bytes_ = 0;
  std::vector<Access> accesses_;
  Clock host_clock_;
  std::map<std::string, int> violations_;
  bool is_broken_ = false;
  uint64_t copies_ = 0, copies_under_way_ = 0;
  double seconds_ = 0;
  Counters counters_;
  std::unique_ptr<Peers> peers_;
};

}  // namespace offload::accelerator
